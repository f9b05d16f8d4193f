"""``same``: whether two programs, or two entry points of one, are one formula."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from precaudit.diagnosis.sameness.records import SameFormula, Sameness
from precaudit.errors import UserError, nearest
from precaudit.mirrors import takes_urls
from precaudit.recording.programs.loading import is_reference
from precaudit.recording.programs.program import Program
from precaudit.recording.programs.served import ServedModel
from precaudit.recording.runs.programs import is_program_run
from precaudit.schema.program_names import require_name
from precaudit.workflows.keywords import progress_of
from precaudit.workflows.signatures import Telling

if TYPE_CHECKING:
    from precaudit.diagnosis.sameness.compared import Named

ENTRY = "@"  # between a program's name and that of an entry point


@takes_urls
def same(
    one: Program | str | Path | Callable[..., Any],
    other: Program | str | Path | Callable[..., Any],
    inputs: tuple[Any, ...] | None = None,
    *,
    rows: int | None = None,
    cases: Sequence[str] | None = None,
    progress: Telling = None,
) -> SameFormula:
    """Return whether two programs are one formula: in FP64, and then what rounding does to each, or where they part.

    ``one``, ``other``: Programs, ``FILE.py:NAME``, or either with the entry point that is meant,
    ``FILE.py:NAME@decode``; or functions of ``inputs``, which return an array. One may be a model, as ``load`` takes it
    or returned it: its prefill reads the tokens of the other's calls. Outputs of one name are compared with
    each other row by row, a call's after those of the call before. ``other`` may be a file or folder of tensors that
    another framework wrote of the same case, .npz or .safetensors: each is looked for among FP64 values of ``one``.
    Either may be a watched run, whose command is run again.
    ``rows``: which row of the longer one is the first of the shorter (None: where FP64 finds them equal). ``cases``: of
    both (None: all that both have; of a dump the first).

    Raises UserError where they have no case or no output in common, or cannot be traced.

    >>> import jax.numpy as jnp
    >>> import precaudit
    >>> x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    >>> precaudit.same(lambda x: x / (1 + jnp.exp(-x)), lambda x: x * 0.5 * (1 + jnp.tanh(x / 2)), (x,)).exit_code
    0
    """
    from precaudit.diagnosis.sameness.compared import same_formula
    from precaudit.diagnosis.sameness.dumped import same_as_dump

    for x in (one, other):
        if isinstance(x, str | Path):
            require_name(str(x))
    said = [x.reference if isinstance(x, ServedModel) else x for x in (one, other)]
    one, other = _opened_model(one), _opened_model(other)
    loaded: dict[str, Program] = {}
    one, other = _serving(one, other, loaded), _serving(other, one, loaded)
    if _is_path(one) or _is_path(other):
        with progress_of(progress) as tell, tempfile.TemporaryDirectory() as folder:
            paths = [Path(str(x)) for x in (one, other) if _is_path(x)]
            _check_paths(paths)
            tensors = _tensors(paths[-1], Path(folder))
            if len(paths) == 2:
                return SameFormula((_same_as_run(paths[0], tensors, Path(folder)),))
            mine = _named(other if _is_path(one) else one, inputs, "the program", loaded)
            return SameFormula(same_as_dump(mine, tensors, cases, tell.advance))
    both = [
        _named(x, inputs, Path(name).name if isinstance(name, str | Path) else f"the {at}", loaded)
        for x, name, at in zip((one, other), said, ("first", "second"), strict=True)
    ]
    with progress_of(progress) as tell:
        return SameFormula(same_formula(both[0], both[1], rows, cases, tell.advance))


def _opened_model(x: object) -> Any:
    """Return a model that is named as ``load`` takes it, opened; anything else as it is."""
    from precaudit.models.checkpoints import names_model

    if not isinstance(x, str | Path) or is_reference(str(x).partition(ENTRY)[0]) or not names_model(str(x)):
        return x
    from precaudit.recording.tracing.subject import load

    return load(str(x), device="cpu")


def _serving(x: object, other: object, loaded: dict[str, Program]) -> Any:
    """Return a model's prefill of the tokens that a program beside it reads; what is no model as it is.

    Raises UserError where the program does not say which of its inputs holds them.
    """
    if not isinstance(x, ServedModel):
        return x
    from precaudit.recording.programs.entries import token_ids

    program = _loaded(other.partition(ENTRY)[0], loaded) if isinstance(other, str) and not _is_path(other) else other
    if not isinstance(program, Program):
        return x.altered(then={})
    return x.serving({case: token_ids(program, case) for case in program.cases}).altered(then={})


def _loaded(name: str, loaded: dict[str, Program]) -> Program:
    """Return a program by its name, whose file runs once."""
    from precaudit.recording.programs.loading import load_program

    if name not in loaded:
        loaded[name] = load_program(name)
    return loaded[name]


def _is_path(x: object) -> bool:
    """Whether one side is a file or folder of tensors, or a run, and no program."""
    return isinstance(x, str | Path) and not is_reference(str(x).partition(ENTRY)[0])


def _check_paths(paths: Sequence[Path]) -> None:
    """Raise UserError for a side that cannot be read, before any command is run again."""
    from precaudit.recording.dumps.reading import read_dump

    if len(paths) == 2 and not is_program_run(paths[0]):
        raise UserError(f"{paths[0]}: the first is a program, FILE.py:NAME, or a watched run; give tensors second")
    for path in paths:
        if not is_program_run(path):
            read_dump(path)


def _tensors(path: Path, folder: Path) -> Path:
    """Return where a side's tensors are: of a watched run, whose command is run again, its values in FP64."""
    if not is_program_run(path):
        return path
    from precaudit.workflows.watch import rerun

    held = folder / f"{path.resolve().name}.npz"
    rerun(path, values=held)
    return held


def _same_as_run(run: Path, tensors: Path, folder: Path) -> Sameness:
    """Return whether a watched run's calls, made again, are tensors."""
    from precaudit.workflows.watch import rerun

    answer = folder / "answer.json"
    rerun(run, beside=(tensors, answer))
    return msgspec.json.decode(answer.read_bytes(), type=Sameness)


def _named(x: object, inputs: tuple[Any, ...] | None, called: str, loaded: dict[str, Program]) -> "Named":
    """Return a program with what it is called and its entry point; raises UserError."""
    from precaudit.diagnosis.sameness.compared import Named

    entry = ""
    if isinstance(x, str):
        called, _, entry = x.partition(ENTRY)
        x = _loaded(called, loaded)
    elif not isinstance(x, Program):
        if not callable(x) or inputs is None:
            raise UserError("same: two Programs, or two functions and the inputs of both: same(f, g, (x,))")
        f = x
        called = getattr(f, "__name__", called).replace("<lambda>", called)
        x = Program(call=lambda _, *given: f(*given), params=(), cases={"inputs": inputs})
    entries = [x.entry, *x.then]
    if not entry and len(entries) > 1:
        raise UserError(f"{called} has entry points {', '.join(entries)}; say which: {called}{ENTRY}{entries[-1]}")
    if entry and entry not in entries:
        raise UserError(f"{called} has no entry point {entry!r}{nearest(entry, entries)}")
    name = called.rpartition(":")[2] + (f"{ENTRY}{entry}" if entry else "")
    return Named(x, entry or x.entry, name)
