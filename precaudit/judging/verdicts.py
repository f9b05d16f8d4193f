"""Verdicts as records, what they add up to, and which of them only inherit (input suspect)."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from precaudit.schema.emulations import POLICY, of_policy_alone
from precaudit.schema.graphs.decoder import CACHES, LOGITS, POINTS, parts_of
from precaudit.schema.places import Place, order_of
from precaudit.schema.records.base import Number, Record, json_number
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.errors import EmulatedError, ErrorRecord, SumError, Worst
from precaudit.schema.records.runs import Prediction

Status = Literal["pass", "fail", "nonfinite", "missing", "stale", "unknown", "input suspect", "not run"]
STATUSES: tuple[Status, ...] = ("fail", "nonfinite", "missing", "stale", "unknown", "input suspect", "not run", "pass")
BETWEEN = frozenset(name for p in POINTS for name in parts_of(p))  # what others are made from on the way
OVERFLOW = "overflow"  # metric of a finite value that an overflow was made into
HASHED = "mismatched rows"  # of a cache whose rows were hashed: what was read there is not known


class Verdict(Record, frozen=True):
    """What was decided about one record, and by what: ``value`` of ``metric`` at ``scope`` against ``limit``."""

    status: Status
    kind: str
    prompt: str = ""
    phase: str = ""
    step: int = 0
    layer: int | None = None
    point: str = ""
    metric: str = ""
    scope: str = ""
    value: Number | None = None
    limit: Number | None = None
    index: Any = None
    rel_l2: Number | None = None
    explained: Number | None = None
    policy: str = ""
    inherits: str | None = None
    worst: Worst | None = None
    text: str = ""
    why: str = ""

    @classmethod
    def of(cls, e: ErrorRecord, status: Status, **found: Any) -> "Verdict":
        """Return a verdict on an error record; what a message needs is copied for those that do not pass."""
        place: dict[str, Any] = {
            "kind": e.kind,
            "prompt": e.prompt,
            "phase": e.phase,
            "step": e.step,
            "layer": e.layer,
            "point": e.point,
        }
        for key in ("value", "limit"):
            if key in found:
                found[key] = json_number(found[key])
        if status == "pass":
            return cls(status=status, **place, **found)
        emulated = e if isinstance(e, EmulatedError) else None
        own = of_policy_alone(emulated.explained or {}) if emulated is not None else None
        if own is not None:
            found |= {"explained": own[1], "policy": own[0].removeprefix(POLICY)}
        worst = e.worst if _holds_worst(e, found.get("scope", ""), found.get("index")) else None
        inherits = e.inherits if isinstance(e, EmulatedError | SumError) else None
        return cls(status=status, **place, rel_l2=e.rel_l2, worst=worst, inherits=inherits, **found)

    @classmethod
    def of_pair(cls, p: PrefillDecodeRecord, status: Status, **found: Any) -> "Verdict":
        """Return a verdict on a line of prefill_decode.jsonl."""
        if "value" in found:
            found["value"] = json_number(found["value"])
        found.setdefault("metric", "top1")
        return cls(
            status=status,
            kind=f"{p.against}/{p.view}",
            prompt=p.prompt,
            phase=p.view,
            step=p.step,
            point=LOGITS,
            scope="token",
            index=p.position,
            **found,
        )

    @property
    def place(self) -> Place:
        """Where it belongs."""
        return Place.of(self)

    @property
    def depth(self) -> tuple[int, int]:
        """How far into the program the point is."""
        return order_of(self.layer, self.point)


def _holds_worst(e: ErrorRecord, scope: str, index: Any) -> bool:
    """Whether the worst element belongs to the part a verdict is on: then its slice has the largest difference."""
    if index is None or e.worst is None:
        return True
    if scope == "element":
        return tuple(index) == tuple(e.worst.index)
    return (e.scopes or {}).get(scope, {}).get("max_diff", (None, index))[1] == index


PASS = Verdict(status="pass", kind="")  # of a record that passes: nothing is said of it, so one stands for all


def exit_code(statuses: Iterable[Status]) -> int:
    """0 all that ran pass; 1 a fail or nonfinite; 3 only missing, stale, unknown (docs/exit-codes.md), or nothing."""
    found = set(statuses)
    if found & {"fail", "nonfinite"}:
        return 1
    return 0 if found - {"not run"} == {"pass"} else 3


def never_run(verdicts: Iterable[Verdict], ran: Container[str]) -> Iterator[Verdict]:
    """Yield verdicts, those of points that ran nowhere called ``unknown``; ``ran``: points with numbers."""
    for v in verdicts:
        if v.status == "not run" and v.point not in ran:
            v = msgspec.structs.replace(v, status="unknown", text=f"{v.text} in any case: give one that takes it")
        yield v


def counts(verdicts: Iterable[Verdict]) -> dict[Status, int]:
    """Return how many verdicts there are of each status that occurs, in order of weight."""
    found = Counter(v.status for v in verdicts)
    return {s: found[s] for s in STATUSES if found[s]}


def inheriting(verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts with those that something before them accounts for called ``input suspect``.

    A local error is computed from recorded inputs and inherits nothing from them, but for three: what is not finite,
    attn_out that closes from the recorded scores or probs that failed themselves, and attention that read a cache which
    was hashed and differs from the rows that it is judged by. Sums of an operation that was made again from an earlier
    one inherit from what failed in between. A forward error inherits from everything before it in the program. State is
    judged bit for bit and inherits nothing. A formula holds or not whatever was recorded: after the first point where
    one does not, what follows in the program inherits, there and in what decode and rescore read of prefill.
    """
    flagged: set[Place] = set()
    altered: set[tuple[Any, ...]] = set()
    unsummed: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    first: dict[tuple[str, str], tuple[int, int]] = {}
    poisoned: dict[tuple[str, str], tuple[int, int]] = {}
    parted: dict[tuple[str, str], tuple[int, int]] = {}
    for v in verdicts:
        if v.status not in ("fail", "nonfinite"):
            continue
        if v.kind == "local" and v.point in BETWEEN:
            flagged.add(v.place)
        if v.kind == "state" and v.metric == HASHED and v.point in CACHES.values():
            altered.add(v.place[:4])
        if v.kind == "sums":
            unsummed.setdefault(v.place[:4], []).append(v.depth)
        if v.kind == "formula":
            parted[v.prompt, v.phase] = min(parted.get((v.prompt, v.phase), v.depth), v.depth)
        if v.kind in ("local", "state", "sums"):
            key = (v.prompt, v.phase)
            first[key] = min(first.get(key, v.depth), v.depth)
            if v.status == "nonfinite":
                poisoned[key] = min(poisoned.get(key, v.depth), v.depth)

    def inherits(v: Verdict) -> bool:
        if v.kind == "formula":
            return any(parted.get((v.prompt, phase), v.depth) < v.depth for phase in (v.phase, "prefill"))
        if v.kind == "local" and v.status == "fail":
            between = v.inherits is not None and any((*v.place[:4], name) in flagged for name in parts_of(v.point))
            return between or (v.place[:4] in altered and v.point in POINTS and POINTS[v.point].reads_keys)
        if v.kind == "sums" and v.status == "fail":
            since = None if v.inherits is None else v.place._replace(point=v.inherits).order
            return since is not None and any(since <= d < v.depth for d in unsummed[v.place[:4]])
        if v.kind in ("local", "sums"):
            return v.status == "nonfinite" and (v.prompt, v.phase) in poisoned and poisoned[v.prompt, v.phase] < v.depth
        pooled = () if v.prompt else first  # over all prompts and phases
        earlier = [first[k] for k in (*pooled, (v.prompt, v.phase), (v.prompt, "prefill")) if k in first]
        return v.kind != "state" and any(d <= v.depth for d in earlier)

    for v in verdicts:
        if v.status in ("fail", "nonfinite") and inherits(v):
            yield msgspec.structs.replace(v, status="input suspect")
        else:
            yield v


def other_products(p: Prediction | None, prompts: Sequence[str], phase: str, step: int) -> Iterator[Verdict]:
    """Yield ``unknown`` where taps change the precision in which products are made."""
    if p is not None and p.moved:
        yield Verdict(
            status="unknown",
            kind="neutrality",
            prompt=", ".join(prompts),
            phase=phase,
            step=step,
            text=f"with taps the compiler computes products in another precision ({'; '.join(p.moved)}): what is "
            "recorded is of another program; record fewer points, or ask for one precision (matmul=highest)",
        )
