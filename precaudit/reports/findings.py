"""What diagnose found, told where a judgement is read: beside the verdicts of the place that a finding is of."""

import re
from collections.abc import Mapping, Sequence

from precaudit.diagnosis.evidence.records import Finding
from precaudit.judging.judgement import Judgement
from precaudit.reports.judgement import group_verdicts
from precaudit.reports.report import Headline
from precaudit.schema.places import point_text

Place = tuple[int | None, str]  # a layer and a point
Causes = Mapping[Place, tuple[str, ...]]


def cause_text(f: Finding) -> str:
    """Return a finding in one line: its cause, where it is and what was measured, and what to change."""
    place = "" if _says_its_place(f) else f"{point_text(f)}: "
    return f"{f.cause}: {place}{f.says}" + (f"; change: {f.fix}" if f.fix else "")


def _says_its_place(f: Finding) -> bool:
    """Whether a finding ends with its place, as a program's does: ``…: attn_norm of layer 0 (normed, mine.py:24)``."""
    return re.search(rf": {re.escape(f.point)} (of layer|\()", f.says) is not None


def first_of(findings: Sequence[Finding]) -> Headline:
    """Return the sentence on the first finding, and how many more there are."""
    f, n = findings[0], len(findings) - 1
    more = f" {n} more {'findings' if n > 1 else 'finding'}." if n else ""
    place = "" if _says_its_place(f) else f"{point_text(f)}, {' and '.join(f.phases)}: "
    return Headline("✗", f"{place}{f.says}.{more}")


def causes_by_place(j: Judgement, findings: Sequence[Finding]) -> Causes:
    """Return the findings of each layer and point that fails; those of a place that does not are of the first.

    A verdict names a program's own point, a finding the point of the reference; some do not meet.
    """
    if not findings:
        return {}
    places = [
        at
        for at, its in group_verdicts(j.verdicts, lambda v: (v.layer, v.point)).items()
        if its[0].first.status in ("fail", "nonfinite")
    ]
    found: dict[Place, list[str]] = {}
    for f in findings if places else ():
        mine = [at for at in places if at[1] == f.point and at[0] in (f.layer, *f.layers)]
        found.setdefault((mine or places)[0], []).append(cause_text(f))
    return {at: tuple(texts) for at, texts in found.items()}


def causes_at(causes: Causes, found: Sequence[Finding] | None, layer: int | None, point: str) -> list[str]:
    """Return what diagnosis says of a layer and point: the findings there, else what ``causes_by_place`` has."""
    here = [f for f in found or () if f.point == point and layer in (f.layer, *f.layers)]
    return [cause_text(f) for f in here] or list(causes.get((layer, point), ()))
