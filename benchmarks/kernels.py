"""The kernels that ship at full size against FP64 (NumPy), and what a TPU's compiler makes of them.

make kernels        # about a minute on two cores; interpret mode: no time of it says anything of a TPU
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.kernels import grpo
from precaudit.tpu.target import compile_for, libtpu_version, parse_target

T, V = 64, 151_643
BLOCK = (64, 2048)
CASES = ((0, 1, 1.0), (1, 1, 0.7), (2, 4, 1.0), (3, 4, 0.7), (4, 16, 1.0), (5, 16, 0.7))  # seed, σ, temperature


def exactly(logits, tokens, old, ref, advantages, mask, temperature):
    """Return loss, log-probabilities and dlogits in FP64."""
    x = np.asarray(logits).astype(np.float64) / temperature
    x -= x.max(1, keepdims=True)
    p = np.exp(x)
    total = p.sum(1)
    rows = np.arange(len(x))
    logp = x[rows, tokens] - np.log(total)
    old, ref, a, mask = (np.asarray(v, np.float64) for v in (old, ref, advantages, mask))
    r, d = np.exp(logp - old), ref - logp
    clipped = np.clip(r, 0.8, 1.2) * a
    each = np.exp(d) - d - 1
    loss = ((0.04 * each - np.minimum(r * a, clipped)) * mask).sum() / mask.sum()
    slope = (np.where(clipped < r * a, 0.0, -r * a) + 0.04 * (1 - np.exp(d))) * mask / mask.sum() / temperature
    p *= -(slope / total)[:, None]
    p[rows, tokens] += slope
    return loss, logp, p


def main():
    """Print a row a case and side: how far loss, log-probabilities and dlogits are off."""
    print(f"GRPO, {T} tokens, V {V:,}: |Δloss|, |Δlog p| in ulps of the largest, |Δdlogits| over the largest")
    for seed, spread, temperature in CASES:
        given = grpo.inputs(seed, size=(T, V), spread=spread, temperature=temperature)
        loss64, logp64, d64 = exactly(*given, temperature)
        ulp, most = float(np.spacing(np.float32(np.abs(logp64).max()))), np.abs(d64).max()
        logp = {
            "kernel": lambda x, t, s=temperature: grpo.chosen(x, t, s, BLOCK),
            "plain float32": lambda x, t, s=temperature: jnp.take_along_axis(
                jax.nn.log_softmax(x / s, axis=-1), t[:, None], -1
            )[:, 0],
        }
        sides = {
            "kernel": lambda *x, s=temperature: grpo.kernel(*x, temperature=s, block=BLOCK),
            "plain float32": lambda *x, s=temperature: grpo.reference(*x, temperature=s),
        }
        for name, side in sides.items():
            began = time.perf_counter()
            loss, d = jax.jit(jax.value_and_grad(side))(*given)
            found = np.asarray(jax.jit(logp[name])(given[0], given[1]), np.float64)
            off = np.abs(np.asarray(d, np.float64) - d64).max() / most
            print(
                f"  σ {spread:<2} temperature {temperature}  {name:13}  {abs(float(loss) - loss64):.1e}  "
                f"{np.abs(found - logp64).max() / ulp:.2f}  {off:.1e}  ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
    narrow = grpo.inputs(4, "bfloat16", (T, V), 1.0)
    d64 = exactly(*narrow, 1.0)[2]
    d = np.asarray(jax.jit(jax.grad(lambda *x: grpo.kernel(*x, block=BLOCK)))(*narrow)).astype(np.float64)
    once = d64.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    print(f"  bfloat16 dlogits that are not FP64 rounded once: {np.mean(d != once):.1e} of them")
    if libtpu_version() is None:
        print("not run: temporaries on a TPU (pip install 'precaudit[tpu]')")
        return
    for target in ("v5e", "v6e"):
        for dtype in (jnp.float32, jnp.bfloat16):
            rows = 1024
            per_token = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * 4
            shapes = (jax.ShapeDtypeStruct((rows, V), dtype), jax.ShapeDtypeStruct((rows,), jnp.int32), *per_token)
            size = rows * V * np.dtype(dtype).itemsize
            for name, side in (("kernel", grpo.kernel), ("plain", grpo.reference)):
                made = compile_for(parse_target(target), jax.value_and_grad(side), shapes)
                told = f"{made.temporaries / size:.2f} × the logits"
                print(f"  {target} {np.dtype(dtype).name:8} {rows} tokens, {name:6}: temporaries {told}", flush=True)


if __name__ == "__main__":
    main()
