"""The kernels that ship at full size against FP64 (NumPy), and what a CPU's and a TPU's compiler make of them.

make kernels        # some minutes on two cores; interpret mode: no time of it says anything of a TPU

Exit code 1 where a gate is broken; over hidden states, where the kernel is worse than the plain formula.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from precaudit.checks.kernels import grpo, grpo_linear
from precaudit.checks.kernels.grpo_linear import WIDTH, tile_product
from precaudit.interpreters.tpu.target import compile_for, libtpu_version, parse_target

T, V, SEEDS = 8, 151_643, 10
BLOCK = (8, 2048)
SPREADS, TEMPERATURES = (1, 4, 16), (1.0, 0.7)
LOSS, ULPS, GRADIENT, ONCE, WORSE = 2.4e-7, 4.0, 1e-6, 1e-4, 1.5
LINEAR = (32, 32_768, 256)  # tokens, vocabulary, width
FULL = (32, V, 256)
MEMORY = [(v, t) for v in (32_768, 151_936) for t in (256, 1024, 16_384)]
CORNERS = (MEMORY[0], MEMORY[-1])
TINY = float(np.finfo(np.float32).smallest_normal)


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


def tied(seed, dtype, spread, temperature):
    """Return inputs whose even rows hold halves: most values are there many times. ``old`` and ``ref`` stay near."""
    logits, tokens, old, ref, *rest = grpo.inputs(seed, dtype, (T, V), spread, temperature)
    before = exactly(logits, tokens, old, ref, *rest, temperature)[1]
    logits = logits.at[::2].set((jnp.round(logits[::2].astype(jnp.float32) * 2) / 2).astype(dtype))
    moved = (exactly(logits, tokens, old, ref, *rest, temperature)[1] - before).astype(np.float32)
    return logits, tokens, old + moved, ref + moved, *rest


def off(found, exact):
    """Return the largest error over the largest value."""
    return float(np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max())


def off_logp(found, exact):
    """Return the largest error in ulps of the largest."""
    return float(np.abs(np.asarray(found, np.float64) - exact).max() / np.spacing(np.float32(np.abs(exact).max())))


def logits_sides(temperature):
    """Return kernel and plain formula: logits, … → (loss, log p), dlogits."""

    def kernel(x, tokens, *rest):
        logp = jax.lax.stop_gradient(grpo.token_log_probabilities(x, tokens, temperature, BLOCK)[0])
        return grpo.kernel(x, tokens, *rest, temperature=temperature, block=BLOCK), logp

    def plain(x, tokens, *rest):
        logp = jax.nn.log_softmax(x.astype(jnp.float32) / temperature, axis=-1)
        logp = jnp.take_along_axis(logp, tokens[:, None], -1)[:, 0]
        return grpo.reference(x, tokens, *rest, temperature=temperature), jax.lax.stop_gradient(logp)

    return [jax.jit(jax.value_and_grad(f, has_aux=True)) for f in (kernel, plain)]


def over_logits():
    """Print a row for every deviation and temperature; return whether every gate holds."""
    print(f"GRPO over logits, {T} tokens, V {V:,}, {SEEDS} seeds, every other row tied; worst, kernel : plain float32")
    held = True
    for temperature in TEMPERATURES:
        sides = logits_sides(temperature)
        for spread in SPREADS:
            worst, twice = np.zeros((2, 3)), np.zeros((2, SEEDS))
            for seed in range(SEEDS):
                for dtype in ("float32", "bfloat16"):
                    given = tied(seed, dtype, spread, temperature)
                    loss, logp, d64 = exactly(*given, temperature)
                    for i, side in enumerate(sides):
                        (ours, p), d = side(*given)
                        if dtype == "float32":
                            worst[i] = np.maximum(worst[i], [abs(float(ours) - loss), off_logp(p, logp), off(d, d64)])
                        else:
                            twice[i, seed] = rounded_otherwise(d, d64)
            share = twice.mean(1)
            good = bool(np.all(worst[0] <= [LOSS, ULPS, GRADIENT]) and share[0] <= ONCE)
            good &= bool(np.all(worst[0] <= WORSE * worst[1]))
            held &= good
            pairs = [f"{a:.1e} : {b:.1e}" for a, b in zip(worst[0], worst[1], strict=True)]
            print(
                f"  σ {spread:<2} temperature {temperature}  |Δloss| {pairs[0]}  |Δ log p| {worst[0, 1]:.2f} : "
                f"{worst[1, 1]:.2f} ulp  dlogits {pairs[2]}  bf16 not once {share[0]:.1e} : {share[1]:.1e}"
                f"  {'held' if good else 'BROKEN'}",
                flush=True,
            )
    return held


def rounded_otherwise(found, exact):
    """Return the share of elements that are not FP64 rounded once; what is subnormal may be zero."""
    once = exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    d = np.asarray(found).astype(np.float64)
    return float(np.mean((d != once) & ~((np.abs(d) <= TINY) & (np.abs(once) <= TINY))))


def linear_sides(temperature):
    """Return kernel and plain formula: hidden, head, … → (loss, log p), (dhidden, dhead)."""
    block = (LINEAR[0], 2048)

    def kernel(h, w, tokens, *rest):
        logp = jax.lax.stop_gradient(grpo_linear.token_log_probabilities(h, w, tokens, temperature, block)[0])
        return grpo_linear.kernel(h, w, tokens, *rest, temperature=temperature, block=block), logp

    def plain(h, w, tokens, *rest):
        logp = jnp.take_along_axis(jax.nn.log_softmax(h @ w.T / temperature), tokens[:, None], -1)[:, 0]
        return grpo_linear.reference(h, w, tokens, *rest, temperature=temperature), jax.lax.stop_gradient(logp)

    return [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)) for f in (kernel, plain)]


def over_hidden(size, seeds):
    """Print a row for every deviation; return whether every gate holds that float32 logits can hold."""
    t, v, d = size
    print(f"GRPO over hidden states, {t} tokens, V {v:,}, width {d}, {seeds} seeds; worst, kernel : plain float32")
    both = [linear_sides(s) for s in TEMPERATURES]
    held = True
    for spread in SPREADS:
        worst, alone = np.zeros((2, 3)), np.zeros(2)
        for seed in range(seeds):
            temperature = TEMPERATURES[seed % 2]
            h, w, *rest = grpo_linear.inputs(seed, size=size, spread=spread, temperature=temperature)
            h64, w64 = np.asarray(h, np.float64), np.asarray(w, np.float64)
            _, logp, d64 = exactly(h64 @ w64.T, *rest, temperature)
            exact = (d64 @ w64, d64.T @ h64)
            for i, side in enumerate(both[seed % 2]):
                (_, p), found = side(h, w, *rest)
                each = [off_logp(p, logp), *(off(a, b) for a, b in zip(found, exact, strict=True))]
                worst[i] = np.maximum(worst[i], each)
            _, p, d = exactly(np.asarray(jax.jit(lambda h, w: h @ w.T)(h, w)), *rest, temperature)
            alone = np.maximum(alone, [off_logp(p, logp), off(d.T @ h64, exact[1])])
        good, near = bool(np.all(worst[0] <= WORSE * worst[1])), bool(np.all(worst[0] <= [ULPS, GRADIENT, GRADIENT]))
        held &= good
        said = "held" if good and near else "no worse than plain" if good else "BROKEN"
        print(
            f"  σ {spread:<2}  |Δ log p| {worst[0, 0]:.2f} : {worst[1, 0]:.2f} ulp  dhidden {worst[0, 1]:.1e} : "
            f"{worst[1, 1]:.1e}  dhead {worst[0, 2]:.1e} : {worst[1, 2]:.1e}  FP64 of float32 logits "
            f"{alone[0]:.2f} ulp, {alone[1]:.1e}  {said}",
            flush=True,
        )
    return held


def products():
    """Print how far a tile's product is off, made in one call, in parts as the kernel does, and as a part of all."""
    _, v, d = FULL
    h, w, *_ = grpo_linear.inputs(0, size=(64, v, d), spread=2.0)
    tile = w[:2048]
    exact = np.asarray(h, np.float64) @ np.asarray(tile, np.float64).T
    made = {
        "in one call": jax.jit(lambda h, w: h @ w.T)(h, tile),
        f"{WIDTH} terms at a time, in pairs": jax.jit(lambda h, w: tile_product(h, w, (1, 1)))(h, tile),
        f"as a part of all {v:,} columns": jax.jit(lambda h, w: h @ w.T)(h, w)[:, :2048],
    }
    print(f"A tile's logits, 64 × {d} · {d} × 2048, on this CPU: root mean square of the error")
    for name, x in made.items():
        print(f"  {name}: {np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)):.1e}", flush=True)


def shapes(t, v, d=256):
    """Return the arguments of the kernel over hidden states."""
    each = [jax.ShapeDtypeStruct((t,), jnp.float32)] * 4
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((t, d), (v, d))]
    return (*given, jax.ShapeDtypeStruct((t,), jnp.int32), *each)


def memory():
    """Print the temporaries of loss and both gradients over hidden states."""
    print("Temporaries of loss, dhidden and dhead, width 256, float32 (beside them: logits in float32)")
    run = jax.value_and_grad(lambda *x: grpo_linear.kernel(*x, temperature=0.7), (0, 1))
    plain = jax.value_and_grad(lambda *x: grpo_linear.reference(*x, temperature=0.7), (0, 1))
    for v, t in MEMORY:
        made = [jax.jit(f).lower(*shapes(t, v)).compile().memory_analysis() for f in (run, plain)]
        ours, theirs = (m.temp_size_in_bytes / 2**20 for m in made)
        told = f"kernel {ours:.1f} MiB, plain {theirs:,.0f} MiB"
        print(f"  CPU  V {v:,} {t:,} tokens: {told} ({4 * t * v / 2**20:,.0f} MiB)", flush=True)
    if libtpu_version() is None:
        print("not run: temporaries on a TPU (pip install 'precaudit[tpu]')")
        return
    for target in ("v5e", "v6e"):
        for v, t in CORNERS:
            made = compile_for(parse_target(target), run, shapes(t, v))
            print(f"  {target}  V {v:,} {t:,} tokens: kernel {made.temporaries / 2**20:.2f} MiB", flush=True)


def logits_memory():
    """Print the temporaries of loss and dlogits over logits on a TPU."""
    for target in ("v5e", "v6e"):
        for dtype in (jnp.float32, jnp.bfloat16):
            rows = 1024
            per_token = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * 4
            given = (jax.ShapeDtypeStruct((rows, V), dtype), jax.ShapeDtypeStruct((rows,), jnp.int32), *per_token)
            size = rows * V * np.dtype(dtype).itemsize
            for name, side in (("kernel", grpo.kernel), ("plain", grpo.reference)):
                made = compile_for(parse_target(target), jax.value_and_grad(side), given)
                told = f"{made.temporaries / size:.2f} × the logits"
                print(f"  {target} {np.dtype(dtype).name:8} {rows} tokens, {name:6}: temporaries {told}", flush=True)


def main():
    """Print what both kernels are off by and take; return 1 where a gate is broken."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    held = over_logits()
    products()
    held &= over_hidden(LINEAR, SEEDS)
    held &= over_hidden(FULL, 2)
    memory()
    if libtpu_version() is not None:
        logits_memory()
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
