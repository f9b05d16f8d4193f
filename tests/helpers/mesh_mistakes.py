"""A small program on four devices, with one mistake of a mesh after another, as ``same`` names them; prints JSON."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import precaudit

ROWS, WIDTH, INNER = 6, 16, 32


def summed(x):
    return lax.psum(x, "m")


def norm(x, of=lambda x: x):
    return x * lax.rsqrt(jnp.mean(of(x) ** 2, -1, keepdims=True) + 1e-6)


def step(x, w, out=summed, of=lambda x: x, bias=lambda y: y):
    """Return a layer of a network whose inner width is cut over devices."""
    return x + bias(out(jax.nn.gelu(norm(x, of) @ w["up"]) @ w["down"]))


def own_columns(x):
    n = WIDTH // lax.axis_size("m")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("m") * n, n, axis=-1)


def rest(y):
    return jnp.where(lax.axis_index("m") == 2, 0.0, y)


def biased(y):
    return y + jnp.arange(WIDTH) / WIDTH


def whole(params, x, **how):
    for w in params:
        x = step(x, w, **how)
    return x


ALONE = {"out": lambda y: y}
# What is done, and what is meant.
MISTAKES = {
    "nothing": ({}, ALONE),
    "no sum": ({"out": lambda y: y}, ALONE),
    "half of it": ({"out": lambda y: summed(y) / 4}, ALONE),
    "a shard omitted": ({"out": lambda y: summed(rest(y))}, ALONE),
    "twice": ({"out": lambda y: summed(y) + y}, ALONE),
    "statistics": ({"of": own_columns}, ALONE),
    "bias": ({"out": lambda y: summed(biased(y))}, {**ALONE, "bias": biased}),
    "another rank": ({"out": lambda y: summed(y), "turned": True}, ALONE),
}


def main():
    rng = np.random.default_rng(7)
    shapes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    params = [{n: rng.standard_normal(s).astype(np.float32) / s[0] ** 0.5 for n, s in shapes.items()} for _ in range(2)]
    x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("m",), axis_types=(AxisType.Auto,))
    specs = ([{"up": P(None, "m"), "down": P("m")} for _ in params], P())
    found = {}
    for name, (how, meant) in MISTAKES.items():
        turned = "turned" in how
        given = {k: v for k, v in how.items() if k != "turned"}

        def mapped(params, x, given=given, turned=turned):
            if turned:  # the shards of a weight come from another rank
                params = [{**w, "up": lax.ppermute(w["up"], "m", [(i, (i + 1) % 4) for i in range(4)])} for w in params]
            return whole(params, x, **given)

        call = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        both = [precaudit.Program(f, params, {"a": (x,)}, outputs="out") for f in (partial(whole, **meant), call)]
        (case,) = precaudit.same(*both).cases
        found[name] = {"answer": case.answer, "causes": [[m.name, m.program] for m in case.causes]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
