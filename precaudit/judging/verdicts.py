"""Verdicts as records, what they add up to, and which of them only inherit (input suspect)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from precaudit.points import CACHES, POINTS
from precaudit.records import ErrorRecord, Number, PrefillDecodeRecord, Record, Worst, number

Status = Literal["pass", "fail", "nonfinite", "missing", "stale", "unknown", "input suspect"]
STATUSES: tuple[Status, ...] = ("fail", "nonfinite", "missing", "stale", "unknown", "input suspect", "pass")
ORDER = {name: i for i, name in enumerate(POINTS)}
ANY = -1  # any step
LAST = 1 << 30  # points outside layers come after them


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
    worst: Worst | None = None
    text: str = ""
    why: str = ""

    @classmethod
    def of(cls, e: ErrorRecord, status: Status, **found: Any) -> "Verdict":
        """Return a verdict on an error record; what a message needs is copied for those that do not pass."""
        place: dict[str, Any] = {
            "kind": e.kind, "prompt": e.prompt, "phase": e.phase, "step": e.step, "layer": e.layer, "point": e.point,
        }  # fmt: skip
        for key in ("value", "limit"):
            if key in found:
                found[key] = number(found[key])
        if status == "pass":
            return cls(status=status, **place, **found)
        named = [k for k in e.explained or {} if k.startswith("policy:") and "+accum:" not in k]
        if named:
            found |= {"explained": (e.explained or {})[named[0]], "policy": named[0].removeprefix("policy:")}
        return cls(status=status, **place, rel_l2=e.rel_l2, worst=e.worst, **found)

    @classmethod
    def of_pair(cls, p: PrefillDecodeRecord, status: Status, **found: Any) -> "Verdict":
        """Return a verdict on a line of prefill_decode.jsonl."""
        if "value" in found:
            found["value"] = number(found["value"])
        return cls(
            status=status, kind=f"{p.against}/decode", prompt=p.prompt, phase="decode", step=p.step, point="logits",
            metric="top1", scope="token", index=p.position, **found,
        )  # fmt: skip

    @property
    def place(self) -> tuple[str, str, int, int | None, str]:
        """Where it belongs."""
        return (self.prompt, self.phase, self.step, self.layer, self.point)

    @property
    def depth(self) -> tuple[int, int]:
        """How far into the program the point is."""
        return (LAST if self.layer is None else self.layer, ORDER.get(self.point, len(ORDER)))


PASS = Verdict(status="pass", kind="")  # of a record that passes: nothing is said of it, so one stands for all


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """0 all pass; 1 a fail or nonfinite; 3 only missing, stale, unknown (docs/design.md §6). Nothing judged is 3."""
    statuses = {v.status for v in verdicts}
    if statuses & {"fail", "nonfinite"}:
        return 1
    return 0 if statuses == {"pass"} else 3


def counts(verdicts: Iterable[Verdict]) -> dict[Status, int]:
    """Return how many verdicts there are of each status that occurs, in order of weight."""
    found = Counter(v.status for v in verdicts)
    return {s: found[s] for s in STATUSES if found[s]}


def suspect(verdicts: Sequence[Verdict], layers: int) -> list[Verdict]:
    """Return the verdicts with consumers of flagged inputs called ``input suspect`` instead of fail or nonfinite.

    A local record's inputs are the points its operation read, for NaN and infinities, as for a forward record,
    everything before it in the program.
    State is judged bit for bit and has no inputs. A formula holds or not whatever was recorded: after the first point
    where one does not, what follows in the program inherits, there and in what decode and rescore read of prefill.
    """
    bad = [v for v in verdicts if v.status in ("fail", "nonfinite")]
    sources = {(v.kind, *v.place): v for v in bad if v.kind in ("local", "state")}
    flagged = {key[1:] for key in sources}
    # a cache is recorded at some steps, and read at all
    flagged |= {(p, phase, ANY, layer, point) for p, phase, _, layer, point in flagged if point in CACHES.values()}
    first: dict[tuple[str, str], tuple[int, int]] = {}
    poisoned: dict[tuple[str, str], tuple[int, int]] = {}
    for v in bad:
        if v.kind in ("local", "state"):
            key = (v.prompt, v.phase)
            first[key] = min(first.get(key, v.depth), v.depth)
            if v.status == "nonfinite":
                poisoned[key] = min(poisoned.get(key, v.depth), v.depth)

    parted: dict[tuple[str, str], tuple[int, int]] = {}
    for v in bad:
        if v.kind == "formula":
            parted[v.prompt, v.phase] = min(parted.get((v.prompt, v.phase), v.depth), v.depth)

    def inherits(v: Verdict) -> bool:
        if v.kind == "formula":
            return any(parted.get((v.prompt, phase), v.depth) < v.depth for phase in (v.phase, "prefill"))
        if v.kind == "local" and v.status == "fail":
            return any(i in flagged for i in inputs(v, layers))
        if v.kind == "local":
            return (v.prompt, v.phase) in poisoned and poisoned[v.prompt, v.phase] < v.depth
        earlier = [first[k] for k in ((v.prompt, v.phase), (v.prompt, "prefill")) if k in first]
        return v.kind != "state" and any(d <= v.depth for d in earlier)

    return [
        msgspec.structs.replace(v, status="input suspect")
        if v.status in ("fail", "nonfinite") and inherits(v)
        else v
        for v in verdicts
    ]  # fmt: skip


def inputs(v: Verdict, layers: int) -> list[tuple[str, str, int, int | None, str]]:
    """Return the places whose recorded values an operation was computed from."""
    found = []
    for name in POINTS[v.point].inputs if v.point in POINTS else ():
        layer = layers - 1 if v.point == "final_norm" else v.layer
        found.append((v.prompt, v.phase, v.step, layer if POINTS[name].per_layer else None, name))
        if v.phase == "decode" and name in CACHES and v.point in ("scores", "attn_out"):
            found.append((v.prompt, v.phase, ANY, v.layer, CACHES[name]))
    if v.point == "mlp_out":  # of a mixture of experts, which alone has this point
        found.append((v.prompt, v.phase, v.step, v.layer, "experts"))
    if v.point == "attn_out":  # made from q, k and v, but on the way from scores and probs where those are seen
        found += [(v.prompt, v.phase, v.step, v.layer, name) for name in ("scores", "probs")]
    return found
