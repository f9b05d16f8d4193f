"""What tapping did to a program's outputs, and how its compiler makes each product (JAX)."""

from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np

from precaudit.interpreters.gpu import units as gpu
from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.interpreters.mesh.sums import split_sums
from precaudit.interpreters.tpu import units as tpu
from precaudit.interpreters.tpu.hlo import Module
from precaudit.numbers.arrays import Array
from precaudit.recording.programs.preparing import partitioned_sums
from precaudit.recording.runs.programs import Disturbance
from precaudit.recording.tracing.predicting import PredictedProgram, compare_predictions, compiler_output
from precaudit.schema.records.base import json_number
from precaudit.schema.records.devices import SplitSum, Way
from precaudit.schema.records.runs import Prediction


def note_disturbance(
    case: str, captured: Callable[..., Any], bare: Callable[..., Any] | None, given: tuple[Any, ...], out: jax.Array
) -> Disturbance:
    """Return what tapping did to a case's outputs, and how each product of the program with taps is made.

    ``bare``: the program without taps (None: it is not run, and nothing is said of it).
    """
    text = compiler_output(captured, given, jax.default_backend())
    if bare is None:
        noted = _disturbance(case, out, out, None)
    else:
        noted = _disturbance(case, out, bare(*given), compare_predictions(captured, given, bare, given))
    made = {} if text is None else _ways_by_label(text, captured)
    return msgspec.structs.replace(noted, made=made, split=_sums_in_parts(captured, given, text, out))


def _sums_in_parts(
    captured: Callable[..., Any], given: tuple[Any, ...], text: Module | None, out: jax.Array
) -> dict[str, SplitSum]:
    """Return how products in parts of several devices, or chips, are made; nothing of those of one."""
    if isinstance(captured, PredictedProgram):
        return {} if text is None else split_sums(text)
    return partitioned_sums(captured, given) if _is_on_several(out) else {}


def _is_on_several(out: object) -> bool:
    """Whether outputs lie on several devices."""
    return any(len(x.sharding.device_set) > 1 for x in jax.tree.leaves(out) if isinstance(x, jax.Array))


def _ways_by_label(text: Module, captured: Callable[..., Any]) -> dict[str, tuple[Way, ...]]:
    """Return how each product of a compiled program is made, by its label: a TPU's, predicted ones too, or a GPU's."""
    on_gpu = jax.default_backend() == "gpu" and not isinstance(captured, PredictedProgram)
    return gpu.ways_by_label(text) if on_gpu else tpu.ways_by_label(text)


def _disturbance(case: str, captured: jax.Array, bare: jax.Array, expected: Prediction | None) -> Disturbance:
    """Compare a case's outputs with those of the program without taps."""
    off = outputs_apart(captured, bare)
    return Disturbance(case=case, bitwise=off is None, max_diff=json_number(off or 0.0), predicted=expected)


def outputs_apart(ours: jax.Array, theirs: jax.Array) -> float | None:
    """Return the largest difference of two sets of outputs; None where all bits are the same."""
    pairs = [(on_host(a), on_host(b)) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)]
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return None
    return float(np.max([largest_difference(a, b) for a, b in pairs]))


def largest_difference(a: Array, b: Array) -> float:
    """Return max |a − b|, NaN where one alone is NaN: what is infinite or NaN in both is alike."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.max(off, initial=0.0))
