"""``watch``: a command run as it is, what it jitted, and calls of it recorded, compared and judged."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from precaudit.errors import CannotJudge, UserError, nearest
from precaudit.numbers.bytes_text import parse_bytes
from precaudit.recording.runs.folders import check_folder
from precaudit.recording.runs.programs import is_program_run, open_program_run
from precaudit.recording.watching.calls import LAST, LOWERED
from precaudit.recording.watching.records import Picking, SeenFunction, SeenRun, SeenScript, WatchedCommand, WatchOrder
from precaudit.schema.records.base import value
from precaudit.writing import temporary

PYTHON = ("python", "pypy")  # what the name of an interpreter begins with
TAKING = ("-X", "-W")  # options of Python that take a value
PACKAGE = "import importlib.util as u, sys; sys.exit(not u.find_spec('precaudit'))"
READ = ("XLA_", "JAX_", "LIBTPU_")  # what the variables begin with that change what is computed


@dataclass(frozen=True)
class Watched:
    """What was seen of a command: its exit code, the functions that it jitted, runs of calls, and what was not seen.

    ``code``: the script's own; ``seen``: None where the script's process ended before anything could be told;
    ``output``: where its runs were to go.
    """

    command: tuple[str, ...]
    code: int
    seen: SeenScript | None
    output: Path | None = None

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs that were recorded."""
        if self.seen is not None:
            return [Path(r.folder) for r in self.seen.runs]
        there = [] if self.output is None else [self.output, *sorted(self.output.glob("[0-9]*"))]
        return [p for p in there if is_program_run(p)]

    @property
    def functions(self) -> list[SeenFunction]:
        """The jitted functions that were called, by themselves or within others, those that took most time first."""
        every = () if self.seen is None else self.seen.functions
        return sorted((f for f in every if f.calls or f.within or f.unseen), key=lambda f: -value(f.seconds))


def watch(
    command: Sequence[str],
    *,
    function: str | None = None,
    calls: str | None = None,
    output: Path | str | None = None,
    layers: str | None = None,
    points: str | None = None,
    positions: str | None = None,
    most: str | None = None,
    compare: bool = True,
    model: str | None = None,
    diagnose: bool = False,
    force: bool = False,
    folder: Path | str | None = None,
    aside: bool = False,
) -> Watched:
    """Run a command that runs Python, unedited, and return what it jitted.

    ``command``: ``["python", "serve.py"]``, ``["python", "-m", "package"]`` or a console script. ``function``: NAME or
    NAME:FILE of the jitted function whose calls are recorded; ``calls``: which, ``"0,2:4"``, ``"-1"`` the last (None:
    the first of every shape). ``output``: the folder of the run; a folder in it for each where they are several.
    ``layers``, ``points``, ``positions`` (of the calls that are recorded): filters, as of ``trace``; ``most``: bytes
    that may be recorded, ``"8GB"``; ``model``: whose reference they are compared with, as ``compare`` takes it;
    ``diagnose``: runs that fail are diagnosed, too. ``folder``: where it is run (None:
    here); ``aside``: its output goes to stderr.

    The script's output and exit code are its own. Raises UserError where the command runs no Python, its Python has no
    precaudit, or the folder holds a run.
    """
    if function is not None and output is None:
        raise UserError("watch: --function needs -o RUN, the folder that its calls are recorded in")
    where = Path.cwd() if folder is None else Path(folder).resolve()
    python, rest = script_command(command, where)
    name, _, file = (function or "").partition(":")
    picked = Picking(
        name=name, file=file, calls=tuple(call_numbers(calls)), layers=layers, points=points, positions=positions
    )
    allowed = None if most is None else parse_bytes(most, "--most")
    if model is not None:
        model = _model_folder(model)
    if output is not None:
        _clear(Path(output), force)  # before the script, which may run for hours
    said = "precaudit watch -- " + " ".join(command)
    with tempfile.TemporaryDirectory() as told:
        order = WatchOrder(
            picked=picked,
            command=_described(python, rest, picked, where),
            compare=compare,
            diagnose=diagnose,
            model=model,
            force=force,
            most=allowed,
            output=None if output is None else str(Path(output).resolve()),
            result=str(Path(told) / "seen.json"),
            said=said,
        )
        code, seen = _run(python, rest, order, where, sys.stderr.fileno() if aside else None)
    found = Watched(tuple(command), code, seen, None if output is None else Path(output).resolve())
    if name and found.seen is not None and code == 0:
        _check_called(found, name, file)
    return found


def _model_folder(model: str) -> str:
    """Return where a model's files are, wherever the command is run; raises UserError before it is run."""
    from precaudit.models.checkpoints import open_checkpoint

    there = Path(model).expanduser()
    said = str(there.resolve()) if there.exists() else model
    open_checkpoint(said)
    return said


def rerun(
    run: Path | str,
    accum: Sequence[str] = (),
    model: str | None = None,
    diagnose: bool = False,
    values: Path | None = None,
    beside: tuple[Path, Path] | None = None,
) -> SeenRun:
    """Run the command again that made a watched run's calls, and compare them with FP64 in its process.

    Return what was seen of the run; ``diagnose``: with what is said of it where it fails. ``values``: do not compare
    it, but write its FP64 values into this file; ``beside``: nor that, but hold them against the tensors of one file,
    and write what is found into the other.

    Its output goes to stderr. Raises UserError where the script, its environment or what it gave the calls is another
    than it was, CannotJudge where it did not come so far.
    """
    opened = open_program_run(run)
    model = None if model is None else _model_folder(model)
    command = opened.record.watched
    if command is None:
        raise UserError(f"{run} was not recorded by watch: give its program with --program")
    where = Path(command.folder)
    now = _described(*_split(command.words), command.picked, where)
    if changed := [what for what, a, b in _pairs(command, now) if a != b]:
        raise UserError(f"{run}: {' and '.join(changed)} changed since it was recorded: watch it again")
    python, rest = _split(command.words)
    with tempfile.TemporaryDirectory() as folder:
        order = WatchOrder(
            picked=command.picked,
            command=command,
            output=None,
            result=str(Path(folder) / "seen.json"),
            again=str(Path(run).resolve()),
            accum=tuple(accum),
            model=model,
            diagnose=diagnose,
            values="" if values is None else str(values),
            beside="" if beside is None else str(beside[0].resolve()),
            answer="" if beside is None else str(beside[1]),
        )
        code, seen = _run(python, rest, order, where, sys.stderr.fileno())
    done = [] if seen is None else [r for r in seen.runs if r.compared]
    if not done:
        notes = () if seen is None else seen.notes
        why = "; ".join(notes) or f"its calls did not run (exit code {code})"
        raise CannotJudge(f"{run}: {' '.join(command.words)}: {why}")
    return done[0]


def _run(
    python: Sequence[str], rest: Sequence[str], order: WatchOrder, folder: Path, out: int | None = None
) -> tuple[int, SeenScript | None]:
    """Run a script in a process that is told what to record of it; return its exit code, and what was seen."""
    if subprocess.run([*python, "-c", PACKAGE], check=False, cwd=folder).returncode:
        raise UserError(f"{python[0]} has no precaudit: install it beside the script (pip install precaudit)")
    result = Path(order.result)
    told = result.with_name("order.json")
    told.write_bytes(msgspec.json.encode(order))
    words = [*python, "-m", "precaudit.workflows.watched", str(told), *rest]
    with subprocess.Popen(words, cwd=folder, stdout=out) as child:
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:  # the script has it, too, and says what becomes of it
                continue
    seen = msgspec.json.decode(result.read_bytes(), type=SeenScript) if result.is_file() else None
    return code if code >= 0 else 128 - code, seen


def _described(python: Sequence[str], rest: Sequence[str], picked: Picking, folder: Path) -> WatchedCommand:
    """Return a command with what tells whether it is the same another time."""
    script = None if rest[0] == "-m" else folder / rest[0]
    if script is not None and not script.is_file():
        raise UserError(f"{script}: no such file")
    return WatchedCommand(
        words=(*python, *rest),
        folder=str(folder),
        picked=picked,
        script=None if script is None else hashlib.sha256(script.read_bytes()).hexdigest(),
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(READ)},
    )


def _pairs(then: WatchedCommand, now: WatchedCommand) -> list[tuple[str, object, object]]:
    script = _split(then.words)[1][0]
    variables = sorted(then.environment.keys() | now.environment.keys())
    each = [(f"${k}", then.environment.get(k), now.environment.get(k)) for k in variables]
    return [(script, then.script, now.script), *each]


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the interpreter and its options, the script or -m module and its arguments) of a recorded command."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in TAKING else 1
    return list(words[:at]), list(words[at:])


def _clear(folder: Path, force: bool) -> None:
    """Check that runs may be written to a folder; with ``force`` several that are there go. Raises UserError."""
    inner = [p for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    several = bool(inner) and all(p in inner and is_program_run(p) for p in folder.iterdir())
    if not several:
        check_folder(folder, force)
    elif not force:
        raise UserError(f"{folder} holds {len(inner)} runs already: choose another -o, or --force to replace them")
    else:
        aside = temporary(folder)
        folder.rename(aside)
        shutil.rmtree(aside)


def script_command(command: Sequence[str], folder: Path) -> tuple[list[str], list[str]]:
    """Return (the interpreter and its options, the script or -m module and its arguments); raises UserError."""
    if not command:
        raise UserError("watch: give the command after --: precaudit watch -- python serve.py")
    path = shutil.which(command[0])
    if path is None:
        is_script = command[0].endswith(".py") and (folder / command[0]).is_file()
        how = f"; it is a script: precaudit watch -- python {' '.join(command)}" if is_script else ""
        raise UserError(f"{command[0]}: no such command{how}")
    if Path(command[0]).name.startswith(PYTHON):
        at = 1
        while at < len(command) and command[at].startswith("-") and command[at] not in ("-m", "-c"):
            at += 2 if command[at] in TAKING else 1
        if at == len(command) or command[at] == "-c":
            raise UserError(f"watch: {' '.join(command)} runs no script: give python SCRIPT.py or python -m MODULE")
        if command[at] != "-m" and not (folder / command[at]).is_file():
            raise UserError(f"{command[at]}: no such file")
        return [path, *command[1:at]], list(command[at:])
    with open(path, "rb") as file:
        first = file.readline(4096).decode(errors="replace").strip()
    interpreter = first.removeprefix("#!").split()
    if not first.startswith("#!") or not any(PYTHON[0] in Path(x).name for x in interpreter):
        raise UserError(f"{command[0]} runs no Python: precaudit watches scripts that Python runs")
    return [x for x in interpreter if Path(x).name != "env"], [path, *command[1:]]


def call_numbers(text: str | None) -> list[int]:
    """Return the calls that ``"0,2:4,-1"`` names; none of None. Raises UserError."""
    found: list[int] = []
    for part in (text or "").split(",") if text else ():
        first, colon, last = part.partition(":")
        try:
            found += range(int(first), int(last)) if colon else [int(first)]
        except ValueError:
            raise UserError(f"--calls {text}: numbers and ranges are wanted, such as 0,2:4") from None
    if any(n < LAST for n in found):
        raise UserError(f"--calls {text}: calls are counted from 0; of those at the end -1 alone, the last, is known")
    return sorted(set(found))


def _check_called(found: Watched, name: str, file: str) -> None:
    """Raise UserError where no function of that name was called, with the nearest names."""
    of = [f for f in found.functions if f.name == name and f.place.rpartition(":")[0].endswith(file)]
    calls = sum(f.calls for f in of)
    if not calls:
        if within := sum(f.within for f in of):
            raise UserError(
                f"{name} was called {within} times, all within another jitted function, vmap or grad: watch what calls "
                "it"
            )
        if lowered := [f for f in of if LOWERED in f.unseen]:
            raise UserError(f"{name} ({lowered[0].place}) was not called: {LOWERED}")
        if elsewhere := [f for f in found.functions if f.name == name and f.calls]:
            raise UserError(f"the script called no jitted function {name!r} in {file}, but {elsewhere[0].place}")
        names = sorted({f.name for f in found.functions if f.calls})
        raise UserError(f"the script called no jitted function {name!r}{nearest(name, names)}")
    if not found.runs and not any(f.kept or f.unseen for f in of):
        raise UserError(f"{name} was called {calls} times, and none of the calls asked for")
