"""Which change did it: trials between A, which passes a test, and B, which does not."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from precaudit.errors import CannotJudge, Interrupted, UserError
from precaudit.writing import write_whole

if TYPE_CHECKING:
    from precaudit.diagnosis.bisection.ddmin import Changes, Smallest
    from precaudit.diagnosis.bisection.limits import Criterion
    from precaudit.diagnosis.bisection.records import Bisection, BisectionAsked, BisectionTrial
    from precaudit.diagnosis.bisection.tasks import Figures, Kind
    from precaudit.diagnosis.bisection.trials import Trials

SINGLES = 40  # changes that are each tried alone; of more, halves are tried first
Find = Literal["cause", "cure", "first"]


class Source(Protocol):
    """What lies between A and B, by name, and how A with some of it is measured."""

    @property
    def changes(self) -> "Changes":
        """All that differs."""

    @property
    def kind(self) -> "Kind | None":
        """What makes several trials at once; None of those that one process makes one after another."""

    def measure(self, changes: "Changes", folder: Path) -> "Figures":
        """Return the figures of A with these changes; raises UserError where that cannot be told."""


@dataclass(frozen=True)
class BisectionRequest:
    """What is asked. ``find``: the smallest set that breaks A (cause), that mends B (cure), or the first of a row.

    ``most``: trials that may be added to prove a set the smallest; ``how``: all else that a trial depends on. ``jobs``:
    trials that are made at once; ``scheduler``: the address of a cluster's that makes them.
    """

    subject: str
    by: str
    good: str
    bad: str
    criterion: "Criterion"
    against: str
    find: Find
    how: str = ""
    code: str = ""
    most: int = 64
    force: bool = False
    jobs: int = 1
    scheduler: str | None = None


def bisect(
    request: BisectionRequest, source: Source, folder: Path, tell: "Callable[[BisectionTrial], None]"
) -> "Bisection":
    """Search which changes break or mend a test, write trials.jsonl and bisect.json into ``folder``, and return that.

    Trials that stand there of the same request are not made again. Raises UserError where A fails the test or B passes
    it, CannotJudge where one of them cannot be told or a trial answers differently twice, Interrupted with what is
    kept.
    """
    import msgspec

    from precaudit.diagnosis.bisection.tasks import Tasks
    from precaudit.diagnosis.bisection.trials import FOUND, Trials

    trials = Trials(
        _asked(request, source),
        request.criterion,
        source.measure,
        folder,
        tell,
        request.criterion.name in ("exit", "verdict"),
        tasks=Tasks(request.jobs, source.kind or "threads", request.scheduler),
    )
    if request.scheduler is not None:
        trials.folder = folder.absolute()  # wherever workers stand
    trials.open(request.force)
    try:
        found = _with_parting(_search(request, trials), trials, source)
    except KeyboardInterrupt:
        kept = len(trials.kept)
        raise Interrupted(f"interrupted; {kept} trials are kept in {folder}: the same command goes on") from None
    finally:
        trials.tasks.close()
    write_whole(folder / FOUND, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", inside=True)
    return found


def _asked(request: BisectionRequest, source: Source) -> "BisectionAsked":
    from precaudit.diagnosis.bisection.records import BisectionAsked
    from precaudit.recording.runs.written import computing_code

    code = hashlib.sha256(f"{computing_code()} {request.code}".encode()).hexdigest()[:16]
    return BisectionAsked(
        subject=request.subject,
        by=request.by,
        good=request.good,
        bad=request.bad,
        test=request.criterion.text,
        against=request.against,
        changes=source.changes,
        how=request.how,
        code=code,
    )


def _search(request: BisectionRequest, trials: "Trials") -> "Bisection":
    from precaudit.diagnosis.bisection.ddmin import smallest_sets

    changes = trials.asked.changes
    good, bad = _check_ends(request, trials)
    if request.find == "first":
        return _search_row(trials, good, bad)

    def state(some: "Changes") -> "Changes":
        return some if request.find == "cause" else tuple(c for c in changes if c not in some)

    def ask(some: "Changes") -> bool | None:
        """Whether changes alone break A, or all but they leave B mended."""
        answer = trials.run(state(some)).answer
        return None if answer == "unknown" else (answer == "bad") == (request.find == "cause")

    def strength(some: "Changes") -> float | None:
        """How far changes alone move the figure the way that the search is for."""
        x = trials.run(state(some)).figures.get(request.criterion.name)
        return None if x is None or not math.isfinite(float(x)) else float(x) * (1 if request.find == "cause" else -1)

    def ahead(sets: "Sequence[Changes]") -> None:
        trials.ahead([state(some) for some in sets])

    found = smallest_sets(changes, ask, SINGLES, request.most, ahead, strength)
    return _bisection(request.find, trials, good, bad, found)


def _with_parting(found: "Bisection", trials: "Trials", source: Source) -> "Bisection":
    """Return what was found, with where a good and a bad state part, of trials in processes that leave runs."""
    import msgspec

    from precaudit.diagnosis.bisection.parting import part_states
    from precaudit.diagnosis.bisection.processes import ProcessTrials

    if not isinstance(source, ProcessTrials) or source.command is not None:
        return found
    states = _states_apart(found)
    try:
        parted, rows = part_states(source, (trials.run_folder(states[0]), trials.run_folder(states[1])), states)
    except UserError as error:
        return msgspec.structs.replace(found, notes=(*found.notes, f"where the two part is not known: {error}"))
    return msgspec.structs.replace(found, parted=parted, hlo=rows)


def _states_apart(found: "Bisection") -> "tuple[Changes, Changes]":
    """Return a good and a bad state that differ by what was found alone."""
    every, some = found.asked.changes, found.sets[0]
    if found.find == "cause":
        return (), some
    if found.find == "cure":
        return tuple(c for c in every if c not in some), every
    return every[: every.index(some[0])], every[: every.index(some[-1]) + 1]


def _check_ends(request: BisectionRequest, trials: "Trials") -> "tuple[BisectionTrial, BisectionTrial]":
    """Return the trials of A and B; raises where A is no good one or B no bad one."""
    found = []
    for name, changes, wanted in (("A", (), "good"), ("B", trials.asked.changes, "bad")):
        trial = trials.run(changes)
        what = f"{name} ({request.good if name == 'A' else request.bad})"
        if trial.answer == "unknown":
            raise CannotJudge(f"{what} cannot be judged: {trial.why}")
        if trial.answer != wanted:
            figure = figure_text(request.criterion.name, trial)
            raise UserError(f"{what} is {trial.answer} already by {request.criterion.text}{figure}: nothing to bisect")
        if not changes:
            trials.base = trial.figures
        found.append(trial)
    return found[0], found[1]


def figure_text(name: str, trial: "BisectionTrial") -> str:
    """Return what a trial's figure was, after a comma; nothing where it is said by the answer."""
    from precaudit.schema.digits import digits

    return (
        f", {name} {digits(float(trial.figures[name]))}"
        if name in trial.figures and name not in ("verdict", "exit")
        else ""
    )


def _search_row(trials: "Trials", good: "BisectionTrial", bad: "BisectionTrial") -> "Bisection":
    """Find the first bad state of a row, in which every state has all changes before it."""
    from precaudit.diagnosis.bisection.ddmin import Smallest
    from precaudit.diagnosis.bisection.first import first_bad

    changes = trials.asked.changes

    def ask(i: int) -> bool | None:
        answer = trials.run(changes[:i]).answer
        return None if answer == "unknown" else answer == "bad"

    at = first_bad(len(changes) + 1, ask, lambda states: trials.ahead([changes[:i] for i in states]))
    return _bisection("first", trials, good, bad, Smallest((changes[at.good : at.bad],), "1-minimal"))


def _bisection(
    find: Find, trials: "Trials", good: "BisectionTrial", bad: "BisectionTrial", found: "Smallest"
) -> "Bisection":
    from precaudit.diagnosis.bisection.records import Bisection, Proof

    row: Proof = "adjacent" if len(found.sets[0]) == 1 else "open"
    return Bisection(
        asked=trials.asked,
        find=find,
        sets=found.sets,
        proof=row if find == "first" else found.proof,
        good=good,
        bad=bad,
        figure=trials.criterion.name,
        trials=len(trials.kept),
        made=trials.made,
        unknown=sum(t.answer == "unknown" for t in trials.kept.values()),
    )
