"""Programs whose types carry shardings (meshes with explicit axes), as one device makes them: values are the same.

FP64 and emulations bring values of their own, whose types would not fit. So shardings are stripped from every equation,
what only moves values between devices is dropped, and shard_map stays on its mesh, its axes automatic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from precaudit.errors import CannotJudge
from precaudit.interpreters.jaxpr.jax_versions import bind, body_of_call, open_jaxpr, walk, walk_equations, with_bodies
from precaudit.interpreters.jaxpr.keys import on_host, wrap_key
from precaudit.interpreters.jaxpr.loops import LOOPS, shard_map
from precaudit.interpreters.jaxpr.primitives import CALLS
from precaudit.interpreters.jaxpr.tag import Tagged

MOVES = {"device_put", "mesh_cast", "reshard", "sharding_constraint"}  # of values between devices
NOWHERE = Mesh(np.empty((), object), ())


def is_explicit(jaxpr: jex.Jaxpr) -> bool:
    """Whether any value of an open jaxpr has a type with a sharding."""
    return any(map(_has_sharding, jaxpr.invars)) or any(
        _has_sharding(v) for e in walk_equations(jaxpr) for v in e.outvars
    )


def _has_sharding(variable: jex.Var | jex.Literal) -> bool:
    sharding = getattr(variable.aval, "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def to_host(tree: object) -> Any:
    """Return a tree of arrays without a place on any device."""
    return jax.tree.map(lambda x: wrap_key(on_host(x), x), tree)


@contextmanager
def without_mesh() -> Iterator[None]:
    """Leave the mesh that is set, where its axes are explicit: what is made inside has types without shardings."""
    if AxisType.Explicit not in jax.sharding.get_mesh().axis_types:
        yield
        return
    with jax.set_mesh(NOWHERE):
        yield


def without_shardings(made: Tagged, *args: Any) -> Tagged:
    """Return a program whose types carry no shardings; one that has none is left as it is.

    ``args``: as its call takes them, on ``to_host`` ones of which the returned program runs, under ``without_mesh``.
    What lies in shard_map runs on its mesh. Raises CannotJudge where the devices of that are not known.
    """
    if not is_explicit(made.jaxpr.jaxpr):
        return made
    with jax.enable_x64(False):
        tapped, shape = jax.make_jaxpr(made.call, return_shape=True)(*args)
    meshes = [jax.sharding.get_mesh(), *_meshes((args, tapped.consts))]
    runs = [Unsharded(x.jaxpr, to_host(x.consts), meshes) for x in (tapped, made.jaxpr)]
    structure = jax.tree.structure(shape)

    def call(*given: Any) -> Any:
        return jax.tree.unflatten(structure, runs[0](*jax.tree.leaves(given)))

    with without_mesh(), jax.enable_x64(False):
        return replace(made, call=call, jaxpr=jax.make_jaxpr(runs[1])(*jax.tree.leaves(to_host(args))))


def _meshes(tree: object) -> list[Mesh]:
    """Return the meshes that arrays lie on."""
    found = (getattr(getattr(x, "sharding", None), "mesh", None) for x in jax.tree.leaves(tree))
    return [mesh for mesh in found if isinstance(mesh, Mesh)]


class Unsharded:
    """Evaluates a jaxpr without the shardings that its equations name; ``meshes``: where its axes may lie."""

    def __init__(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], meshes: Sequence[Mesh]) -> None:
        self.jaxpr, self.consts, self.meshes = jaxpr, consts, meshes

    def __call__(self, *leaves: Any) -> list[Any]:
        """Return the outputs."""
        return self.run(self.jaxpr, self.consts, leaves)

    def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate an open jaxpr."""
        return walk(jaxpr, consts, args, self.equation)

    def equation(self, e: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Evaluate an equation."""
        name, params = e.primitive.name, e.params
        if name in MOVES:
            return inputs
        if name in LOOPS:
            return LOOPS[name](self.run, jnp.asarray, params, inputs)
        if name == "shard_map":
            there = {**params, "mesh": self.mesh(params["mesh"])}
            return shard_map(self.run, jnp.asarray, there, inputs, params["check_vma"])
        if name == "remat2":
            jaxpr, consts = open_jaxpr(params["jaxpr"])
            how = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
            return list(jax.checkpoint(lambda *a: self.run(jaxpr, consts, a), **how)(*inputs))
        if name in CALLS:
            return self.run(*body_of_call(params, CALLS[name]), inputs)
        bare = {k: with_bodies(_bare(v), self.body) for k, v in params.items()}
        return bind(e, inputs, bare, jax.sharding.get_abstract_mesh())

    def body(self, jaxpr: jex.Jaxpr) -> Any:
        """Return an open jaxpr inside a parameter without shardings; one of references to memory as it is."""
        avals = [v.aval for v in jaxpr.invars]
        if jaxpr.constvars or not all(isinstance(getattr(a, "dtype", None), np.dtype) for a in avals):
            return jaxpr
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.make_jaxpr(lambda *a: self.run(jaxpr, (), a))(*given).jaxpr

    def mesh(self, mesh: Any) -> Mesh:
        """Return a shard_map's mesh, its devices known and none of its axes explicit."""
        known = [mesh, *self.meshes] if isinstance(mesh, Mesh) else self.meshes
        for one in known:
            if one.shape == mesh.shape:
                return Mesh(one.devices, one.axis_names, axis_types=(AxisType.Auto,) * len(one.axis_names))
        raise CannotJudge(f"shard_map over {dict(mesh.shape)}: its devices are not known; set the mesh: jax.set_mesh")


def _bare(value: object) -> Any:
    """Return a parameter without the sharding that it is, or holds."""
    if isinstance(value, Sharding):
        return None
    if isinstance(value, tuple) and any(isinstance(x, Sharding) for x in value):
        return tuple(map(_bare, value))
    return value
