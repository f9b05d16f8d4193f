"""What the reports say, gathered from the records: one line a layer and point, and a few sentences."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from precaudit.references.attribution import Attribution, attribute
from precaudit.schema.digits import beside, digits, error_share, roundoffs, share_words, short
from precaudit.schema.emulations import SUMS, Emulation, of_policy_alone
from precaudit.schema.filed import of_kinds
from precaudit.schema.graphs.decoder import CACHES, POINTS
from precaudit.schema.limits.checks import SAME, farthest_formula
from precaudit.schema.places import ORDER
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import (
    AccumulationError,
    E,
    ErrorRecord,
    FormulaError,
    ForwardError,
    LocalError,
    StateError,
    WeightError,
)
from precaudit.schema.selection import PHASES


@dataclass(frozen=True)
class SummaryLine:
    """All records of one layer and point, by their worst: sizes of the largest, explained of the least."""

    layer: int | None
    point: str
    forward: ForwardError | None
    local: LocalError | None
    blame: Attribution | None
    nonfinite: int
    unknown: tuple[str, ...]


def worst_lines(errors: Iterable[ErrorRecord]) -> list[SummaryLine]:
    """Return a line for every layer and point with a forward or local record, in layer and then table order."""
    groups: dict[tuple[int | None, str], _Group] = {}
    for e in errors:
        if isinstance(e, ForwardError | LocalError):
            groups.setdefault((e.layer, e.point), _Group()).add(e)
    last = 1 << 30
    keys = sorted(groups, key=lambda key: (last if key[0] is None else key[0], ORDER[key[1]]))
    return [groups[key].line(*key) for key in keys]


@dataclass
class _Group:
    """The records of one layer and point as they stream by: ``blamed``, one that fails, or that is explained least."""

    forward: ForwardError | None = None
    local: LocalError | None = None
    blamed: tuple[LocalError, Attribution] | None = None
    nonfinite: int = 0
    unknown: set[str] = field(default_factory=set)

    def add(self, e: ForwardError | LocalError) -> None:
        self.nonfinite += e.nonfinite
        if e.numberless is not None:
            self.unknown.add(e.numberless)
        elif isinstance(e, ForwardError):
            self.forward = _larger(self.forward, e)
        else:
            self.local = _larger(self.local, e)
            a = attribute(e)
            if a is not None and (self.blamed is None or (a.passes, a.share) < _least(self.blamed[1])):
                self.blamed = e, a

    def line(self, layer: int | None, point: str) -> SummaryLine:
        fails = self.blamed is not None and not self.blamed[1].passes
        return SummaryLine(
            layer=layer,
            point=point,
            forward=self.forward,
            local=self.blamed[0] if fails and self.blamed is not None else self.local,
            blame=None if self.blamed is None else self.blamed[1],
            nonfinite=self.nonfinite,
            unknown=tuple(sorted(self.unknown)),
        )


def _least(a: Attribution) -> tuple[bool, float]:
    return a.passes, a.share


def _larger(before: E | None, e: E) -> E:
    if before is None or (e.nonfinite, value(e.rel_l2)) > (before.nonfinite, value(before.rel_l2)):
        return e
    return before


def blame_text(a: Attribution | None) -> str:
    """Return who explains an error, in a few characters."""
    if a is None:
        return "unknown"
    if a.inherits is not None:
        return f"from {a.inherits}"
    if a.name == "exact":
        return "exact"
    if a.name == "none of these":
        left = f" ({roundoffs(a.left_u)} u)" if isfinite(a.left_u) else ""
        return f"rounding, {roundoffs(a.left_u)} u" if a.passes else f"none of these{left}"
    return a.name


def share_text(a: Attribution | None) -> str:
    """Return the share explained as a percentage, or what is left in u where nothing is worth explaining."""
    if a is None:
        return "?"
    if a.name == "none of these":
        return f"{roundoffs(a.left_u)}u" if isfinite(a.left_u) else "none"
    percent = 100 * a.share
    return "100%" if percent >= 99.95 else f"{percent:.1f}%" if percent >= 0.05 else "none"


def size_text(e: ErrorRecord | None, name: str = "rel_l2") -> str:
    """Return one of a record's sizes; ``NaN`` where elements are NaN or infinite, which no size counts."""
    return "" if e is None else "NaN" if e.nonfinite else short(getattr(e, name))


def row_place(e: ErrorRecord | None) -> str:
    """Return where a record's worst rows are: ``l1_source d3 t587 h2`` is decode step 3, position 587, head 2."""
    if e is None:
        return ""
    text = e.prompt if e.phase == "prefill" else f"{e.prompt} {e.phase[0]}{e.step}"
    for scope in ("token", "head"):
        found = (e.scopes or {}).get(scope, {}).get("rel_l2")
        if found is not None:
            text += f" {scope[0]}{found[1]}"
    return text


def accumulation_sentence(errors: Sequence[ErrorRecord], whole: bool = True) -> str | None:
    """Say whether accumulation explains the local error of attention's output, else of scores or the first sum.

    ``whole``: with the sizes that each accumulation would make, which name no cause.
    """
    accums, named_in = set(), set()
    for e in of_kinds(errors, LocalError):
        accums |= {k for k in e.explained or {} if k.startswith(SUMS)}
        named_in |= {e.point} if e.explained and e.max_diff else set()
    summing = [POINTS[p] for p in POINTS if POINTS[p].sums and p in named_in]
    if not accums or not summing:
        return None
    point = min(summing, key=lambda p: (p.kind != "mix", p.kind != "score")).name
    sizes = {
        hash((_place(e), e.candidate)): value(e.rel_l2) for e in of_kinds(errors, AccumulationError) if e.point == point
    }  # hashes as in unique.UniqueHashes
    ratios, shares = (defaultdict[str, "array[float]"](lambda: array("d")) for _ in range(2))
    policy, names, rows, named = array("d"), None, 0, 0
    for e in of_kinds(errors, LocalError):
        if e.point != point or not e.explained or not e.max_diff:
            continue
        a, rows = attribute(e), rows + 1
        named += a is not None and (made := Emulation.of(a.name)) is not None and bool(made.accumulation)
        for name in accums:
            size = sizes.get(hash((_place(e), name)))
            if size is not None and value(e.rel_l2):
                ratios[name].append(size / value(e.rel_l2))
            if name in e.explained:
                shares[name].append(value(e.explained[name]))
        if names is None:
            own = of_policy_alone(e.explained)
            names = [] if own is None else [own[0]]
        policy.extend(value(e.explained[k]) for k in names if k in e.explained)
    if not shares:
        return None
    told = [
        f"{name.removeprefix(SUMS)} {digits(median(ratios[name]), 2)} × its size, "
        f"explains {error_share(round(median(its), 4))}"
        for name, its in sorted(shares.items())
        if name in ratios
    ]
    verdict = (
        f"Accumulation explains {named} of {rows} {point} errors"
        if 2 * named > rows
        else f"Accumulation explains {named} of {rows} {point} errors, the others it does not"
        if named and rows < 100 * named
        else f"Accumulation does not explain the error of {point}"
    )
    rest = f"; the declared policy explains {error_share(median(policy))}" if policy else ""
    return f"{verdict} (medians: {'; '.join(told)}){rest}." if whole else f"{verdict}{rest}."


def _place(e: ErrorRecord) -> tuple[object, ...]:
    return (e.prompt, e.phase, e.step, e.layer, e.point)


def local_sentence(errors: Sequence[ErrorRecord]) -> str | None:
    """Say how many local errors are explained, and name the first that is not."""
    rows, lost, later, unknown, why = 0, 0, 0, 0, ""
    first: tuple[LocalError, Attribution] | None = None
    for e in of_kinds(errors, LocalError):
        if e.numberless is not None:
            unknown, why = unknown + 1, why or e.numberless
        if (a := attribute(e)) is not None:
            rows, lost, later = rows + 1, lost + a.fails, later + (a.inherits is not None)
            if a.fails and (first is None or _deep(e) < _deep(first[0])):
                first = e, a
    tail = f" {unknown} are unknown ({why})." if unknown else ""
    if not rows:
        return tail.strip() or None
    if first is None:
        return f"Rounding accounts for all {rows:,} local errors.{tail}"
    e, a = first
    where = e.point if e.layer is None else f"layer {e.layer} {e.point}"
    worst = e.worst
    values = ""
    if worst is not None:
        values = f"; worst element {list(worst.index)}: {beside(value(worst.candidate), value(worst.reference))}"
    best = "the best emulation" if a.name == "none of these" else a.name
    known = isfinite(a.share) and isfinite(a.left_u)
    explained = f", {best} explains {share_words(a.share)}, {roundoffs(a.left_u)} u unexplained" if known else ""
    more = f"; {later} inherit from a point that is" if later else ""
    return (
        f"{lost} of {rows} local errors are more than rounding{more}. First: {where} ({row_place(e)}): "
        f"{f'{e.nonfinite:,} of {e.n:,} elements NaN or infinite' if e.nonfinite else f'error {digits(e.rel_l2)}'}"
        f"{explained}{values}.{tail}"
    )


def _deep(e: ErrorRecord) -> tuple[int, int]:
    return (1 << 30 if e.layer is None else e.layer), ORDER[e.point]


def state_sentence(errors: Sequence[ErrorRecord]) -> str | None:
    """Say whether the caches hold what was written."""
    rows = bad = unknown = 0
    first = ""
    for e in of_kinds(errors, StateError):
        if e.point in CACHES.values():
            rows, bad, unknown = rows + 1, bad + bool(e.mismatched), unknown + (e.numberless is not None)
            first = first or (f"layer {e.layer} {e.point}" if e.mismatched else "")
    if not rows:
        return None
    if bad:
        return f"State: {bad} of {rows} caches differ from the rows that were written; first {first}."
    return f"State: {rows - unknown} of {rows} caches equal the rows that were written, bit for bit."


def formula_sentence(errors: Sequence[ErrorRecord]) -> str | None:
    """Say whether the program's FP64 shadow is the reference."""
    rows = lacking = far = 0
    largest, why = 0.0, ""
    first: FormulaError | None = None
    for e in of_kinds(errors, FormulaError):
        rows, size = rows + 1, farthest_formula(e)[0]
        if e.numberless is not None:
            lacking, why = lacking + 1, why or e.numberless
        elif size <= SAME:
            largest = max(largest, size)
        else:
            far, first = far + 1, e if first is None else min(first, e, key=_formula_order)
    if not rows:
        return None
    if lacking:
        return f"Formula: {lacking} of {rows} places are not known: {why}."
    if first is None:
        return f"Formula: in FP64 the program agrees with the reference at all {rows} places, to {short(largest)}."
    where = first.point if first.layer is None else f"layer {first.layer} {first.point}"
    return (
        f"Formula: in FP64 the program differs from the reference at {far} of {rows} places; first {where} "
        f"({first.prompt} {first.phase} {first.step}): {short(farthest_formula(first)[0])}."
    )


def _formula_order(e: ErrorRecord) -> tuple[int, int, int, int]:
    """Return what orders formula records: phase, layer, point, step."""
    return list(PHASES).index(e.phase), *_deep(e), e.step


def weights_sentence(errors: Sequence[ErrorRecord]) -> str:
    """Say what rounding the weights did."""
    rows, largest = 0, None
    for e in of_kinds(errors, WeightError):
        rows, largest = rows + 1, e if largest is None else max(largest, e, key=lambda e: value(e.rel_l2))
    if largest is None:
        absent = any(e.numberless == "weights" for e in errors)
        return "Weights: not at hand." if absent else "Weights: used as stored."
    return (
        f"Weights: {rows} tensors were rounded once to the model's format, by up to {short(largest.rel_l2)} "
        f"({largest.point}); every error here is against those same values."
    )


def prefill_decode_sentence(pairs: Sequence[PrefillDecodeRecord]) -> str | None:
    """Say whether prefill and decode agree."""
    if not pairs:
        return None
    match, near = sum(p.match for p in pairs), sum(bool(p.near_tie) for p in pairs if not p.match)
    known = [p for p in pairs if isfinite(value(p.kl))]
    most = max(known, key=lambda p: value(p.kl), default=None)
    largest = "" if most is None else f"; largest KL {short(most.kl)} ({most.prompt} t{most.position})"
    none = sum(not p.finite for p in pairs)
    largest += f"; {none} have none: logits are NaN or infinite" if none else ""
    formula = sum(bool(p.agree) and not p.match for p in pairs)
    rest = f", {near} of the others near ties" if match + none < len(pairs) else ""
    rest += f", {formula} as FP64 with RoPE's other lengths" if formula else ""
    return f"Prefill and decode: top-1 equal at {match} of {len(pairs)} positions{rest}{largest}."


def comparison_sentences(
    errors: Sequence[ErrorRecord], pairs: Sequence[PrefillDecodeRecord], whole: bool = True
) -> list[str]:
    """Return what a reader should take away, most important first; ``whole``: with every size."""
    found = [
        local_sentence(errors),
        accumulation_sentence(errors, whole),
        state_sentence(errors),
        formula_sentence(errors),
        prefill_decode_sentence(pairs),
        weights_sentence(errors),
    ]
    return [s for s in found if s]
