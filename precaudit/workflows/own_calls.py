"""Calls that a loop of one's own makes, recorded, compared and judged: ``recording``, and ``watched`` of a function."""

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from precaudit.errors import CannotJudge, UserError
from precaudit.judging.judgement import Judgement
from precaudit.recording.watching.calls import Jitted, Picked, Watch
from precaudit.recording.watching.functions import name_and_place
from precaudit.recording.watching.records import Picking, WatchOrder
from precaudit.workflows.recorder import Recorder

MOST_CALLS = 1 << 16


class Recording:
    """Calls that are kept, and the runs that become of them: what one gives and the next takes is found by itself."""

    def __init__(self, output: Path, calls: int, compare: bool, force: bool, picked: Picking) -> None:
        order = WatchOrder(picked=picked, output=str(output), compare=compare, force=force, said="precaudit.recording")
        self._recorder = Recorder(order, lambda _: None)
        self._watch = Watch(Picked(calls=range(calls), every=True), self._recorder.take)
        self._watch.use()
        self._known: dict[int, tuple[Any, Jitted]] = {}  # by identity

    def call(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, jitted or one that ``jax.jit`` takes, keep the call, and return what it gives."""
        if id(f) not in self._known:
            jitted = f if hasattr(f, "trace") else self._watch.jax.jit(f)
            self._known[id(f)] = f, Jitted(jitted, f, {}, self._watch)
        return self._known[id(f)][1](*args, **kwargs)

    def finish(self) -> None:
        """Record the calls that wait, and compare all; raises CannotJudge with what could not be."""
        for f in self._watch.functions:
            self._watch.hand_over(f, ended=True)
        self._watch.on = False
        self._recorder.compare()
        lost = [*self._recorder.notes, *(f"{f.name}: {why}" for f in self._watch.functions for why in f.unseen)]
        if lost and not self._recorder.made:
            raise CannotJudge("; ".join(lost))

    @property
    def ended(self) -> bool:
        """Whether no more calls are kept."""
        return not self._watch.on

    @property
    def counted(self) -> int:
        """How many calls were made, those within others left out."""
        return sum(f.calls for f in self._watch.functions)

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs, in order of their last calls."""
        return [Path(r.folder) for r in self._recorder.runs]

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded or compared, and why."""
        return tuple(self._recorder.notes)

    @property
    def judgement(self) -> Judgement:
        """The verdict on the run; raises UserError where it is not one."""
        from precaudit.judging.gate import gate

        if len(self.runs) != 1:
            raise UserError(f"recording: there are {len(self.runs)} runs; judge each with precaudit.gate")
        return gate(self.runs[0])


@contextmanager
def recording(
    output: Path | str,
    *,
    compare: bool = True,
    force: bool = False,
    layers: str | None = None,
    points: str | None = None,
    positions: str | None = None,
) -> Iterator[Recording]:
    """Record the calls of a loop into the folder ``output``; a folder in it for each where they make several runs.

    Calls of one function one after another are one case: what one gives and the next takes is found by identity or
    bits, what all are given alike is a parameter. They are recorded when the block ends, and compared with FP64; where
    it raises, nothing is. ``layers``, ``points``, ``positions``: filters, as of ``trace``.

    Raises UserError where the folder holds a run, CannotJudge where nothing could be recorded.

    >>> with precaudit.recording("runs/x") as r:  # doctest: +SKIP
    ...     for token in tokens:
    ...         logits, cache = r.call(step, params, token, cache)
    >>> r.judgement.exit_code  # doctest: +SKIP
    0
    """
    from precaudit.recording.runs.folders import check_folder

    check_folder(Path(output), force)
    picked = Picking(layers=layers, points=points, positions=positions)
    found = Recording(Path(output), MOST_CALLS, compare, force, picked)
    yield found
    found.finish()


def watched(
    output: Path | str | None = None,
    *,
    calls: int = 3,
    compare: bool = True,
    force: bool = False,
    layers: str | None = None,
    points: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that records the first calls of a function, jitted or one that ``jax.jit`` takes.

    They are recorded, and compared with FP64, when the last of them has ended, or the interpreter does: into the folder
    ``output``, by default traces/runs/NAME. What the function gives is what it gives without this. Its ``recording``
    has ``runs``, ``notes`` and ``judgement``.

    >>> @precaudit.watched("runs/step", calls=3)  # doctest: +SKIP
    ... @jax.jit
    ... def step(params, x): ...
    """
    if calls < 1:
        raise UserError(f"watched: calls = {calls} records none")

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        from precaudit.recording.runs.folders import check_folder

        folder = Path("traces") / "runs" / name_and_place(f)[0] if output is None else Path(output)
        check_folder(folder, force)
        picked = Picking(layers=layers, points=points)
        found = Recording(folder, calls, compare, force, picked)

        def finish() -> None:
            atexit.unregister(finish)
            found.finish()

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            if found.ended:
                return f(*args, **kwargs)
            out = found.call(f, *args, **kwargs)
            if found.counted == calls:
                finish()
            return out

        atexit.register(finish)
        call.recording = found  # type: ignore[attr-defined]
        return call

    return decorate
