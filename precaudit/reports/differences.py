"""What one run is against another, in sentences: tokens that flip, KL, and the first difference beyond rounding."""

from collections.abc import Container, Sequence
from math import hypot, inf, isfinite

from precaudit.reports.headline import Headline
from precaudit.reports.judgement import digits
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

Known = Sequence[ErrorRecord] | None


def headline(
    pairs: Sequence[ErrorRecord], mine: Known, other: Known, unjudged: str = "", asked: Container[str] | None = None
) -> Headline:
    """Return the first sentence on run A against run B.

    ``mine``, ``other``: the records of each against FP64, None where it was not compared (``unjudged``: the command
    that does). ``asked``: the points that both runs were asked for, None for all: those recorded for the sake of
    others have no forward error, and neither have caches; what is made of them has. A difference is beyond rounding
    where it is larger than what the two policies' emulated rounding makes of either forward error, together, times
    the limit of forward errors.
    """
    known = [e for e in pairs if e.numberless is None]
    if not known:
        return Headline("?", "the runs have no tensor in common that can be compared.")
    if off := [e for e in known if e.nonfinite]:
        return Headline("✗", f"{_at(off[0])}: {off[0].nonfinite:,} elements are NaN or infinite in one of the runs.")
    apart = [e for e in known if e.max_diff != 0]
    lacking = [e for e in pairs if e.missing is not None or e.unknown is not None]
    if not apart and lacking:
        return Headline("?", f"{len(known):,} tensors are equal, and {len(lacking):,} could not be compared.")
    if not apart:
        return Headline("✓", f"all {len(known):,} tensors that both runs have are equal.")
    told = f"{len(apart):,} of {len(known):,} tensors differ"
    if mine is None or other is None:
        return Headline("?", f"{told}; whether beyond rounding is known once both are compared with FP64.", unjudged)
    times = _times(apart, mine, other)
    limit = default_limits().ratio.value
    if beyond := [e for e, x in times if not x <= limit]:  # NaN is within no limit
        first = min(beyond, key=lambda e: (e.phase not in ("prefill", "call"), Place.of(e).order))
        size = next(x for e, x in times if e is first)
        much = "where rounding makes none" if size == inf else f"{digits(size)} × what rounding makes (limit {limit:g})"
        return Headline("✗", f"{told}, first beyond rounding: {_at(first)}, {much}.")
    judged, caches = {Place.of(e) for e, _ in times}, _caches(mine) | _caches(other)
    own = [e for e in apart if e.point not in caches and (asked is None or e.point in asked)]
    if open_ := sum(Place.of(e) not in judged for e in own):
        return Headline("?", f"{told}; of {open_:,} what rounding makes is not known.", unjudged)
    if lacking or not times:
        n = len(lacking) or len(apart)
        why = "could not be compared" if lacking else "have no error from FP64"
        return Headline("?", f"{told}, none beyond rounding; {n:,} {why}.", unjudged)
    largest = max(x for _, x in times)
    return Headline("✓", f"{told}, no more than rounding makes: at most {digits(largest)} × that (limit {limit:g}).")


def sentences(pairs: Sequence[ErrorRecord]) -> list[str]:
    """Say how often the top-1 token differs and how far the distributions are, and what could not be compared."""
    rows = [(e, i) for e in pairs if e.distribution is not None for i in range(len(e.distribution.positions))]
    out = []
    if rows:
        flips = [(e, i) for e, i in rows if e.distribution is not None and e.distribution.top1[i] != 1.0]
        kls = [value(e.distribution.kl[i]) for e, i in rows if e.distribution is not None]
        finite = [x for x in kls if isfinite(x)]
        text = f"Top-1 tokens differ at {len(flips)} of {len(rows)} positions"
        if flips:
            e, i = flips[0]
            assert e.distribution is not None
            text += f", first at position {e.distribution.positions[i]} of {e.prompt} ({e.phase})"
        if finite:
            text += (
                f"; KL from the reference run is {max(finite):.1e} at most, {sum(finite) / len(finite):.1e} on average"
            )
        out.append(text + ("." if len(finite) == len(kls) else f"; {len(kls) - len(finite)} rows are NaN or infinite."))
    if lacking := [e for e in pairs if e.numberless is not None]:
        points = ", ".join(dict.fromkeys(e.point for e in lacking))
        why = lacking[0].numberless or ""
        out.append(f"Not compared: {len(lacking):,} tensors of {points} ({why}).")
    return out


def _times(
    apart: Sequence[ErrorRecord], mine: Sequence[ErrorRecord], other: Sequence[ErrorRecord]
) -> list[tuple[ErrorRecord, float]]:
    """Return, of differences whose rounding is known, how many times that they are."""
    a, b = _noises(mine), _noises(other)
    found = []
    for e in apart:
        place = Place.of(e)
        if place in a and place in b:
            noise = hypot(a[place], b[place])
            found.append((e, value(e.rel_l2) / noise if noise else inf))
    return found


def _caches(errors: Sequence[ErrorRecord]) -> set[str]:
    """Return the points that are judged as state alone."""
    return {e.point for e in errors if e.kind == "state"} - {e.point for e in errors if e.kind == "forward"}


def _noises(errors: Sequence[ErrorRecord]) -> dict[Place, float]:
    """Return what the emulated policy's rounding makes of each forward error, relative to FP64."""
    return {
        Place.of(e): value(e.rel_l2) / value(e.ratio) if value(e.ratio) else 0.0
        for e in errors
        if e.kind == "forward" and e.numberless is None and e.ratio is not None and isfinite(value(e.ratio))
    }


def _at(e: ErrorRecord) -> str:
    place = e.point if e.layer is None else f"{e.point} of layer {e.layer}"
    return f"{place}, {e.phase} of {e.prompt}"
