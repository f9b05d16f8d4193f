"""A look at a compared run: some layers, points, phases and cases of it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from precaudit.errors import UserError
from precaudit.judging.programs import layers_of
from precaudit.judging.verdicts import Verdict
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.opening import AnyRun
from precaudit.recording.runs.positioned import Calls, calls_at
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from precaudit.recording.runs.written import Comparison, R
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.places import Place, case_of, layers_text
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.selection import Filters, Texts, check_names, filter_text, parse_layers


@dataclass(frozen=True)
class Look:
    """Filters of records and verdicts of a run; None: all. A point's occurrences go along with it.

    Of what is in no layer nothing is left out by layers. ``calls``: those that hold the positions that were asked for.
    """

    layers: Collection[int] | None = None
    points: Collection[str] | None = None
    phases: Collection[str] | None = None
    cases: Collection[str] | None = None
    calls: Calls | None = None

    def holds(self, x: ErrorRecord | Verdict | Place) -> bool:
        """Whether a record, a verdict or a place is looked at; one of no point or of no case is."""
        name = x.point.partition("#")[0]
        return (
            (self.layers is None or x.layer is None or x.layer in self.layers)
            and (self.points is None or not x.point or bool({name, x.point} & set(self.points)))
            and self.holds_place(x.prompt, x.phase, x.step)
        )

    def holds_place(self, prompt: str, phase: str, step: int) -> bool:
        """Whether a call of a case is looked at."""
        return (
            (self.phases is None or not phase or phase in self.phases)
            and (self.cases is None or not prompt or case_of(prompt, self.cases) in self.cases)
            and (self.calls is None or not prompt or (prompt, phase, step) in self.calls)
        )

    def holds_pair(self, prompt: str, step: int) -> bool:
        """Whether a position of decode that prefill sees too is looked at: its logits are compared."""
        return (self.points is None or LOGITS in self.points) and self.holds_place(prompt, "decode", step)

    def of(self, errors: Iterable[ErrorRecord]) -> list[ErrorRecord]:
        """Return the records that are looked at."""
        return [e for e in errors if self.holds(e)]


def selected(found: Comparison[R], look: Look) -> Comparison[R]:
    """Return what is looked at of a comparison."""
    pairs = [p for p in found.prefill_decode if look.holds_pair(p.prompt, p.step)]
    return replace(found, errors=look.of(found.errors), prefill_decode=pairs)


@dataclass(frozen=True)
class Nameable:
    """What filters may name in a run: how many layers there are, points, phases as they are given, and cases.

    ``phases``: the phase of records by what is written for it; ``words``: what a phase and a case are called;
    ``held``: the layers that it holds, None for all.
    """

    layers: int
    points: Sequence[str]
    phases: Mapping[str, str]
    cases: Sequence[str]
    words: tuple[str, str]
    held: Collection[int] | None = None


@singledispatch
def nameable_in(run: Any) -> Nameable:
    """Return what filters may name in a run, of a program, of a model, or imported."""
    raise TypeError(f"{type(run).__name__} is no run")


@nameable_in.register
def _(run: Run) -> Nameable:
    asked = run.record.requested
    phases = {phase: phase for phase in asked.phases}
    words, layers = ("phase", "prompt"), int(run.record.model.config["layers"])
    return Nameable(layers, tuple(POINTS), phases, asked.prompts, words, asked.layers)


@nameable_in.register
def _(run: Imported) -> Nameable:
    its = run.record.tensors
    layers = max((t.layer + 1 for t in its if t.layer is not None), default=0)
    points, phases, prompts = (list(dict.fromkeys(getattr(t, n) for t in its)) for n in ("point", "phase", "prompt"))
    return Nameable(layers, points, {phase: phase for phase in phases}, prompts, ("phase", "prompt"))


@nameable_in.register
def _(run: Opened) -> Nameable:
    names = {p.name for one in run.entries for p in (*one.record.judged_points, *one.record.outputs)}
    names |= {name.partition("#")[0] for name in names}
    entries = {one.record.entry: one.record.phase for one in run.entries}
    words = ("entry point", "case")
    return Nameable(layers_of(run), sorted(names), entries, run.record.cases, words, run.record.layers)


def look_at(
    opened: AnyRun,
    layers: Texts | None = None,
    points: Texts | None = None,
    phases: Texts | None = None,
    prompt: Texts | None = None,
    positions: Texts | None = None,
) -> Look | None:
    """Return a look at a run, as filters on the command line say it; None without any.

    ``phases``: for a program entry points; ``prompt``: prompts or cases; ``positions``: for a program calls. Raises
    UserError for what the run does not hold.
    """
    some, rows = filter_text("layers", layers), filter_text("positions", positions)
    if all(x is None for x in (some, points, phases, prompt, rows)):
        return None
    known = nameable_in(opened)
    a_phase, a_case = known.words
    wanted = None if some is None else frozenset(parse_layers(some, known.layers))
    if wanted is not None and known.held is not None and not wanted & {*known.held}:
        raise UserError(f"--layers {some}: {opened.folder} holds {layers_text(sorted(known.held))} alone")
    of = _check_known(points, "point", known.points)
    at = _check_known(phases, a_phase, tuple(known.phases))
    within = None if at is None else tuple(known.phases[name] for name in at)
    cases = _check_known(prompt, a_case, known.cases)
    calls = None if rows is None else calls_at(opened, rows)
    return Look(wanted, None if of is None or "all" in of else of, within, cases, calls)


def look_by(opened: AnyRun, filters: Filters) -> Look | None:
    """Return a look at a run by filters of the command line, as ``look_at`` does."""
    return look_at(opened, filters.layers, filters.points, filters.phases, filters.prompt, filters.positions)


def _check_known(given: Texts | None, what: str, known: Sequence[str]) -> tuple[str, ...] | None:
    text = filter_text(what, given)
    return None if text is None else check_names(text, what, known, "the run holds")
