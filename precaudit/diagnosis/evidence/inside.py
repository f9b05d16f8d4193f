"""Narrow formats that a program declares inside: a finding beyond rounding, else a note with its price."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from precaudit.diagnosis.evidence.records import Finding
from precaudit.judging.rules import judge
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.schema.digits import roundoffs
from precaudit.schema.limits import default_limits
from precaudit.schema.places import layers_text
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import EmulatedError, ErrorRecord, ForwardError

Emulated = EmulatedError | ForwardError
SHOWN = 4  # points that a sentence lists


class Inside(NamedTuple):
    """Records that one narrow format inside makes, and whether the gate fails any of them for it."""

    cause: str
    records: tuple[Emulated, ...]
    beyond: bool


def formats_inside(errors: Sequence[ErrorRecord]) -> list[Inside]:
    """Return what records tell of narrow formats inside operations, in the program's order."""
    found: dict[str, list[Emulated]] = {}
    for e in errors:
        if isinstance(e, EmulatedError | ForwardError) and e.narrow is not None:
            found.setdefault(e.narrow.cause, []).append(e)
    return [Inside(cause, tuple(its), any(map(_beyond, its))) for cause, its in found.items()]


def _beyond(e: Emulated) -> bool:
    v = judge(e, default_limits())
    return v is not None and v.metric == "price"


def inside_sentence(one: Inside, points: Sequence[ProgramPoint]) -> str:
    """Return what is rounded, where, how far that is off in unit roundoffs, and what float32 inside would leave."""
    worst = _worst(one)
    assert worst.narrow is not None
    known = {p.name: p for p in points}
    names = list(dict.fromkeys(e.point.partition("#")[0] for e in one.records))
    lines = list(dict.fromkeys(p.source for e in one.records if (p := known.get(e.point)) is not None and p.source))
    layers = sorted({e.layer for e in one.records if e.layer is not None})
    at = f" of {layers_text(layers)}" if layers else ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    u = FORMATS[worst.dtype or "float32"].unit_roundoff
    off, wide = value(worst.narrow.error) / u, value(worst.narrow.wide) / u
    source = f" ({', '.join(lines)})" if lines else ""
    return (
        f"{worst.narrow.says}: {' and '.join(names[:SHOWN])}{more}{at}{source}; an error of {roundoffs(off)} u at "
        f"{worst.point}, with float32 inside {roundoffs(wide)} u"
    )


def inside_findings(inside: Sequence[Inside], points: Sequence[ProgramPoint]) -> Iterator[Finding]:
    """Yield one finding for every format that makes more of an error than rounding does."""
    for one in inside:
        if one.beyond:
            worst, layers = _worst(one), tuple(sorted({e.layer for e in one.records if e.layer is not None}))
            assert worst.narrow is not None
            yield Finding(
                kind="format",
                cause=one.cause,
                says=inside_sentence(one, points),
                layer=one.records[0].layer,
                point=one.records[0].point,
                layers=layers,
                phases=(worst.phase,),
                prompts=(worst.prompt,),
                records=len(one.records),
                rel_l2=worst.narrow.error,
                explained=None,
                equal=None,
                second=None,
                worst=None,
            )


def _worst(one: Inside) -> Emulated:
    """Return the record that such a format takes farthest off."""
    return max(one.records, key=lambda e: 0.0 if e.narrow is None else value(e.narrow.error))
