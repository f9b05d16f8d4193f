"""What a rule is, what it hits, and what a user is told of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from precaudit.schema.records.base import Count, Record

if TYPE_CHECKING:
    from precaudit.checks.lint.view import CallView

Severity = Literal["error", "warning", "note", "unknown"]
SEVERITIES: tuple[Severity, ...] = ("error", "unknown", "warning", "note")
Needs = Literal["jaxpr", "tpu", "run"]


class Hit(NamedTuple):
    """One place a rule fires at. ``source``: FILE:LINE; ``says``, ``fix``, ``severity``: in place of the rule's own."""

    phase: str
    source: str
    point: str = ""
    says: str = ""
    fix: str = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """``needs``: what it reads, a program's jaxpr, what a TPU's compiler made of it, or a recorded run.

    ``why``: the explanation; ``fix``: the change that removes it; ``rests``: what the rule rests on. ``check`` is given
    every view (phase) of a program at once.
    """

    id: str
    severity: Severity
    needs: Needs
    title: str
    why: str
    fix: str
    rests: str
    check: "Callable[[Sequence[CallView]], Iterable[Hit]]"


class LintRecord(Record, frozen=True):
    """A finding of ``precaudit lint``: hits of one rule at one line, point and phase. ``count``: how many.

    ``target``: the TPU compiled for and libtpu's version, or the platform the program was read for. ``layers``: how
    many layers it is in, all that a scan runs; None where it is in no scan, or where that is not known.
    """

    rule: str
    severity: Severity
    phase: str
    point: str
    source: str
    count: Count
    says: str
    fix: str
    rests: str
    target: str
    layers: Count | None = None
