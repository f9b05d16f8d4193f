"""Correct programs put together at random, each recorded, compared and judged: none may fail.

A seed draws a format and a stack of blocks as people write them: norms, products, attention, recurrences, routed
experts, roundings written out; in a loop or not, recomputed or not, its outputs or its gradient. A number of a program
is rounding or a mistake of ours, since no block has any other. Run: python -m exams.random_programs [--seeds 0:40]
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exams.cut import add_part
from exams.verdicts import judge_program
from precaudit import Program

SEEDS = 560
BATCH, TOKENS, WIDTH, HEADS, HEAD, INNER = 2, 12, 32, 4, 8, 48
Params = dict[str, Any]
Block = Callable[[Params, Any], Any]


class Drawn(NamedTuple):
    """A program and what it is made of, in words."""

    program: Program
    says: str


class Drawing:
    """Draws the blocks of one program and their parameters from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw, self.values = random.Random(seed), np.random.default_rng(seed)
        self.dtype = self.draw.choice(("bfloat16", "bfloat16", "float16", "float32"))
        self.says: list[str] = [self.dtype]
        self.params: Params = {}

    def one(self, **ways: Any) -> Any:
        """Return one of some ways, and note its name."""
        name = self.draw.choice(list(ways))
        self.says.append(name)
        return ways[name]

    def maybe(self, word: str) -> bool:
        """Draw yes or no, and note a yes."""
        found = self.draw.random() < 0.5
        self.says += [word] * found
        return found

    def weight(self, *shape: int, scale: float | None = None, dtype: str = "") -> str:
        """Make a parameter and return its name."""
        name = f"w{len(self.params)}"
        x = self.values.standard_normal(shape) * (shape[0] ** -0.5 if scale is None else scale)
        self.params[name] = jnp.asarray(x, dtype or self.dtype)
        return name

    def norm(self) -> Block:
        """Return a norm over channels."""
        scale, shift = self.weight(WIDTH, scale=0.2), self.weight(WIDTH, scale=0.2)
        wide, own = self.maybe("statistics in float32"), self.draw.choice((1e-6, 1e-5, 1e-3))
        late, plus = self.maybe("scaled after rounding"), self.maybe("1 + scale")

        def statistics(x: Any) -> Any:
            return x.astype(jnp.float32) if wide else x

        def finish(y: Any, p: Params, x: Any) -> Any:
            g = 1 + p[scale] if plus else p[scale]
            if late:
                return y.astype(x.dtype) * g
            return (y * g.astype(y.dtype)).astype(x.dtype)

        def rms(p: Params, x: Any) -> Any:
            y = statistics(x)
            return finish(y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + own), p, x)

        def rms_of_sum(p: Params, x: Any) -> Any:
            y = statistics(x)
            return finish(y / jnp.sqrt(jnp.sum(jnp.square(y), -1, keepdims=True) / WIDTH + own), p, x)

        def layer(p: Params, x: Any) -> Any:
            y = statistics(x)
            y = y - jnp.mean(y, -1, keepdims=True)
            return finish(y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + own), p, x) + p[shift]

        def standard(p: Params, x: Any) -> Any:
            y = statistics(x)
            return finish((y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + own), p, x)

        def length(p: Params, x: Any) -> Any:
            y = statistics(x)
            return finish(y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + own), p, x)

        return self.one(rms=rms, rms_of_sum=rms_of_sum, layer_norm=layer, standardised=standard, unit_length=length)

    def product(self, rows: int, columns: int) -> Block:
        """Return a product with a weight over the last axis."""
        w = self.weight(rows, columns)

        def wide(p: Params, x: Any) -> Any:
            return jnp.matmul(x, p[w], preferred_element_type=jnp.float32).astype(x.dtype)

        def widened(p: Params, x: Any) -> Any:
            return (x.astype(jnp.float32) @ p[w].astype(jnp.float32)).astype(x.dtype)

        def summed(p: Params, x: Any) -> Any:
            return jnp.sum(x[..., :, None] * p[w], -2)

        def transposed(p: Params, x: Any) -> Any:
            return jnp.einsum("dk,...d->...k", p[w], x)

        ways = {"product": lambda p, x: x @ p[w], "wide product": wide, "widened": widened, "einsum": transposed}
        return self.one(**(ways | ({"broadcast product": summed} if self.dtype == "float32" else {})))

    def activation(self) -> Callable[[Any], Any]:
        """Return a function of each element."""
        found = self.one(
            silu=jax.nn.silu, gelu=jax.nn.gelu, gelu_erf=lambda x: jax.nn.gelu(x, approximate=False), relu=jax.nn.relu,
            relu_squared=lambda x: jnp.square(jax.nn.relu(x)), tanh=jnp.tanh, softplus=jax.nn.softplus, elu=jax.nn.elu,
            sigmoid=jax.nn.sigmoid, cubed=lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3))),
            log1p=lambda x: jnp.sign(x) * jnp.log1p(jnp.abs(x)), softcap=lambda x: 3 * jnp.tanh(x / 3),
        )  # fmt: skip
        if self.maybe("in float32"):
            return lambda x: found(x.astype(jnp.float32)).astype(x.dtype)
        return found

    def mlp(self) -> Block:
        """Return two products with an activation between, gated or not."""
        up, down, f = self.product(WIDTH, INNER), self.product(INNER, WIDTH), self.activation()
        if not self.maybe("gated"):
            return lambda p, x: down(p, f(up(p, x)))
        gate_of = self.product(WIDTH, INNER)
        return lambda p, x: down(p, f(gate_of(p, x)) * up(p, x))

    def attention(self) -> Block:
        """Return attention with a causal mask."""
        groups = self.draw.choice((1, 2, HEADS))
        q, o = self.product(WIDTH, HEADS * HEAD), self.product(HEADS * HEAD, WIDTH)
        k, v = self.product(WIDTH, groups * HEAD), self.product(WIDTH, groups * HEAD)
        wide, scaled = self.maybe("scores in float32"), self.maybe("scaled queries")
        rope = self.one(no_rope=None, rope=jnp.float32, narrow_rope=self.dtype)
        mask = self.one(infinite=-jnp.inf, large=-1e4 if self.dtype == "float16" else -1e9, smallest=None)
        soft = self.one(softmax="jax", exponentials="own", late_division="late")
        cap, window = self.maybe("capped"), self.maybe("window")
        back = self.maybe("probabilities rounded")

        def turned(x: Any) -> Any:
            if rope is None:
                return x
            angle = jnp.arange(TOKENS)[:, None] * 10.0 ** -jnp.linspace(0, 2, HEAD // 2)
            cos, sin = (f(angle)[:, None].astype(rope) for f in (jnp.cos, jnp.sin))
            a, b = jnp.split(x, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

        def block(p: Params, x: Any) -> Any:
            heads = (f(p, x).reshape(*x.shape[:2], -1, HEAD) for f in (q, k, v))
            mine, keys, values = heads
            mine, keys = turned(mine), turned(keys)
            mine = mine * HEAD**-0.5 if scaled else mine
            keys, values = (jnp.repeat(y, HEADS // groups, axis=2) for y in (keys, values))
            s = jnp.einsum("bthk,bshk->bhts", mine, keys, preferred_element_type=jnp.float32 if wide else None)
            s = s if scaled else s * HEAD**-0.5
            s = 5 * jnp.tanh(s / 5) if cap else s
            far = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)
            seen = (far >= 0) & (far < (5 if window else TOKENS))
            s = jnp.where(seen, s, jnp.finfo(s.dtype).min if mask is None else mask)
            most = lax.stop_gradient(s.max(-1, keepdims=True))
            w = jax.nn.softmax(s, -1) if soft == "jax" else jnp.exp(s - most)
            total = w.sum(-1, keepdims=True)
            w = w / total if soft == "own" else w
            w = w.astype(x.dtype) if back else w
            out = jnp.einsum("bhts,bshk->bthk", w, values.astype(w.dtype))
            out = out / jnp.swapaxes(total, 1, 2).astype(out.dtype) if soft == "late" else out
            return o(p, out.reshape(*x.shape[:2], -1).astype(x.dtype))

        return block

    def recurrence(self) -> Block:
        """Return a gated sum over tokens: a loop, or an associative scan."""
        a, b, wide = self.product(WIDTH, WIDTH), self.product(WIDTH, WIDTH), self.maybe("state in float32")

        def pair(p: Params, x: Any) -> tuple[Any, Any]:
            kept, given = jax.nn.sigmoid(a(p, x)), b(p, x)
            return (kept.astype(jnp.float32), given.astype(jnp.float32)) if wide else (kept, given)

        def looped(p: Params, x: Any) -> Any:
            kept, given = pair(p, x)

            def step(h: Any, at: Any) -> tuple[Any, Any]:
                h = at[0] * h + (1 - at[0]) * at[1]
                return h, h

            first = jnp.zeros((BATCH, WIDTH), kept.dtype)
            out = lax.scan(step, first, tuple(jnp.swapaxes(y, 0, 1) for y in (kept, given)))[1]
            return jnp.swapaxes(out, 0, 1).astype(x.dtype)

        def associative(p: Params, x: Any) -> Any:
            kept, given = pair(p, x)

            def join(left: Any, right: Any) -> Any:
                return left[0] * right[0], right[0] * left[1] + right[1]

            return lax.associative_scan(join, (kept, (1 - kept) * given), axis=1)[1].astype(x.dtype)

        def convolved(p: Params, x: Any) -> Any:
            kept, given = pair(p, x)
            padded = jnp.pad(given, ((0, 0), (2, 0), (0, 0)))
            parts = [padded[:, i : i + TOKENS] * (0.5**i) for i in range(3)]
            return (kept * sum(parts)).astype(x.dtype)

        return self.one(loop=looped, associative_scan=associative, convolution=convolved)

    def experts(self) -> Block:
        """Return two of four experts a token, all computed, weighed by a softmax of router logits."""
        router, up = self.weight(WIDTH, 4, dtype="float32"), self.weight(4, WIDTH, INNER, scale=WIDTH**-0.5)
        down, f = self.weight(4, INNER, WIDTH, scale=INNER**-0.5), self.activation()

        def block(p: Params, x: Any) -> Any:
            logits = x.astype(jnp.float32) @ p[router]
            best, at = lax.top_k(logits, 2)
            share = jnp.sum(jax.nn.one_hot(at, 4) * jax.nn.softmax(best, -1)[..., None], -2)
            y = jnp.einsum("etn,enk->etk", f(jnp.einsum("btd,edn->ebtn", x, p[up])).reshape(4, -1, INNER), p[down])
            y = y.reshape(4, *x.shape)
            return jnp.einsum("ebtd,bte->btd", y, share.astype(x.dtype))

        return block

    def rounding(self) -> Block:
        """Return what only rounds or moves: formats written out, integers, a clip, a mean over tokens."""
        narrow = self.one(to_bfloat16=jnp.bfloat16, to_float16=jnp.float16, to_float8=jnp.float8_e4m3fn)

        def formats(_p: Params, x: Any) -> Any:
            return (x.astype(jnp.float32) * 0.7).astype(narrow).astype(jnp.float32).astype(x.dtype)

        def integers(_p: Params, x: Any) -> Any:
            wide = x.astype(jnp.float32)
            scale = jnp.max(jnp.abs(wide), -1, keepdims=True) / 127 + 1e-6
            held = jnp.clip(jnp.round(wide / scale), -127, 127).astype(jnp.int8)
            return (held.astype(jnp.float32) * scale).astype(x.dtype)

        def mean(_p: Params, x: Any) -> Any:
            return (
                jnp.cumsum(x.astype(jnp.float32), 1).astype(x.dtype) / jnp.arange(1, TOKENS + 1, dtype=x.dtype)[:, None]
            )

        def reduced(_p: Params, x: Any) -> Any:
            return lax.reduce_precision(x.astype(jnp.float32) * 1.3, 8, 5).astype(x.dtype)

        return self.one(formats=formats, integers=integers, running_mean=mean, reduced=reduced)

    def stack(self) -> Block:
        """Return one layer: a norm and a block on a stream, or several."""
        blocks = []
        for _ in range(self.draw.choice((1, 1, 2, 2, 3))):
            kinds = {x.__name__: x for x in (self.mlp, self.attention, self.recurrence, self.experts, self.rounding)}
            norm, block = (self.norm() if self.draw.random() < 0.7 else None), self.one(**kinds)()
            blocks.append((norm, block, self.one(residual="own", wide_residual="wide", none="none")))

        def layer(p: Params, x: Any) -> Any:
            for norm, block, how in blocks:
                y = block(p, norm(p, x) if norm else x)
                if how == "wide":
                    y = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
                x = x + y if how == "own" else y
            return x

        return layer


def drawn(seed: int) -> Drawn:
    """Return the program of a seed."""
    d = Drawing(seed)
    layer = d.stack()
    layer = jax.checkpoint(layer) if d.maybe("recomputed") else layer
    layer = jax.jit(layer) if d.maybe("jitted") else layer
    loops, last = d.one(once=0, scan=2, twice=-2), d.norm() if d.maybe("last norm") else None

    def forward(p: Params, x: Any) -> Any:
        if loops > 0:
            x = lax.scan(lambda x, _: (layer(p, x), None), x, length=loops)[0]
        for _ in range(max(-loops, int(loops == 0))):
            x = layer(p, x)
        return last(p, x) if last else x

    goal = d.one(
        cube=lambda y: jnp.mean(y.astype(jnp.float32) ** 3), entropy=lambda y: -jnp.mean(jax.nn.log_softmax(y)[..., 0]),
        error=lambda y: jnp.mean(jnp.square(y - 1).astype(jnp.float32)),
    )  # fmt: skip
    call = forward
    if d.maybe("gradient") and d.params:
        call = lambda p, x: jax.grad(lambda p: goal(forward(p, x)).astype(jnp.float32))(p)  # noqa: E731
    x = jnp.asarray(d.values.standard_normal((BATCH, TOKENS, WIDTH)), d.dtype)
    return Drawn(Program(call, d.params, {"a": (x,)}), ", ".join(d.says))


def judged(program: Program) -> Iterator[str]:
    """Yield the counts of a program's verdicts, and what is no pass."""
    found = judge_program(program)
    yield ", ".join(f"{n} {status}" for status, n in found.counts.items())
    yield from (f"{v.status} {v.place.text}: {v.text}" for v in found.verdicts if v.status != "pass")


def main() -> int:
    """Print a row a seed; 1 unless every verdict of each is a pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default=f"0:{SEEDS}", help="from:to")
    add_part(parser)
    asked = parser.parse_args()
    some = asked.part.of(range(*map(int, asked.seeds.split(":"))))
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    wrong = 0
    for seed in some:
        began, one = time.perf_counter(), drawn(seed)
        try:
            counts, *failing = judged(one.program)
        except Exception as error:
            counts, failing = "", [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        wrong += bool(failing)
        print(
            f"{'WRONG' if failing else 'right'} {seed}: {counts}, {time.perf_counter() - began:.0f} s: {one.says}",
            flush=True,
        )
        for text in failing[:3]:
            print(f"    {text}", flush=True)
    print(f"{len(some)} programs, {wrong} with another than pass")
    return int(wrong > 0 or not some)


if __name__ == "__main__":
    raise SystemExit(main())
