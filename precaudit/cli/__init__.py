"""The command line: one file per command, found by file name and imported when used."""

import codecs
import errno
import io
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import click

from precaudit.cli._groups import GROUPS
from precaudit.numbers.bytes_text import bytes_text

COMPLETE = "_PRECAUDIT_COMPLETE"  # what click's shell completion calls the program with
SPELT = {
    "×": "x",
    "·": "*",
    "…": "...",
    "–": "-",
    "—": "-",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "σ": "sigma",
    "²": "^2",
    "‖": "||",
    "√": "sqrt",
    "→": "->",
    "°": "deg",
    "’": "'",
    "“": '"',
    "”": '"',
    "±": "+-",
    "−": "-",
    "γ": "gamma",
    "ₙ": "n",
    "Σ": "sum",
    "δ": "delta",
    "µ": "u",
    "½": "1/2",
    "⁻": "^-",
    "✓": "ok",
    "✗": "x",
    "⟨": "<",
    "⟩": ">",
    "⌊": "floor(",
    "⌋": ")",
    "ê": "E",
    "ρ": "rho",
}


class Commands(click.Group):
    """Loads ``precaudit/cli/<name>.py`` for command ``<name>``."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the file names."""
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None when there is no such file."""
        if cmd_name not in self.list_commands(ctx):
            return None
        from precaudit.cli._examples import epilog

        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        command.name, command.epilog = cmd_name, epilog(cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, a line each."""
        names = self.list_commands(ctx)
        wide = max(map(len, names))
        grouped = {name for its in GROUPS.values() for name in its}
        for title, its in {**GROUPS, "Others": [n for n in names if n not in grouped]}.items():
            commands = [(name, self.get_command(ctx, name)) for name in its]
            limit = formatter.width - 6 - wide
            rows = [(name.ljust(wide), c.get_short_help_str(limit)) for name, c in commands if c is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Name the nearest command when there is none of that name."""
        from precaudit.errors import UserError, nearest

        completing = ctx.resilient_parsing
        if args and not completing and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise UserError(f"no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or completing:
            return name, command, rest
        from precaudit.cli._spellings import current_spelling

        rest, said = current_spelling(command, rest)
        for line in said:
            click.echo(f"note: {line}", err=True)
        return name, command, rest


@click.group(
    cls=Commands,
    subcommand_metavar="COMMAND [ARGS]",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PRECAUDIT"},
)
@click.version_option(package_name="precaudit")
def cli() -> None:
    """Numerical precision audit for transformers in JAX.

    Record a model's intermediate values, compare every one with FP64, and read which are wrong, by how much, and
    whether rounding explains it.
    """


def main() -> None:
    """Run the command line and exit with the codes of docs/exit-codes.md."""
    codecs.register_error("precaudit", _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="precaudit")
    sys.unraisablehook = _interrupt_again
    code = run(sys.argv[1:])
    hosts = sys.modules.get("precaudit.recording.runs.hosts")
    if hosts is not None and (code or hosts.STATUS in os.environ) and hosts.hosts_here().several:
        if code:
            hosts.hosts_here().leave(code)  # the others may wait for what does not come
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        hosts.tell_parent(b"done")
    sys.exit(code)


def _interrupt_again(caught: "sys.UnraisableHookArgs") -> None:
    """Interrupt once more where Ctrl-C came in a callback whose exceptions Python ignores, such as JAX's of gc."""
    if not issubclass(caught.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(caught)
        return
    import signal
    import threading

    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def _spelt(error: UnicodeError) -> tuple[str, int]:
    """Spell what a terminal's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(SPELT.get(c, "?") for c in text), error.end


def run(arguments: list[str]) -> int:
    """Run ``precaudit ARGUMENTS`` and return its exit code."""
    from precaudit.errors import PrecauditError, ToldElsewhere, enough_memory
    from precaudit.interpreters.tpu.environment import allow_libtpu
    from precaudit.numbers.allocation import share_freed_memory

    allow_libtpu()
    share_freed_memory()

    try:
        with enough_memory(), _in_buckets(arguments) as args:
            code = cli.main(args=args, prog_name="precaudit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.NoSuchOption as error:
        from precaudit.cli._spellings import unknown_option

        click.echo(f"precaudit: {unknown_option(error)}", err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"precaudit: {error.format_message()}", err=True)
        return 2
    except PrecauditError as error:
        from precaudit.reports.escaping import terminal_line

        if not isinstance(error, ToldElsewhere):
            click.echo(f"precaudit: {terminal_line(str(error))}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _exit_interrupted()
    except (BrokenPipeError, SystemExit) as error:  # click exits with 1, a verdict's code, where nobody reads on
        completed = isinstance(error, SystemExit) and error.code == 0 and COMPLETE in os.environ
        return 0 if completed else _unread()
    except OSError as error:
        return _system(error)
    except Exception as error:
        if _holds_interrupt(error):  # an import that Ctrl-C broke into raises what it likes
            return _exit_interrupted()
        import traceback

        traceback.print_exc()
        click.echo("precaudit: this is our own fault; please report it with the lines above", err=True)
        return 70


@contextmanager
def _in_buckets(arguments: list[str]) -> Iterator[list[str]]:
    """Yield arguments with paths here in place of URLs; what the command wrote there is in the buckets after it."""
    from precaudit.errors import PrecauditError
    from precaudit.mirrors import commit_all

    args = arguments
    if any("://" in word for word in arguments):
        from precaudit.cli._urls import paths_for

        args = paths_for(arguments)
    try:
        yield args
    except PrecauditError:
        with suppress(PrecauditError):
            commit_all()
        raise
    commit_all()


def _exit_interrupted() -> int:
    click.echo("precaudit: interrupted", err=True)
    return 130


def _unread() -> int:
    """Leave quietly when the reader of a pipe has gone, with the code of a process that SIGPIPE ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 141


def _holds_interrupt(error: BaseException | None) -> bool:
    """Whether an exception came of Ctrl-C."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _system(error: OSError) -> int:
    """Say what the operating system refused: no space, no permission, a file that vanished."""
    where = f"{error.filename}: " if error.filename else ""
    left = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename:
        with suppress(OSError):
            free = shutil.disk_usage(os.path.dirname(error.filename) or ".").free
            left = f" ({bytes_text(free)} are left there)"
    click.echo(f"precaudit: {where}{error.strerror or error}{left}; what was written so far is partial", err=True)
    return 2
