"""Assertions for a project's own tests: a kernel against FP64, and a compared run against its budgets."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.diagnosis.evidence.alone import Alone
from precaudit.judging.gate import gate
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Verdict
from precaudit.numbers.arrays import Array, as_format, widen
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.written import Comparison
from precaudit.references.alone import MeasuredArray, measure_alone
from precaudit.reports import assertion
from precaudit.reports.gate import gate_report
from precaudit.reports.judgement import verdict_message
from precaudit.schema.limits import default_limits
from precaudit.schema.policies import Policy, load_policy

DRAWS = 8
SEED = 20020801


def assert_close(
    candidate: Any,
    reference: Any,
    *,
    policy: str | Policy = "bf16",
    inputs: Sequence[Any] | None = None,
    perturbed: bool = False,
    name: str = "candidate",
    axes: Sequence[str] | None = None,
) -> None:
    """Raise AssertionError unless rounding explains ``candidate`` − ``reference``.

    ``candidate``: a float array of NumPy or JAX, [D], [T, D] or [T, H, K] (further leading axes are tokens too). Its
    dtype is the output's format; float32 or float64 values that the policy's narrower activations can all represent
    count as that format stored wider.
    ``reference``: an FP64 array, and only rounding it once is noise; or a callable, evaluated on
    ``inputs`` widened to FP64: then so is what float32 arithmetic does to exact inputs. ``perturbed``: the candidate
    rounds inside to the policy's activations, or its inputs were rounded: relative changes of the inputs by one unit
    roundoff of that format are noise too. The limits are those of local errors (docs/numerics.md). ``axes``:
    what the axes are called in the message, such as ``("batch", "token", "head", "channel")``. Raises TypeError for
    what cannot be compared.

    The message says how far off, over which limit, how many elements, the worst of them, which slices hold the error,
    its scale, and what reproduces it.

    >>> import numpy as np
    >>> from precaudit import assert_close
    >>> exact = np.linspace(1, 2, 64).reshape(8, 8)
    >>> assert_close(exact.astype(np.float16), exact, policy="fp32")
    """
    __tracebackhide__ = True
    declared = load_policy(policy) if isinstance(policy, str) else policy
    stored = _floats(candidate, name)
    r, spread = _evaluate_reference(reference, inputs, declared, perturbed)
    if stored.shape != r.shape:
        raise AssertionError(f"fail: {name} has shape {list(stored.shape)}, the reference {list(r.shape)}")
    if not stored.size:
        raise AssertionError(f"fail: {name} has shape {list(stored.shape)}: an empty comparison asserts nothing")
    called = _axes(axes, stored.shape)
    with np.errstate(all="ignore"):
        found = measure_alone(_output(stored, declared), r, spread, name)
        verdict = judge(found.record, default_limits())
        if verdict is None or verdict.status != "pass":
            raise AssertionError(_failure_text(verdict, found, called, inputs or ()))


def assert_within_budget(
    run: Comparison[Any] | Path | str, budgets: Path | str | None = None, baseline: Path | str | None = None
) -> None:
    """Raise AssertionError unless everything in a compared run, or a file of error records, passes the gate.

    What is missing, stale or unknown does not pass. Raises UserError for what is no run or was not compared.
    """
    __tracebackhide__ = True
    judged = gate(run, budgets, baseline)
    if judged.exit_code != 0:
        where = str(run.run.folder if isinstance(run, Comparison) else run)
        raise AssertionError("\n".join(gate_report(judged, where).lines))


def _floats(x: Any, name: str) -> Array:
    array = np.asarray(x)
    if array.dtype.name not in FORMATS:
        raise TypeError(f"{name} is {array.dtype.name}; one of {', '.join(FORMATS)} can be compared")
    return array


def _output(stored: Array, policy: Policy) -> Array:
    """Return the candidate in its output's format: its dtype, or the policy's that its values were rounded to."""
    narrow, own = FORMATS[policy.activations], FORMATS[stored.dtype.name]
    if own.name not in ("float32", "float64") or narrow.precision >= own.precision:
        return stored
    finite = stored[np.isfinite(stored)]
    with np.errstate(all="ignore"):
        fits = finite.size and np.array_equal(widen(as_format(finite, narrow.name)), widen(finite))
        return stored.astype(narrow.dtype) if fits else stored


def _evaluate_reference(
    reference: Any, inputs: Sequence[Any] | None, policy: Policy, perturbed: bool
) -> tuple[Array, list[Array]]:
    """Return the reference and what honest programs make of exact inputs beside it, rounding of the result aside."""
    if not callable(reference):
        if inputs is not None or perturbed:
            raise TypeError("inputs are for a reference that is a function; this one is an array")
        return _double(reference), []
    if inputs is None:
        raise TypeError("a reference that is a function needs inputs=")
    wide = [_widen(x) for x in inputs]
    r = _double(reference(*[x.copy() for x in wide]))
    return r, _spread(reference, wide, policy if perturbed else None)


def _double(x: Any) -> Array:
    array = np.array(x)  # a copy: a function may give the same buffer again
    if array.dtype != np.float64:
        hint = "; under JAX enable jax_enable_x64" if array.dtype == np.float32 else ""
        raise TypeError(f"the reference is {array.dtype.name}: it has to be computed and given in float64{hint}")
    return array


def _widen(x: Any) -> Array:
    """Return floats in FP64; integers and truth values, such as token ids and masks, as they are."""
    array = np.asarray(x)
    if array.dtype.kind in "biu":
        return array
    return widen(_floats(array, "an input"))


def _spread(f: Callable[..., Any], inputs: Sequence[Array], perturbed: Policy | None) -> list[Array]:
    """Return what an honest implementation makes of the inputs, as a backward error: all changed a little, DRAWS times.

    Sums of n terms in float32 make relative errors of about √n · u (Higham 2002, §4.2), which is that of inputs so
    changed; ``perturbed``: inputs may be off by one unit roundoff of the policy's activations as well.
    """
    u = FORMATS["float32"].unit_roundoff * max((n for x in inputs for n in x.shape), default=1) ** 0.5
    if perturbed is not None:
        u = max(u, FORMATS[perturbed.activations].unit_roundoff)
    random = np.random.default_rng(SEED)
    found = []
    for _ in range(DRAWS):
        changed = [
            x * (1.0 + u * random.uniform(-1.0, 1.0, x.shape)) if x.dtype.kind == "f" else x.copy() for x in inputs
        ]
        with np.errstate(all="ignore"):
            found.append(_double(f(*changed)))
    return found


def _axes(axes: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return what the axes are called: by default the last channel, before it head (of three or more) and token."""
    if axes is not None:
        if len(axes) != len(shape):
            raise TypeError(f"axes names {len(axes)} axes, the candidate has {len(shape)}")
        return tuple(axes)
    known = ("token", "head", "channel") if len(shape) > 2 else ("token", "channel")
    return (*[assertion.LEADING] * (len(shape) - len(known)), *known[-len(shape) :]) if shape else ()


def _failure_text(verdict: Verdict | None, found: MeasuredArray, axes: tuple[str, ...], inputs: Sequence[Any]) -> str:
    """Return why an assertion fails."""
    name = found.record.point
    if verdict is None:
        return f"unknown: {name} was not judged"
    if verdict.status == "nonfinite":
        return assertion.nonfinite(found.record, found.bad, axes)
    if verdict.status != "fail" or verdict.value is None:
        return verdict_message(verdict)
    return assertion.assertion_message(
        verdict, found.record, _alone(found, axes, inputs), found.expected, found.off, axes
    )


def _alone(found: MeasuredArray, axes: Sequence[str], inputs: Sequence[Any]) -> Alone:
    """Return candidate and reference in the candidate's shape."""
    y, shape = found.yard, found.shape
    candidate, reference, honest = (x.reshape(shape) for x in (y.candidate, y.reference, found.honest))
    return Alone(
        candidate,
        reference,
        honest,
        y.dtype,
        lambda made: y.badness(made.reshape(y.candidate.shape)),
        lambda x: assertion.slices_text(x, axes, shape),
        [_widen(x) for x in inputs],
    )


def assert_gradients_close(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[..., Any] | Sequence[Any],
    *,
    argnums: Sequence[int] | None = None,
    exact: Callable[..., Any] | None = None,
    seeds: int = 3,
    hostile: bool = True,
) -> None:
    """Raise AssertionError unless rounding explains a kernel's and its reference's outputs and gradients.

    Arguments are those of ``precaudit.gradcheck``. The message says which side is wrong, by how much, and what explains
    it.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from precaudit import assert_gradients_close
    >>> x = np.linspace(-1, 1, 8, dtype=np.float32)
    >>> assert_gradients_close(jnp.tanh, lambda x: 1 - 2 / (jnp.exp(2 * x) + 1), (x,), hostile=False)
    """
    __tracebackhide__ = True
    from precaudit.checks.gradients.check import gradcheck

    found = gradcheck(kernel, reference, inputs, argnums=argnums, exact=exact, seeds=seeds, hostile=hostile)
    if found.exit_code != 0:
        raise AssertionError("\n".join([*found.conclusions, *found.notes]) or "nothing was judged")
