"""A program that lies on devices of this host, given to as many chips of a TPU: lowered here, compiled for them.

What is lowered names the mesh by its axes alone, and no device. So every form of sharding goes along: of arguments,
constraints, inner jits, types with shardings, ``shard_map``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.jax_versions import walk_equations
from precaudit.interpreters.tpu.kernels import TARGET as KERNEL
from precaudit.interpreters.tpu.target import CompiledProgram, Target, compile_for, mesh

NOWHERE = Mesh(np.empty((), object), ())


def on_no_mesh() -> AbstractContextManager[Any]:
    """Leave the mesh that is set, if any: what is computed inside lies on one device."""
    return nullcontext() if jax.sharding.get_mesh().empty else jax.set_mesh(NOWHERE)


def mesh_of_host(jaxpr: jex.ClosedJaxpr, arguments: object) -> Mesh | None:
    """Return the mesh of several devices that a program and its arguments name; None where they name none.

    Raises UserError for several that differ, and for what no mesh says the place of.
    """
    leaves = [*jax.tree.leaves(arguments), *jaxpr.consts]
    named = [jax.sharding.get_mesh(), *(x.sharding for x in leaves if isinstance(x, jax.Array | jax.ShapeDtypeStruct))]
    named += (value for e in walk_equations(jaxpr.jaxpr) for value in e.params.values())
    found = [x for value in named for x in _meshes(value) if x.size > 1]
    several = dict.fromkeys((tuple(x.shape.items()), _devices(x)) for x in found if isinstance(x, Mesh))
    axes = dict.fromkeys(tuple(x.shape.items()) for x in found)
    if len(axes) > 1 or len(several) > 1:
        texts = dict.fromkeys(axes_text(dict(x)) for x in axes)
        what = " and ".join(texts) if len(texts) > 1 else f"{next(iter(texts))} of other devices each"
        raise UserError(f"the program names several meshes, {what}: a prediction takes one")
    if found and not several:
        raise UserError(
            f"the program names a mesh, {axes_text(found[0].shape)}, and no devices: jax.set_mesh says which"
        )
    return next((x for x in found if isinstance(x, Mesh)), None)


def _meshes(value: object) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes that a parameter, or a sharding, names; raises UserError for a sharding without one."""
    if isinstance(value, Mesh | AbstractMesh):
        yield value
    elif isinstance(value, NamedSharding):
        yield value.mesh
    elif isinstance(value, jax.sharding.Sharding):
        if len(value.device_set) > 1:
            raise UserError(f"{value} names no axes of a mesh: a prediction takes jax.sharding.NamedSharding")
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _meshes(x)


def _devices(of: Mesh) -> tuple[int, ...]:
    return tuple(d.id for d in of.devices.flat)


def axes_text(axes: Mapping[str, int]) -> str:
    """Return a mesh's axes as ``--mesh`` has them: ``data=2,model=4``."""
    return ",".join(f"{name}={n}" for name, n in axes.items())


def compile_for_chips(
    target: Target, function: Callable[..., Any], arguments: tuple[Any, ...], there: Mesh
) -> CompiledProgram:
    """Compile ``function(*arguments)`` for as many chips of a target as a mesh ``there`` of this host has devices.

    Arguments are descriptions, with shardings where they have any. Raises UserError as ``compile_for`` does, and where
    the program cannot be lowered for a TPU.
    """
    chips = mesh(target, there.shape, there.axis_types)
    known = [export.DisabledSafetyCheck.custom_call(name) for name in (KERNEL,)]
    jitted = jax.jit(function, keep_unused=True)
    jaxpr = jitted.trace(*arguments).jaxpr
    lowered = export.export(jitted, platforms=("tpu",), disabled_checks=known)(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=how)
        for x, how in zip(leaves, lowered.in_shardings_jax(chips), strict=True)
    ]
    with jax.set_mesh(chips):
        made = compile_for(target, lowered.call, jax.tree.unflatten(tree, placed))
    return replace(made, jaxpr=jaxpr)
