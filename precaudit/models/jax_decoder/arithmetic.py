"""A policy as JAX dtypes, and the one matmul everything goes through."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.errors import UserError
from precaudit.numbers.arrays import common_dtype
from precaudit.numbers.formats import FORMATS
from precaudit.schema.policies import PRECISIONS, Policy, check_kernel


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes of a policy's keys, and ``matmul``: a lax.Precision or a lax.DotAlgorithmPreset.

    ``attention``: the kernel that attends.
    """

    activations: np.dtype[Any]
    residual: np.dtype[Any]
    norm: np.dtype[Any]
    rope: np.dtype[Any]
    scores: np.dtype[Any]
    softmax: np.dtype[Any]
    probs: np.dtype[Any]
    attn_out: np.dtype[Any]
    mlp: np.dtype[Any]
    kv_cache: np.dtype[Any]
    logits: np.dtype[Any]
    router: np.dtype[Any]
    matmul: Any
    decode_in_float32: bool
    attention: str
    inputs_in_int8: bool = False

    @classmethod
    def of(cls, policy: Policy) -> "Arithmetic":
        """Resolve a policy's names."""
        other = ("matmul", "decode_in_float32", "inputs_in_int8", "attention")
        dtypes = {f.name: _dtype(policy.format_of(f.name)) for f in fields(cls) if f.name not in other}
        name = policy.matmul
        matmul = lax.Precision[name.upper()] if name in PRECISIONS else lax.DotAlgorithmPreset[name]
        raised, int8 = policy.decode_attention == "float32", policy.projection_inputs == "int8"
        return cls(**dtypes, matmul=matmul, decode_in_float32=raised, attention=policy.attention, inputs_in_int8=int8)

    def for_decode(self) -> "Arithmetic":
        """The arithmetic of decode attention: float32 throughout where the policy casts it up."""
        if not self.decode_in_float32:
            return self
        single = FORMATS["float32"].dtype
        return replace(self, activations=single, scores=single, softmax=single, probs=single)


def _dtype(name: str) -> np.dtype[Any]:
    return FORMATS[name].dtype if name in FORMATS else np.dtype(name)


def check_device(policy: Policy, platform: str) -> None:
    """Raise UserError for a key that the device would silently not honour.

    XLA:CPU accepts BF16_BF16_F32 and its kin and computes in full float32, and rejects the rest.
    """
    if platform == "cpu" and policy.matmul not in (*PRECISIONS, "F32_F32_F32"):
        raise UserError(
            f"policy {policy.name}: matmul = {policy.matmul} is not honoured on cpu, which computes float32 products "
            "in full; use default, high or highest here"
        )
    check_kernel(policy, platform)
    if platform == "tpu" and policy.matmul in ("TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32"):
        raise UserError(f"policy {policy.name}: matmul = {policy.matmul} does not compile on tpu; use highest")


def compiler_options(policy: Policy) -> dict[str, bool]:
    """Options for ``jit(…).lower(…).compile(…)`` that a policy asks for."""
    return {"xla_allow_excess_precision": False} if policy.excess_precision == "off" else {}


def dot(x: jax.Array, w: jax.Array, axes: tuple[int, int], out: np.dtype[Any], a: Arithmetic) -> jax.Array:
    """Contract axis ``axes[0]`` of x [..., N] with ``axes[1]`` of w, result rounded once to ``out``."""
    wide = common_dtype(x.dtype, w.dtype)
    result = lax.dot_general(
        x.astype(wide),
        w.astype(wide),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=a.matmul,
        preferred_element_type=common_dtype(out, wide),
    )
    return result.astype(out)


def batched_product(equation: str, x: jax.Array, y: jax.Array, out: np.dtype[Any], a: Arithmetic) -> jax.Array:
    """Return ``einsum(equation, x, y)`` with the result rounded once to ``out``."""
    wide = common_dtype(x.dtype, y.dtype)
    return jnp.einsum(
        equation,
        x.astype(wide),
        y.astype(wide),
        precision=a.matmul,
        preferred_element_type=common_dtype(out, wide),
    ).astype(out)
