"""The chips, which are not here, that a program's entry points lie on, before anything is run (JAX)."""

from collections.abc import Sequence

import jax

from precaudit.errors import UserError
from precaudit.interpreters.tpu.sharded import axes_text, mesh_of_host
from precaudit.interpreters.tpu.target import Target, mesh
from precaudit.recording.programs.planning import Planned
from precaudit.recording.tracing.predicting import EmulatedTarget


def chips_note(planned: Sequence[Planned], target: Target | None) -> tuple[str, ...]:
    """Return a note of the meshes of chips that entry points are compiled for; nothing where each has one chip.

    Raises UserError where the target does not have so many, and for what ``mesh_of_host`` refuses.
    """
    if target is None or jax.device_count() == 1:
        return ()
    found: dict[str, None] = {}
    for one in (x for x in planned if x.made is not None):
        assert one.made is not None
        there = mesh_of_host(one.made.jaxpr, (one.program.params, next(iter(one.program.cases.values()))))
        if there is None:
            continue
        axes = axes_text(there.shape)
        if isinstance(target, EmulatedTarget):
            raise UserError(f"the program lies on {axes}, and tpu-emulated has one chip; use --device tpu-predicted")
        mesh(target, there.shape)
        found[axes] = None
    return tuple(f"compiled for as many chips of {target.name} as its mesh has devices: {axes}" for axes in found)
