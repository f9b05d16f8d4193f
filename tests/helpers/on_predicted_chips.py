"""Programs that lie on four devices, recorded as on chips that are not here: a line of JSON for each that is named."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from precaudit import Program, compare, gate, trace
from precaudit.errors import UserError

FOUR = np.array(jax.devices()[:4])
MESH, TWO = Mesh(FOUR, ("model",)), Mesh(FOUR.reshape(2, 2), ("data", "model"))
EIGHT = Mesh(np.array(jax.devices()), ("model",))
TYPED = Mesh(FOUR, ("model",), axis_types=(AxisType.Explicit,))
RNG = np.random.default_rng(0)
UP, DOWN, X = (jnp.asarray(RNG.standard_normal(s) / 4, jnp.bfloat16) for s in ((32, 64), (64, 32), (8, 32)))
SPECS = (P(None, "model"), P("model"))


def placed(mesh):
    """Return both weights, cut by their hidden channels."""
    return tuple(jax.device_put(w, NamedSharding(mesh, s)) for w, s in zip((UP, DOWN), SPECS, strict=True))


def mlp(params, x, there=lambda y: y, summed=lambda y: y):
    hidden = there(jax.nn.silu(x @ params[0]))
    return x + summed(hidden @ params[1])


def constrained(mesh):
    return lambda y: lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "model")))


def mapped(params, x, summed):
    """Return the MLP with each device's part written out."""
    body = partial(mlp, summed=summed)
    return jax.shard_map(body, mesh=MESH, in_specs=(SPECS, P()), out_specs=P(), check_vma=False)(params, x)


def typed(params, x):
    """Return the MLP with shardings in types."""
    return x + jnp.matmul(jax.nn.silu(x @ params[0]), params[1], out_sharding=NamedSharding(TYPED, P()))


def grown(_inputs, out):
    return (out,)


def formula(params, x):
    """Return the MLP in FP64, of whole weights."""
    up, down, x = (np.asarray(a, np.float64) for a in (*params, x))
    hidden = x @ up
    return {"outputs.out": x + hidden / (1 + np.exp(-hidden)) @ down}


def program(call, params=(UP, DOWN), **how):
    return Program(call, params, {"a": (X,)}, outputs="out", **how)


def programs():
    inner = jax.jit(mlp, in_shardings=(tuple(NamedSharding(MESH, s) for s in SPECS), NamedSharding(MESH, P())))
    with jax.set_mesh(TYPED):
        on_types = program(typed, placed(TYPED))
    return {
        "constraints": program(partial(mlp, there=constrained(MESH)), placed(MESH)),
        "arguments": program(mlp, placed(MESH), steps=1, advance=grown),
        "inner jit": program(inner),
        "types": on_types,
        "psum": program(partial(mapped, summed=partial(lax.psum, axis_name="model"))),
        "no psum": program(partial(mapped, summed=lambda y: y)),
        "eight": program(mlp, placed(EIGHT)),
        "two meshes": program(partial(mlp, there=constrained(TWO)), placed(MESH)),
    }


def audited(one, folder, reference):
    """Return what is recorded of a program and judged, or in which line it is refused."""
    try:
        run = trace(one, folder, device="tpu-predicted:v5e:2x2")
    except UserError as error:
        return {"refused": str(error), "folder": folder.exists()}
    compare(run, one, **({"reference": formula} if reference else {}))
    judged = gate(folder)
    (noted,) = run.record.neutrality
    return {
        "split": {label: [x.parts, x.summed] for label, x in noted.split.items()},
        "same": noted.bitwise,
        "notes": [w for w in run.record.warnings if w.startswith("compiled for")],
        "counts": dict(judged.counts),
        "failed": sorted({v.point for v in judged.verdicts if v.status == "fail"}),
    }


if __name__ == "__main__":
    where, *names = sys.argv[1:]
    known = programs()
    print(json.dumps({n: audited(known[n], Path(where) / n, n in ("psum", "no psum")) for n in names}))
