"""``same``: whether two programs, or two entry points of one, are one formula."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.diagnosis.sameness.records import SameFormula
from precaudit.errors import UserError, nearest
from precaudit.recording.programs.loading import is_reference
from precaudit.recording.programs.program import Program
from precaudit.workflows.keywords import progress_of
from precaudit.workflows.signatures import Telling

if TYPE_CHECKING:
    from precaudit.diagnosis.sameness.compared import Named

ENTRY = "@"  # between a program's name and that of an entry point


def same(
    one: Program | str | Callable[..., Any],
    other: Program | str | Path | Callable[..., Any],
    inputs: tuple[Any, ...] | None = None,
    *,
    rows: int | None = None,
    cases: Sequence[str] | None = None,
    progress: Telling = None,
) -> SameFormula:
    """Return whether two programs are one formula: in FP64, and then what rounding does to each, or where they part.

    ``one``, ``other``: Programs, ``FILE.py:NAME``, or either with the entry point that is meant,
    ``FILE.py:NAME@decode``; or functions of ``inputs``, which return an array. Outputs of one name are held against
    each other row by row, a call's after those of the call before. ``other`` may be a file or folder of tensors that
    another framework wrote of the same case, .npz or .safetensors: each is looked for among FP64 values of ``one``.
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

    loaded: dict[str, Program] = {}
    if isinstance(other, str | Path) and not is_reference(str(other).partition(ENTRY)[0]):
        with progress_of(progress) as tell:
            mine = _named(one, inputs, "the first", loaded)
            return SameFormula(same_as_dump(mine, Path(other), cases, tell.advance))
    both = [_named(x, inputs, at, loaded) for x, at in zip((one, other), ("the first", "the second"), strict=True)]
    with progress_of(progress) as tell:
        return SameFormula(same_formula(both[0], both[1], rows, cases, tell.advance))


def _named(x: Any, inputs: tuple[Any, ...] | None, called: str, loaded: dict[str, Program]) -> "Named":
    """Return a program with what it is called and its entry point; raises UserError."""
    from precaudit.diagnosis.sameness.compared import Named
    from precaudit.recording.programs.loading import load_program

    entry = ""
    if isinstance(x, str):
        called, _, entry = x.partition(ENTRY)
        if called not in loaded:
            loaded[called] = load_program(called)
        x = loaded[called]
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
