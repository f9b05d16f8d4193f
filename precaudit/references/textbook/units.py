"""Which unit of a TPU makes a place's float32 products, and in how many passes, as the run's compiled program says."""

from dataclasses import replace

from precaudit.models.numpy_decoder.passes import PRESETS
from precaudit.numbers.formats import INTEGERS
from precaudit.recording.runs.compiled import ways_of
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.graphs.decoder import POINTS, parts_of
from precaudit.schema.graphs.point import Point
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy
from precaudit.schema.records.devices import FROM_JAXPR, Way, device_kind

SETTINGS: dict[Way, str] = {
    "1 pass": "BF16_BF16_F32",
    "3 passes": "BF16_BF16_F32_X3",
    "6 passes": "highest",
    "float32": "F32_F32_F32",
    "float32, both operands bfloat16": "BF16_BF16_F32",
}


def factor_formats(policy: Policy, row: Point, decode: bool) -> tuple[str, ...]:
    """Return the formats of what an operation multiplies, as a policy has them."""
    if decode and policy.decode_attention == "float32" and row.reads_keys:
        return ("float32",)
    return tuple(policy.format_of(key) for key in row.operands)


def multiplies_integers(policy: Policy, row: Point) -> bool:
    """Whether an operation multiplies integer weights."""
    of_weights = (row.projects and row.only != "sparse") or (row.kind == "head" and policy.embeddings == "as-weights")
    return of_weights and policy.weights in INTEGERS


def tpu_chooses(recorded: Recorded, policy: Policy, place: Place) -> bool:
    """Whether a place's products are such as a TPU's compiler chooses the precision of: float32, below six passes.

    ``policy``: as its device makes it (``policies.on_device``).
    """
    device, row = recorded.run.record.device, POINTS[place.point]
    if device_kind(device) != "tpu" or device.endswith(FROM_JAXPR) or not row.sums:
        return False
    return policy.matmul in PRESETS and "float32" in factor_formats(policy, row, place.phase == "decode")


def why_undecided(recorded: Recorded, policy: Policy, place: Place) -> str | None:
    """Return why it is not known how a place's products were made; None where it is, or where it changes nothing."""
    if not tpu_chooses(recorded, policy, place):
        return None
    found = _ways(recorded, policy, place)
    if not found:
        return "products whose unit and passes are not known: the compiled program was not read there"
    if len(found) > 1 or not found <= SETTINGS.keys():
        return f"products that the compiled program computes in several ways: {', '.join(sorted(found))}"
    return None


def policy_at(recorded: Recorded, policy: Policy, place: Place) -> Policy:
    """Return a policy with ``matmul`` as the compiled program makes a place's products.

    The policy itself where that is open, or is less than the policy asks for: a program that makes fewer passes is not
    excused by having been compiled so. Narrow rows times integers are exact in float32 on a GPU, whatever TF32 keeps of
    the values that they stand for.
    """
    if device_kind(recorded.run.record.device) == "gpu" and multiplies_integers(policy, POINTS[place.point]):
        return replace(policy, matmul="highest")
    if not tpu_chooses(recorded, policy, place) or why_undecided(recorded, policy, place) is not None:
        return policy
    (way,) = _ways(recorded, policy, place)
    made = SETTINGS[way]
    less = made in PRESETS and PRESETS[made][0] < PRESETS[policy.matmul][0]
    return policy if less else replace(policy, matmul=made)


def _ways(recorded: Recorded, policy: Policy, place: Place) -> frozenset[Way]:
    """Return the ways of all products inside a place's operation; none where that of any is not known.

    One operand that the policy itself holds in a narrower format is no rounding.
    """
    row = POINTS[place.point]
    inner = [name for name in parts_of(place.point) if POINTS[name].sums]
    found = [ways_of(recorded, place.prompt, place.phase, name) for name in (place.point, *inner)]
    if policy.attention != "naive" and row.kind == "mix":
        found = found[:1]  # one kernel makes both products, under its own name
    narrow = set(factor_formats(policy, row, place.phase == "decode")) != {"float32"}
    named: dict[Way, Way] = {"float32, one operand bfloat16": "float32"} if narrow else {}
    return frozenset(named.get(way, way) for ways in found for way in ways) if all(found) else frozenset()
