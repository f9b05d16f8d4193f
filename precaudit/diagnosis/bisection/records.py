"""What a bisection leaves: what was asked, every trial, and what was found."""

from typing import Literal

import msgspec

from precaudit.schema.records.base import Count, Index, Number, Record

Proof = Literal["smallest", "1-minimal", "open", "adjacent"]
Word = Literal["good", "bad", "unknown"]


class BisectionAsked(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="asked"):
    """The first line of trials.jsonl: the request, which a bisection that goes on must have, too.

    ``changes``: what differs between A and B, by name. ``code``: the hash of what measures and of the subject.
    """

    subject: str
    by: str
    good: str
    bad: str
    test: str
    against: str
    changes: tuple[str, ...]
    how: str
    code: str


class BisectionTrial(Record, frozen=True, omit_defaults=False, tag_field="kind", tag="trial"):
    """A trial: A with some changes of B. Its figures, and what they answer to the test.

    ``key``: its hash, which names its folder. ``figures``: of the last time; ``answers``: of every time it was made.
    ``near``: the figure is near the limit. ``why``: it cannot be told. ``seconds``: of all times.
    """

    key: str
    changes: tuple[str, ...]
    answer: Word
    answers: tuple[Word, ...]
    figures: dict[str, Number] = msgspec.field(default_factory=dict)
    near: bool = False
    why: str | None = None
    seconds: Number = 0.0


class Parted(Record, frozen=True, omit_defaults=False):
    """The first tensor that two states hold otherwise: its case and call, its line, and how far apart they are."""

    point: str
    where: str
    layer: Index | None
    source: str
    size: Number


class HloRow(Record, frozen=True, omit_defaults=False):
    """An operation of compiled programs, in words, and how many each side has of it."""

    what: str
    good: Count
    bad: Count


class Bisection(Record, frozen=True, omit_defaults=False):
    """bisect.json: what was found. ``find``: sets that break the test (cause), mend it (cure), or the first bad one.

    ``sets``: of changes. ``proof``: ``smallest``, ``1-minimal``, ``open`` where what decides could not be told, and
    ``adjacent`` of a row of states: the last good and the first bad one. ``good`` and ``bad``: the trials of both ends.
    ``figure``: what the test is about. ``trials``: how many, ``made``: how many of them in this run. ``parted``: where
    a good and a bad state part first, whose compiled programs differ by ``hlo``.
    """

    asked: BisectionAsked
    find: Literal["cause", "cure", "first"]
    sets: tuple[tuple[str, ...], ...]
    proof: Proof
    good: BisectionTrial
    bad: BisectionTrial
    figure: str
    trials: Count
    made: Count
    unknown: Count = 0
    notes: tuple[str, ...] = ()
    parted: Parted | None = None
    hlo: tuple[HloRow, ...] = ()
