"""Sums over four devices in 16 bits, by a compiled program and by its emulation: of how many values the bits differ.

Run in a process of its own with four host devices: ``python -m tests.helpers.device_sums``; prints JSON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from precaudit.interpreters.jaxpr.emulate import emulate_segments
from precaudit.interpreters.jaxpr.realisations import Realisation
from precaudit.interpreters.jaxpr.sums import sums_narrow

SUMS = {
    "psum": (lambda x: lax.psum(x, "a"), P()),
    "psum of two axes": (lambda x: lax.psum(x, ("a", "b")), P()),
    "psum_scatter, tiled": (lambda x: lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True), P(None, "a")),
    "psum_scatter": (lambda x: lax.psum_scatter(x[0], "a"), P("a")),
}


def differing(name: str, axes: dict[str, int], check: bool) -> dict[str, int]:
    """Return how many values of float16 differ from the device's, with every term's sum rounded and with none."""
    call, out = SUMS[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    summed = jax.shard_map(call, mesh=mesh, in_specs=P(tuple(axes)), out_specs=out, check_vma=check)

    def f(x):
        return checkpoint_name(summed(x), "sum")

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4, 64)) + 1, jnp.float16)
    assert sums_narrow(jax.make_jaxpr(f)(x).jaxpr)
    device = np.asarray(jax.jit(f)(x), np.float64)
    with jax.enable_x64(True):
        ways = {sums: emulate_segments(f, Realisation(sums=sums)) for sums in ("own", "exact")}
        made = {sums: np.asarray(way({"sum": np.zeros(device.shape)}, x)["sum"][0]) for sums, way in ways.items()}
    return {sums: int((values != device).sum()) for sums, values in made.items()} | {"of": device.size}


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    meshes = {"psum of two axes": {"a": 2, "b": 2}}
    told = {f"{n}, vma {c}": differing(n, meshes.get(n, {"a": 4}), c) for n in SUMS for c in (True, False)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
