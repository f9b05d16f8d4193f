"""What two trainings are to each other, from their records: the same, rounding, chaos, or drift. No JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, isinf, isnan
from typing import get_args

from precaudit.diagnosis.training.distances import relative_size
from precaudit.diagnosis.training.judged import LIMIT
from precaudit.diagnosis.training.records import Group, Training, TrainingGrowth, TrainingTensor, Word
from precaudit.schema.records.base import Number, json_number, value

GROWS = 10.0  # times as far apart at the end as after the first step: rounding that grows is chaos
FORMULA = 2.0**-19  # a relative difference in FP64 after one step that no constant rounded to float32 makes
SHOWN = 8  # steps that growth is shown after


@dataclass(frozen=True)
class TrainingQuestion:
    """Whether ``bad`` does the same as ``good``, two of a subject ``by`` what; over how many steps and members."""

    subject: str
    by: str
    good: str
    bad: str
    steps: int
    members: int


def conclude(
    asked: TrainingQuestion,
    records: Sequence[TrainingTensor],
    squares: Mapping[tuple[int, Group], Sequence[float]],
    lacking: Sequence[str],
    notes: Sequence[str],
) -> Training:
    """Return what was found; ``squares``: of distances, by group and step."""
    aside = points_aside(records)
    kept = [r for r in records if r.where != "point" or r.name not in aside]
    ratios = [value(r.ratio) for r in kept]
    worst = max((x for x in ratios if x == x), default=0.0)
    unknown = [r for r, x in zip(kept, ratios, strict=True) if x != x]
    growth = tuple(_growth(squares, asked.steps))
    first = next((r for r in kept if value(r.ratio) > LIMIT), None)
    parted = next((r for r in kept if value(r.size) > 0), None)
    why = None
    if not kept:
        why = "no tensor is on both sides: nothing can be compared"
    elif unknown and first is None:
        why = f"{unknown[0].name} in step {unknown[0].step}: {_not_judged(unknown[0])}"
    word: Word = "drift" if first is not None else "unknown" if why else "same" if parted is None else "rounding"
    if word == "rounding" and _grows(growth):
        word = "chaos"
    return Training(
        **asdict(asked),
        limit=LIMIT,
        word=word,
        worst=json_number(worst),
        first=first,
        parted=parted,
        formula=next((r for r in kept if _differs_in_fp64(r)), None),
        growth=growth,
        aside=tuple(sorted(aside)),
        lacking=tuple(lacking),
        why=why,
        notes=tuple(notes),
    )


def _not_judged(r: TrainingTensor) -> str:
    """Return why a tensor has no ratio."""
    if isnan(value(r.size)):
        return "A and B hold nothing but NaN"
    return "some correct makings are finite, others are not" if isinf(value(r.spread)) else "no correct making is known"


def points_aside(records: Sequence[TrainingTensor]) -> set[str]:
    """Return the points that hold other things in A and B: FP64 differs there in the first step, and in no state.

    Such as a gradient of a matrix that one of the two holds turned.
    """
    other = [r for r in records if _differs_in_fp64(r)]
    return set() if any(r.where != "point" for r in other) else {r.name for r in other}


def _differs_in_fp64(r: TrainingTensor) -> bool:
    return r.step == 1 and r.exact is not None and value(r.exact) > FORMULA


def shown_steps(steps: int) -> list[int]:
    """Return the steps that growth is shown after: the first, the last, and some of those between."""
    return sorted({max(round(steps ** (i / (SHOWN - 1))), 1) for i in range(SHOWN)} | {1, steps})


def _growth(squares: Mapping[tuple[int, Group], Sequence[float]], steps: int) -> list[TrainingGrowth]:
    """Return how far groups are apart after each step."""
    return [
        TrainingGrowth(step=step, group=group, size=_root(found[0], found[2]), spread=_root(found[1], found[2]))
        for step in range(1, steps + 1)
        for group in get_args(Group)
        if (found := squares.get((step - 1, group))) is not None
    ]


def _root(square: float, of: float) -> Number:
    return json_number(relative_size(square**0.5, of**0.5))


def _grows(growth: Sequence[TrainingGrowth]) -> bool:
    """Whether the distance of members from each other grows over the steps, in parameters or elsewhere."""
    found = [value(g.spread) for g in growth if g.group == "parameters"]
    found = found or [value(g.spread) for g in growth if g.group == "loss"]
    return len(found) > 1 and found[-1] > GROWS * found[0] > 0


def times_grown(growth: Sequence[TrainingGrowth], group: Group, since: int) -> tuple[float, float] | None:
    """Return how many times farther apart A and B are at the end than after a step, and members; None of no group."""
    found = [g for g in growth if g.group == group and g.step >= since]
    if len(found) < 2 or not (0 < value(found[0].size) < inf and 0 < value(found[0].spread) < inf):
        return None
    mine, members = (value(found[-1].size) / value(found[0].size), value(found[-1].spread) / value(found[0].spread))
    return (mine, members) if isfinite(members) and not isnan(mine) else None
