"""A prefill beside the same on four devices, as one line of JSON; test_entry_views.py runs this."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import precaudit

MESH = Mesh(np.array(jax.devices()), ("model",))
TOKENS = jnp.asarray([[3, 5, 7, 1]], jnp.int32)


def whole(params, tokens):
    x = params["embed"][tokens]
    return (x + jax.nn.silu(x @ params["up"]) @ params["down"]) @ params["embed"].T


def program(factor):
    """Return a program with two views of four tokens; ``factor``: of what the second multiplies by at last."""

    def sharded(params, tokens):
        cut = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}
        held = {n: jax.lax.with_sharding_constraint(params[n], NamedSharding(MESH, spec)) for n, spec in cut.items()}
        return whole({**params, **held, "down": held["down"] * jnp.bfloat16(factor)}, tokens)

    draw = np.random.default_rng(0)
    sizes = {"embed": (32, 64), "up": (64, 128), "down": (128, 64)}
    params = {n: jnp.asarray(draw.standard_normal(s) / s[0] ** 0.5 * 2, jnp.bfloat16) for n, s in sizes.items()}
    view = precaudit.Entry(sharded, lambda *_: (TOKENS,), outputs="logits", tokens=0)
    return precaudit.Program(
        whole, params, {"a": (TOKENS,)}, outputs="logits", tokens=0, entry="prefill", then={"sharded": view}
    )


if __name__ == "__main__":
    told = {}
    for name, factor in (("honest", 1.0), ("wrong", 1.02)):
        made, folder = program(factor), Path(sys.argv[1]) / name
        found = precaudit.compare(precaudit.trace(made, folder), made).prefill_decode
        failed = sorted({v.kind for v in precaudit.gate(folder).verdicts if v.status == "fail"})
        told[name] = {"failed": failed, "views": [(p.against, p.view, p.position, p.f64_apart) for p in found]}
    print(json.dumps(told))
