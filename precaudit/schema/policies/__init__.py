"""Policies: the number format of each part of the computation (docs/files.md), one TOML file each."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precaudit.errors import UserError, nearest
from precaudit.numbers.formats import ALIASES, INTEGERS, parse_format
from precaudit.schema.toml import toml_table

if TYPE_CHECKING:
    from precaudit.schema.records.devices import SplitSum

ARITHMETIC = ("float32", "bfloat16", "float16")
STORAGE = (*ARITHMETIC, "float8_e4m3fn", "float8_e5m2")
PRECISIONS = ("default", "high", "highest")
PRESETS = (
    "BF16_BF16_F32",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "F16_F16_F32",
    "F16_F16_F16",
    "BF16_BF16_BF16",
    "TF32_TF32_F32",
    "TF32_TF32_F32_X3",
    "F32_F32_F32",
)


@dataclass(frozen=True)
class Policy:
    """One format per part; the defaults are policy ``bf16``.

    weights: ``as-stored`` or a format they are rounded to once. activations: outputs of norms, projections and RoPE.
    residual: the residual stream. norm, rope, softmax: the arithmetic inside those operations (RoPE's tables too).
    scores: q·k as stored, before the mask. probs, attn_out, logits: outputs as stored. mlp: act(gate) as stored.
    kv_cache: the cache. matmul: a precision or a dot preset. excess_precision: ``platform`` lets the compiler keep
    more bits inside fusions than the formats say, ``off`` forbids it. decode_attention: ``as-prefill`` or
    ``float32`` (q and the cache are cast up, attention runs in float32). embed_factor: Gemma's √width that multiplies
    embedding rows, ``published``: rounded to the weights' format, as transformers does, or ``exact``; in other families
    it is exact, and recorded so. attention: which kernel attends, ``naive`` (scores, softmax and P · v one after
    another), ``sdpa`` (``jax.nn.dot_product_attention``) or ``flash`` (blocks of keys under a running maximum); the
    last two decide some formats themselves (``KERNELS``). layers: in a ``scan``, or ``unrolled``, written out one after
    another. fused: which projections of the same rows are one product of weights that were put together when they were
    loaded: ``none``, ``qkv``, or gate and up, too. mask: the keys that a row sees, ``full``: as the model says, or
    ``window:N``: the last N of them, itself included, which is another formula than the model's.

    weights as integers are those of projections alone (``int8``: a scale for every output channel; ``int8/128``,
    ``int4/128``: for every group of 128 of the contracted axis); embeddings: whether embedding and head follow them.
    projection_inputs: ``int8`` quantises what a layer's projections read, row by row, and multiplies integers.
    router: the router logits of a mixture of experts as stored, ``as-activations`` or a format of their own.
    kv_cache ``int8``: a scale for every token and head; what attention reads is of the activations' format.
    """

    name: str = "bf16"
    weights: str = "as-stored"
    activations: str = "bfloat16"
    residual: str = "bfloat16"
    norm: str = "float32"
    rope: str = "float32"
    scores: str = "bfloat16"
    softmax: str = "float32"
    probs: str = "bfloat16"
    attn_out: str = "bfloat16"
    mlp: str = "bfloat16"
    kv_cache: str = "bfloat16"
    logits: str = "float32"
    matmul: str = "default"
    excess_precision: str = "platform"
    decode_attention: str = "as-prefill"
    embed_factor: str = "published"
    embeddings: str = "as-weights"
    projection_inputs: str = "as-activations"
    attention: str = "naive"
    layers: str = "scan"
    fused: str = "none"
    mask: str = "full"
    router: str = "as-activations"

    def settings(self) -> dict[str, str]:
        """The keys and values without the name."""
        return {k: v for k, v in asdict(self).items() if k != "name"}

    def format_of(self, key: str) -> str:
        """Return the format that a key says, of ``as-activations`` that of the activations."""
        name: str = getattr(self, key)
        return self.activations if name == "as-activations" else name


@dataclass(frozen=True)
class DevicePolicy(Policy):
    """A policy as several devices made it: the points whose products were made in parts, each way once.

    ``made_in_parts``: whether in decode, the point, and the ways, as the compiled programs say; ``unread``: whether
    one of these was not read.
    """

    made_in_parts: tuple[tuple[bool, str, tuple["SplitSum", ...]], ...] = ()
    unread: bool = False

    def splits(self, decode: bool) -> tuple[tuple[str, "SplitSum"], ...]:
        """Return {point: how its product is added up} of decode or of whole sequences; of several ways that of most."""
        of = [(point, ways) for phase, point, ways in self.made_in_parts if phase == decode]
        return tuple((point, max(ways, key=lambda way: (way.parts, way.summed))) for point, ways in of)

    def ways(self, point: str, decode: bool) -> tuple["SplitSum", ...]:
        """Return the ways in which a point's products are made in parts; none where they are not."""
        return next((ways for phase, name, ways in self.made_in_parts if (phase, name) == (decode, point)), ())


KEYS = tuple(f.name for f in fields(Policy) if f.name != "name")
WORDS = {
    "weights": ("as-stored", *STORAGE, *INTEGERS),
    "kv_cache": (*STORAGE, "int8"),
    "matmul": (*PRECISIONS, *PRESETS),
    "excess_precision": ("platform", "off"),
    "decode_attention": ("as-prefill", "float32"),
    "embed_factor": ("published", "exact"),
    "embeddings": ("as-weights", "as-stored"),
    "projection_inputs": ("as-activations", "int8"),
    "attention": ("naive", "sdpa", "flash"),
    "layers": ("scan", "unrolled"),
    "fused": ("none", "qkv", "qkv+gate_up"),
    "mask": ("full", "window:N"),
    "router": ("as-activations", *ARITHMETIC),
}
# What an attention kernel decides: of a key its format, or the key whose format it takes. ``jax.nn``'s casts P to the
# format of k, and its result is of that (jax/_src/nn/functions.py, _dot_product_attention_core).
KERNELS = {
    "naive": {},
    "sdpa": {"scores": "float32", "softmax": "float32", "probs": "activations", "attn_out": "activations"},
    "flash": {"scores": "float32", "softmax": "float32"},
}
FLASH_BLOCK = 128  # keys of a block, as in JAX's Pallas kernel for TPUs (flash_attention.BlockSizes)


def on_device(policy: Policy, device: str) -> Policy:
    """Return the policy with ``matmul`` as a kind of device (cpu, gpu, tpu) makes it.

    XLA:CPU takes every setting and multiplies in float32 (docs/numerics.md). A TPU's ``default``, ``high`` and
    ``highest`` are one, three and six bfloat16 passes (JAX's ``lax.Precision``). Six keep every bit of a float32
    operand, and where they are asked for the compiler may choose its vector unit, which multiplies in float32: they
    are emulated so (six passes: numpy_decoder/honest.py). A GPU's ``default`` and ``high`` are TF32 in the products
    that its tensor cores make (seen on an H100).
    """
    if device == "cpu":
        return replace(policy, matmul="highest")
    made = {
        "tpu": {"default": "BF16_BF16_F32", "high": "BF16_BF16_F32_X3", "BF16_BF16_F32_X6": "highest"},
        "gpu": dict.fromkeys(("default", "high"), "TF32_TF32_F32"),
    }.get(device, {})
    return replace(policy, matmul=made.get(policy.matmul, policy.matmul))


def recorded_policy(record: Any) -> Policy:
    """Return the policy of a run, from its run.json, as its devices made it."""
    from precaudit.schema.records.devices import device_kind

    policy = on_device(declared_policy(record), device_kind(record.device))
    return policy if record.mesh.get("model", 1) == 1 else DevicePolicy(**vars(policy), **_in_parts(record))


def _in_parts(record: Any) -> dict[str, Any]:
    """Return how the programs of a run on several devices make products in parts; a point that one has whole, too."""
    from precaudit.schema.records.devices import SplitSum

    found: list[tuple[bool, str, tuple[SplitSum, ...]]] = []
    for decode in (False, True):
        read = [n.split for n in record.neutrality if (n.phase == "decode") == decode and n.split is not None]
        for point in sorted({name for split in read for name in split}):
            ways = {way for split in read for way in split.get(point, (SplitSum(parts=1, summed=""),))}
            found.append((decode, point, tuple(sorted(ways, key=str))))
    unread = not record.neutrality or any(n.split is None for n in record.neutrality)
    return {"made_in_parts": tuple(found), "unread": unread}


def complete_policy(recorded: Mapping[str, str]) -> dict[str, str]:
    """Return a recorded policy with the keys that were not there when it was recorded, as they were then."""
    then = dict.fromkeys(("projection_inputs", "router"), "as-activations")
    then |= {"embed_factor": "exact", "embeddings": "as-weights"}
    return then | {"attention": "naive", "layers": "scan", "fused": "none", "mask": "full"} | dict(recorded)


def declared_policy(record: Any) -> Policy:
    """Return the policy of a run as it was declared."""
    return Policy(**{f.name: record.policy[f.name] for f in fields(Policy)})


def announced_policy(recorded: Mapping[str, str]) -> Policy:
    """Return the policy that a program's run says its program announces; raises UserError for what is none."""
    name = recorded.get("name", "")
    return apply_settings(Policy(name=name), {k: v for k, v in recorded.items() if k != "name"}, rename=False)


def held_weights(policy: Policy) -> str:
    """Return what a policy makes of a checkpoint's values, as a key: FP64 values of one are not those of another."""
    apart = policy.embeddings == "as-stored" and policy.weights != "as-stored"
    return f"{policy.weights}, embeddings as stored" if apart else policy.weights


def check_settings(policy: Policy) -> None:
    """Raise UserError for keys that do not go together."""
    if policy.projection_inputs == "int8" and policy.weights not in INTEGERS:
        raise UserError(
            f"policy {policy.name}: projection_inputs = int8 multiplies integers, and weights = {policy.weights} are "
            f"none; set weights to {', '.join(INTEGERS)}"
        )


def window_of(policy: Policy) -> int | None:
    """Return how many keys a row sees under a policy's mask, itself included; None: those the model says."""
    kind, _, size = policy.mask.partition(":")
    return int(size) if kind == "window" else None


def besides(recorded: Mapping[str, str]) -> str:
    """Return what makes errors under a recorded policy besides rounding: its mask, if that is not the model's."""
    mask = recorded.get("mask", "full")
    return "" if mask == "full" else f"the mask {mask}"


def keeps_unrounded(policy: Policy) -> bool:
    """Whether a compiler may hand an operation what it has just rounded as it was before."""
    return policy.excess_precision != "off" and policy.activations != "float32"


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with the package."""
    return tuple(sorted(p.name[:-5] for p in resources.files(__name__).iterdir() if p.name.endswith(".toml")))


def load_policy(name: str) -> Policy:
    """Return the shipped policy ``name`` or the one in the TOML file at that path; raises UserError."""
    path = Path(name)
    if name in shipped_policies():
        text, label = (resources.files(__name__) / f"{name}.toml").read_bytes(), name
    elif path.suffix == ".toml" and path.is_file():
        text, label = path.read_bytes(), path.stem
    elif len(several := [part.strip() for part in name.split(",") if part.strip()]) > 1:
        raise UserError(f"{name!r} names {len(several)} policies, and one is wanted here")
    else:
        raise UserError(f"unknown policy {name!r}: no .toml file of that name{nearest(name, shipped_policies())}")
    table = toml_table(text, f"policy {name}")
    try:
        return apply_settings(Policy(name=label), {k: str(v) for k, v in table.items()}, rename=False)
    except UserError as error:
        raise UserError(f"policy {name}: {error}") from None


def apply_settings(policy: Policy, settings: dict[str, str], rename: bool = True) -> Policy:
    """Return ``policy`` with keys replaced, named like ``bf16+scores=float32``; raises UserError.

    Formats that its attention kernel decides follow, unless they are named here with another value, which is refused.
    """
    clean = {key: _value(key, text) for key, text in settings.items()}
    made = replace(policy, **clean)
    made = replace(made, **{k: v for k, v in kernel_formats(made).items() if k not in clean})
    check_kernel(made)
    changed = {k: v for k, v in made.settings().items() if getattr(policy, k) != v}
    label = "".join(f"+{k}={v}" for k, v in sorted(changed.items())) if rename else ""
    return replace(made, name=policy.name + label)


def kernel_formats(policy: Policy) -> dict[str, str]:
    """Return the formats that a policy's attention kernel decides, whatever is asked."""
    return {k: getattr(policy, v, v) for k, v in KERNELS[policy.attention].items()}


def check_kernel(policy: Policy, platform: str | None = None) -> None:
    """Raise UserError for keys that the policy's attention kernel would not honour, or a platform not make.

    For float16 operands ``jax.nn``'s asks for F16_F16_F32, which XLA:CPU and libtpu refuse when they compile.
    """
    for key, made in kernel_formats(policy).items():
        if (asked := getattr(policy, key)) != made:
            raise UserError(
                f"policy {policy.name}: attention = {policy.attention} keeps {key} in {made}, so {key} = {asked} is "
                "not honoured; leave it out, or use attention = naive"
            )
    if policy.attention == "sdpa" and policy.matmul not in PRECISIONS:
        raise UserError(
            f"policy {policy.name}: attention = sdpa chooses the preset of its products itself, so matmul = "
            f"{policy.matmul} is not honoured there; use {', '.join(PRECISIONS)}, or attention = flash or naive"
        )
    if policy.attention == "sdpa" and policy.activations == "float16" and platform in ("cpu", "tpu"):
        raise UserError(
            f"policy {policy.name}: attention = sdpa multiplies float16 by the preset F16_F16_F32, which {platform} "
            "does not have; use attention = flash or naive"
        )


def parse_settings(items: tuple[str, ...]) -> dict[str, str]:
    """Return ``{"scores": "float32"}`` for ``("scores=float32",)``."""
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise UserError(f"--set {item!r}: write KEY=VALUE, for example scores=float32")
        settings[key.strip()] = value.strip()
    return settings


def _value(key: str, text: str) -> str:
    if key not in KEYS:
        raise UserError(f"unknown policy key {key!r}{nearest(key, KEYS)}")
    if key == "mask":
        return _mask(text)
    allowed = WORDS.get(key, ARITHMETIC)
    value = ALIASES.get(text, text)
    if value not in allowed:
        if key not in WORDS or key == "kv_cache":
            parse_format(text)
        raise UserError(f"policy key {key} cannot be {text!r}{nearest(text, allowed)}")
    return value


def _mask(text: str) -> str:
    if text == "full" or re.fullmatch("window:[1-9][0-9]{0,8}", text):
        return text
    if text.startswith("blocks"):
        raise UserError(
            f"policy key mask cannot be {text!r}: block-sparse attention is not built, neither in the decoder nor in "
            "the FP64 reference; use full, or window:N for the last N keys"
        )
    raise UserError(
        f"policy key mask cannot be {text!r}: use full, or window:N for the last N keys, such as window:128"
    )
