"""The command line: one file per command, found by file name and imported when used."""

import os
import pkgutil
import sys
from importlib import import_module
from typing import Any

import click


class Commands(click.Group):
    """Loads ``precaudit/cli/<name>.py`` for command ``<name>``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the file names."""
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None when there is no such file."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Name the nearest command when there is none of that name."""
        from precaudit.errors import UserError, nearest

        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise UserError(f"no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PRECAUDIT"})
@click.version_option(package_name="precaudit")
def cli() -> None:
    """Numerical precision audit for transformers in JAX.

    Record a model's intermediate values, compare every one with FP64, and read which are off, by how much, and whether
    rounding explains it.
    """


def main() -> None:
    """Run the command line and exit with the codes of docs/design.md §6."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``precaudit ARGUMENTS`` and return its exit code."""
    from precaudit.errors import PrecauditError

    try:
        code = cli.main(args=arguments, prog_name="precaudit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"precaudit: {error.format_message()}", err=True)
        return 2
    except PrecauditError as error:
        click.echo(f"precaudit: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("precaudit: interrupted", err=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _system(error)
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo("precaudit: this is our own fault; please report it with the lines above", err=True)
        return 70


def _system(error: OSError) -> int:
    """Say what the operating system refused: no space, no permission, a file that vanished."""
    where = f"{error.filename}: " if error.filename else ""
    click.echo(f"precaudit: {where}{error.strerror or error}; what was written so far is partial", err=True)
    return 2
