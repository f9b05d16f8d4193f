"""A program as a TPU that is not here would run it: compiled for it, the compiled text run on a CPU as it rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from precaudit.errors import UserError
from precaudit.tpu.execute import function
from precaudit.tpu.hlo import parse
from precaudit.tpu.target import EXTRA, TESTED, Target, compile_for, libtpu_version, parse_target

PREFIX = "tpu-predicted"
DEFAULT = "v5e"
RECORDED_ON_TPUS = 0  # files of numbers from real TPUs that predictions were compared with


@dataclass
class Predicted:
    """A program, called as ``jax.jit``'s; compiled for the target once for every shape of its arguments."""

    target: Target
    program: Callable[..., Any]
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    _made: dict[Any, tuple[Callable[..., Any], Any]] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """Run it; raises UserError where the target's compiler refuses it, or what it made cannot be followed."""
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((np.shape(x), jax.numpy.result_type(x)) for x in leaves)
        if (tree, shapes) not in self._made:
            shaped = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*x) for x in shapes])
            made = compile_for(self.target, self.program, shaped, self.donated, self.options)
            outputs = jax.tree.structure(jax.eval_shape(self.program, *shaped))
            self._made[tree, shapes] = function(parse(made.text)), outputs
        run, outputs = self._made[tree, shapes]
        found = run(*leaves)
        return jax.tree.unflatten(outputs, found if isinstance(found, tuple) else (found,))


def target_of(device: str) -> Target | None:
    """Return the target of ``tpu-predicted:v5e``, None for devices that are there.

    Raises UserError for a target that is none, and without libtpu.
    """
    if device.partition(":")[0] != PREFIX:
        return None
    target = parse_target(device.partition(":")[2] or DEFAULT)
    if libtpu_version() is None:
        raise UserError(
            f"--device {device} needs libtpu, which compiles for a TPU: {EXTRA}. Without it, compare a run on this "
            "device with --policy fp32: it misses which unit multiplies and what the compiler stores as bfloat16"
        )
    return target


def device_name(target: Target) -> str:
    """Return what a run made so says it was made on."""
    return f"TPU {target.name} (predicted)"


def assumptions(target: Target) -> tuple[str, ...]:
    """Return what a prediction rests on, for every report of it."""
    version = libtpu_version() or "?"
    tested = "" if version in TESTED else f", which was not tried (tried: {', '.join(TESTED)})"
    return (
        f"predicted: what libtpu {version}{tested} compiles for {target.name}, run on a CPU; bfloat16 results inside "
        f"fusions are taken as rounded; files from real TPUs it was compared with: {RECORDED_ON_TPUS}",
    )
