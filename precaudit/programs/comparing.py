"""Errors of a program's run: every segment between points made again in FP64 and as its equations round (JAX)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from precaudit.arrays import Array
from precaudit.comparison.closing import Yardstick
from precaudit.errors import UserError
from precaudit.formats import FORMATS
from precaudit.metrics.residue import Noise
from precaudit.metrics.sizes import canonical, explained, norm, ratio, sizes
from precaudit.numpy_decoder.ensemble import RECIPROCAL
from precaudit.numpy_decoder.magnitudes import half_ulp
from precaudit.programs.forward import QUICK, Chains, NotChained, Truth, forward_numbers
from precaudit.programs.loading import load, trusted
from precaudit.programs.program import LOGITS, Program
from precaudit.programs.runs import EQUATIONS, OWN_SUMS, Compared, Opened, ProgramPoint, open_program_run, places
from precaudit.programs.tracing import code_of, prepared, weights_of
from precaudit.records import PROGRAM_CALL, ErrorRecord, number, write_lines
from precaudit.store import file_hash
from precaudit.transforms import CannotLift
from precaudit.transforms.emulate import Realisation, emulated, exactly, sums_narrow
from precaudit.writing import write_whole

Tell = Callable[[int, int, str], None]
# How the equations may round, the best kept; and realisations more, of which noise is made.
CONVERTED = ("results converted to a wider format",)
HONEST = {
    (): Realisation(),
    CONVERTED: Realisation("converted"),
    ("functions in one step",): Realisation("converted", expanded=False),
    ("results inside",): Realisation("all"),
}
NARROW = {(OWN_SUMS,): Realisation(sums="own"), (OWN_SUMS, *CONVERTED): Realisation("converted", sums="own")}
DRAWS = (
    Realisation(seed=1, sums="single"),
    Realisation(seed=2, sums="reversed"),
    Realisation("converted", seed=3, sums="single"),
)
CHAINED = "calls in FP64 and as drawn realisations"
ALWAYS = np.ones(1, bool)


@dataclass(frozen=True)
class Segments:
    """What a call's segments make of recorded inputs: in FP64, as the equations round, and as drawn realisations."""

    exact: dict[str, Array]
    honest: dict[tuple[str, ...], dict[str, Array]]
    drawn: tuple[dict[str, Array], ...]


def compare(
    run: Opened | str, program: Program | None = None, reference: str | None = None,
    tell: Tell = lambda done, total, what: None,
) -> list[ErrorRecord]:  # fmt: skip
    """Return the error records of a program's run and write them beside it.

    ``program``, or ``reference`` naming it; without either the one the run names, if this user traced that very source.
    Raises UserError where the program is another than the one that was traced, or its code would be someone else's.
    """
    opened = open_program_run(run) if isinstance(run, str) else run
    opened.verify()
    found = program or load(_named(opened, reference))
    made = prepared(found)
    if code_of(made) != opened.record.code:
        raise UserError(
            f"{opened.folder}: the program is not the one that was traced (its operations differ); trace again"
        )
    if weights_of(found, made) != opened.record.weights:
        raise UserError(
            f"{opened.folder}: the parameters are not those that were traced (their hash differs); are they drawn "
            "without a seed? Trace again"
        )
    inputs = jax.tree.structure(next(iter(found.cases.values())))
    with jax.enable_x64(True):
        exact = jax.jit(exactly(made.call), compiler_options=QUICK)
        ways = HONEST | (NARROW if sums_narrow(made.jaxpr.jaxpr) else {})
        honest = {name: jax.jit(emulated(made.call, how), compiler_options=QUICK) for name, how in ways.items()}
        drawn = [jax.jit(emulated(made.call, how), compiler_options=QUICK) for how in DRAWS]
    errors: list[ErrorRecord] = []
    chains = Chains(found, made)
    total = len(opened.record.cases) * opened.record.calls
    for i, case in enumerate(opened.record.cases):
        for call in range(opened.record.calls):
            taps, held = (opened.tensors(case, call, kind) for kind in ("taps", "inputs"))
            given = jax.tree.unflatten(inputs, [held[str(j)] for j in range(len(held))])
            try:
                with jax.enable_x64(True):
                    args = (found.params, *given)
                    segments = Segments(
                        _host(exact(taps, *args)),
                        _honest(honest, taps, args),
                        tuple(_rounded(f(taps, *args)) for f in drawn),
                    )
            except (CannotLift, NotImplementedError) as error:
                errors += [
                    _place(opened, case, call, p, layer, unknown=str(error))
                    for p, layer in places(opened.record.points)
                ]
                continue
            errors += _records(opened, case, call, taps, segments)
            tell(i * opened.record.calls + call + 1, total, "segments in FP64 and emulated")
        errors += _forward(opened, chains, case, tell)
    path = opened.folder / "errors.jsonl"
    write_lines(path, errors)
    marks = Compared(run=file_hash(opened.folder / "program.json"), errors=file_hash(path))
    write_whole(opened.folder / "compared.json", msgspec.json.encode(marks) + b"\n")
    return errors


def _named(opened: Opened, reference: str | None) -> str:
    """Return the reference of a run's program; its code runs where the user named it, here or when it was traced."""
    if reference is not None:
        return reference
    named = opened.record.program
    if not named:
        raise UserError(f"{opened.folder} does not say which program it is of; give it with --program FILE.py:NAME")
    if not trusted(named):
        raise UserError(
            f"{opened.folder} is of {named}, which was not traced here as it stands: to run its code, name it with "
            f"--program {named}"
        )
    return named


def _host(values: dict[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(x) for name, x in values.items()}


def _rounded(values: dict[str, tuple[Any, Any]]) -> dict[str, Array]:
    return {name: np.asarray(x) for name, (x, _) in values.items()}


def _honest(
    emulations: dict[tuple[str, ...], Any], taps: dict[str, Array], args: tuple[Any, ...]
) -> dict[tuple[str, ...], dict[str, Array]]:
    """Return what each emulation makes of recorded inputs, and of narrow ones as they were before they were rounded.

    A compiler that widens what it has just rounded hands the unrounded value on (docs/design.md §7, 2).
    """
    found: dict[tuple[str, ...], dict[str, Array]] = {}
    for name, emulation in emulations.items():
        made = emulation(taps, *args)
        found[name] = _rounded(made)
        if not name or name == CONVERTED:
            read = {k: np.asarray(made[k][1]) if k in made and x.dtype.itemsize < 4 else x for k, x in taps.items()}
            found[(*name, "inputs")] = _rounded(emulation(read, *args))
    return found


def _forward(opened: Opened, chains: Chains, case: str, tell: Tell) -> Iterator[ErrorRecord]:
    """Yield one forward record for every point and step of its scans, and for every named output, of a case's calls."""
    every = [*places(opened.record.points), *((p, None) for p in opened.record.outputs)]
    calls = range(opened.record.calls)
    done = 0
    try:
        with jax.enable_x64(True):
            for call, truth in enumerate(chains.calls(opened.tensors(case, call, "inputs") for call in calls)):
                stored = opened.tensors(case, call, "taps")
                if opened.record.outputs:
                    stored |= opened.tensors(case, call, "outputs")
                for p, layer in every:
                    yield _forward_record(opened, case, call, p, layer, stored, truth)
                done = call + 1
                tell(done, len(calls), f"{case}: {CHAINED}")
    except (CannotLift, NotImplementedError, NotChained) as error:
        for call in calls[done:]:
            for p, layer in every:
                yield _place(opened, case, call, p, layer, "forward", unknown=str(error))


def _forward_record(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None, stored: dict[str, Array], truth: Truth
) -> ErrorRecord:
    whole = stored.get(p.name)
    if lacks := _lacks(p, layer, whole, stored):
        return _place(opened, case, call, p, layer, "forward", **lacks)
    assert whole is not None
    one = _step(p, layer)
    drawn = [one(values[p.name]) for values in truth.drawn]
    numbers = forward_numbers(one(whole), one(truth.exact[p.name]), drawn, p.name == LOGITS)
    return _place(opened, case, call, p, layer, "forward", **numbers)


def _lacks(p: ProgramPoint, layer: int | None, whole: Array | None, taps: dict[str, Array]) -> dict[str, Any]:
    """Return why a point has no numbers; empty where it has."""
    if whole is None or whole.shape != (*p.stacked, *p.shape) or whole.dtype.name != p.dtype:
        return {"missing": "recorded with another shape or format, or not at all"}
    taken = taps.get(f"{p.name}@taken", ALWAYS).reshape(-1)
    if not taken[(layer or 0) if len(taken) > 1 else 0]:
        return {"unknown": "its branch was not taken"}
    return {}


def _step(p: ProgramPoint, layer: int | None) -> Callable[[Array], Array]:
    """Return what cuts a step of its scans out of a point's values, as rows [rows, N]."""
    return lambda x: x.reshape(-1, *p.shape)[layer or 0].reshape(-1, p.shape[-1] if p.shape else 1)


def _place(
    opened: Opened, case: str, call: int, p: ProgramPoint, layer: int | None,
    kind: Literal["local", "forward"] = "local", **numbers: Any,
) -> ErrorRecord:  # fmt: skip
    return ErrorRecord(
        prompt=case, phase=PROGRAM_CALL, step=call, layer=layer, point=p.name, kind=kind, candidate=opened.record.id,
        reference="fp64", **numbers,
    )  # fmt: skip


def _records(opened: Opened, case: str, call: int, taps: dict[str, Array], made: Segments) -> Iterator[ErrorRecord]:
    """Yield one local record for every point and step of its scans."""
    for p, layer in places(opened.record.points):
        whole = taps.get(p.name)
        if lacks := _lacks(p, layer, whole, taps):
            yield _place(opened, case, call, p, layer, **lacks)
            continue
        assert whole is not None
        if p.name not in made.exact:
            yield _place(opened, case, call, p, layer, unknown="no segment ends in it")
            continue
        step = _step(p, layer)
        honest = {name: step(values[p.name]) for name, values in made.honest.items()}
        drawn = [step(values[p.name]) for values in made.drawn]
        yield _place(opened, case, call, p, layer, **_numbers(step(whole), step(made.exact[p.name]), honest, drawn))


def _numbers(stored: Array, exact: Array, honest: dict[tuple[str, ...], Array], drawn: list[Array]) -> dict[str, Any]:
    """Return a local record's fields; arrays [rows, N]: what leads is rows, since axes are not known."""
    rows, dtype = np.arange(len(stored)), stored.dtype.name
    candidate, reference = canonical(stored, "TD"), canonical(exact, "TD")
    emulations = {name: canonical(y, "TD") for name, y in honest.items()}
    members = [canonical(y, "TD") for y in drawn]
    wide = dtype in ("float32", "float64")
    if not wide:
        members = [*emulations.values(), *members]
    u = FORMATS[dtype].unit_roundoff
    deviations = [y - reference for y in members]
    shown = np.where(np.isfinite(reference), reference, 0.0)
    noise = Noise.pooled(deviations, shown, u, RECIPROCAL if wide else 0.0)
    clean = np.nan_to_num(candidate, nan=0.0, posinf=0.0, neginf=0.0)
    best = min(
        emulations, key=lambda name: norm(clean - np.nan_to_num(emulations[name], nan=0.0, posinf=0.0, neginf=0.0))
    )
    # |A||B| of a segment is not known: where a result cancels, its row's size stands for that of its terms
    floor = noise.relative * np.sqrt(np.mean(shown**2, axis=2, keepdims=True))
    allowed = half_ulp(reference, dtype) + np.hypot(np.sqrt(noise.power), floor)
    yard = Yardstick("TD", dtype, rows, candidate, reference, noise, allowed)
    residue = yard.residue(emulations[best])
    found = sizes(stored, reference, "TD", rows)
    for name, scope in residue.scopes.items():
        found["scopes"].setdefault(name, {}).update(scope)
    error = norm(np.where(np.isfinite(candidate - reference), candidate - reference, 0.0))
    share = explained(clean, norm(clean - shown), emulations[best])
    found |= {
        "explained": {EQUATIONS: number(share)}, "unexplained": residue.unexplained, "slices": residue.slices,
        "ratio": number(ratio(error, norm(emulations[best] - shown))),
    }  # fmt: skip
    return found | ({"elided": {EQUATIONS: best}} if best else {})
