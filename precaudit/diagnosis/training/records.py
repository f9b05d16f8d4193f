"""What is left of two trainings held against each other: a line a tensor and step, and what was found."""

from typing import Literal

import msgspec

from precaudit.schema.records.base import Count, Number, Record

Where = Literal["point", "output", "state"]
Group = Literal["loss", "gradient", "parameters", "moments", "other"]
Word = Literal["same", "rounding", "chaos", "drift", "unknown"]


class TrainingMember(Record, frozen=True, omit_defaults=False):
    """A line of members.jsonl: how far correct makings of A's step are from each other at a tensor.

    ``norm``: of A's own. ``spread``: the largest distance of any two, A's run among them; ``gain``: the largest
    difference of their signed gains along A's. ``where``: a point inside the step, an output, or the state after it.
    """

    case: str
    step: Count
    where: Where
    name: str
    norm: Number
    spread: Number
    gain: Number


class TrainingTensor(Record, frozen=True, omit_defaults=False):
    """A line of training.jsonl: a tensor after a step. ``size``: how far B is from A, relative to A.

    ``spread``: how far correct makings of A are from each other, at most, relative too. ``ratio``: size by spread, or
    signed gain by theirs, whichever is larger. ``exact``: how far the two are apart in FP64, None where it is not
    known. ``formats``: of A and of B, where they differ. ``source``: the line that makes it.
    """

    case: str
    step: Count
    where: Where
    name: str
    group: Group
    size: Number
    spread: Number
    ratio: Number
    exact: Number | None = None
    formats: tuple[str, str] | None = None
    source: str = ""


class TrainingGrowth(Record, frozen=True, omit_defaults=False):
    """How far B is from A in a group of tensors after a step, and members from each other, both relative to A."""

    step: Count
    group: Group
    size: Number
    spread: Number


class Training(Record, frozen=True, omit_defaults=False):
    """training.json: what was found. ``word``: ``same`` bits; ``rounding``; ``chaos``: rounding that grows; ``drift``.

    ``first``: the first tensor beyond rounding, by step and by the program's order. ``parted``: the first that differs
    at all. ``formula``: the first that differs in FP64 in the first step. ``growth``: groups after some steps.
    ``worst``: the largest ratio. ``aside``: points that hold other things in A and B. ``lacking``: tensors of one side
    alone, or of other shapes. ``why``: it cannot be told.
    """

    subject: str
    by: str
    good: str
    bad: str
    steps: Count
    members: Count
    limit: Number
    word: Word
    worst: Number
    first: TrainingTensor | None = None
    parted: TrainingTensor | None = None
    formula: TrainingTensor | None = None
    growth: tuple[TrainingGrowth, ...] = ()
    aside: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    why: str | None = None
    notes: tuple[str, ...] = msgspec.field(default=())
