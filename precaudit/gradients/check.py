"""The verb ``gradcheck``: a kernel and its reference, outputs and gradients, each against FP64."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.arrays import Array, rounder, widen
from precaudit.brief import Brief
from precaudit.errors import UserError
from precaudit.formats import FORMATS
from precaudit.gradients.awkward import awkward
from precaudit.gradients.differences import disagreements
from precaudit.gradients.formula import DRAWS, Formula, differentiated, names, single
from precaudit.gradients.lines import inside, shares
from precaudit.gradients.measure import Distance, distance
from precaudit.gradients.noise import spread
from precaudit.judging.rules import judge
from precaudit.judging.verdicts import Status, Verdict, exit_code
from precaudit.limits import default_limits
from precaudit.progress import Advance, silent
from precaudit.records import ErrorRecord, value
from precaudit.references.alone import measured
from precaudit.tracing.manifest import versions
from precaudit.transforms.kernel_lines import interpreted
from precaudit.transforms.shadow import CannotLift

KERNEL, REFERENCE = "kernel", "reference"
SEEDS = 3
NEARLY = 0.9  # of an error that is a factor of the whole array
SOME, NAMED = 0.1, 3  # of an error's energy, that a line is named for; and at most how many
AGAIN = "again"
INTERPRETED = "Pallas kernels run in interpret mode here: their float32 products are a CPU's, not a TPU's passes"


@dataclass(frozen=True)
class Found:
    """One array of one side in one case: its record, verdict, and distance from FP64.

    ``declared``: it is no farther off than the reference's own formats explain.
    """

    case: str
    side: str
    array: str
    record: ErrorRecord
    verdict: Verdict
    distance: Distance | None = None
    declared: bool = False


@dataclass(frozen=True, repr=False)
class Checked(Brief):
    """A kernel beside its reference; ``conclusions``: what is wrong with which side, the worst first."""

    name: str
    cases: tuple[str, ...]
    found: tuple[Found, ...]
    conclusions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    failing: Mapping[str, tuple[Any, ...]] | None = None
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[Status, int]:
        """How many arrays of either side have each status."""
        every: list[Status] = [f.verdict.status for f in self.found]
        return {status: every.count(status) for status in dict.fromkeys(every)}

    @property
    def exit_code(self) -> int:
        """0 both sides are honest float32, or as honest as the reference declares; 1 one is not; 3 cannot be judged."""
        return exit_code(self.counts)

    @property
    def records(self) -> tuple[ErrorRecord, ...]:
        """Every record, as ``gate`` reads them from a file."""
        return tuple(f.record for f in self.found)


def gradcheck(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[..., Any] | Sequence[Any],
    *,
    argnums: Sequence[int] | None = None,
    exact: Callable[..., Any] | None = None,
    seeds: int = SEEDS,
    hostile: bool = True,
    name: str = KERNEL,
    advance: Advance = silent,
) -> Checked:
    """Return how far a kernel's and its reference's outputs and vector-Jacobian products are from FP64.

    ``inputs``: the arguments of both, or a function of a seed (and, if it takes one, of a float format's name) that
    returns them or several of them by name. ``argnums``: which are differentiated (default: all that hold floats
    alone; where none is, outputs alone are judged). ``exact``: the formula on FP64 arrays; else the reference's own,
    traced on float32 inputs and lifted. ``hostile``: with inputs made from the first ones that kernels fail on. The
    kernel is never lifted: it is run.
    Raises UserError for what cannot be differentiated or does not fit.
    """
    check = _Check(kernel, reference, exact, argnums)
    found: list[Found] = []
    notes: dict[str, None] = {}
    done: list[str] = []
    failing: dict[str, tuple[Any, ...]] = {}
    conclusions: dict[tuple[str | None, ...], str] = {}
    cases = _cases(inputs, seeds, hostile)
    for i, (case, make) in enumerate(cases):
        advance(i, len(cases), case)
        given = make()
        try:
            c, made = check.case(case, given)
        except NotApplicable as why:
            notes[f"left out {case}: {why}"] = None
            continue
        done.append(case)
        found += made
        for f in made:
            if f.verdict.status in ("fail", "nonfinite", "unknown"):
                failing.setdefault(case, given)
                kind = (f.side, f.record.dtype, f.verdict.status, f.array)
                if kind not in conclusions:
                    first = kind[:3] not in {known[:3] for known in conclusions}
                    conclusions[kind] = c.told(f, made, first or bool(c.own[f.side].places))
    notes |= dict.fromkeys(check.told())
    left = dict.fromkeys(f.case for f in found if f.verdict.status == "not run")
    if left:
        notes[f"not judged where float32 leaves its range on both sides: {', '.join(left)}"] = None
    return Checked(
        name, tuple(done), tuple(found), tuple(conclusions.values()), tuple(notes), failing,
        str(jax.devices()[0].device_kind), versions(),
    )  # fmt: skip


class NotApplicable(Exception):
    """A case that was made from others and that says nothing of the two sides."""


class _Check:
    def __init__(
        self, kernel: Callable[..., Any], reference: Callable[..., Any], exact: Callable[..., Any] | None,
        argnums: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.sides = {KERNEL: kernel, REFERENCE: reference}
        self.exact = exact
        self.argnums = argnums
        self.notes: dict[str, None] = {}
        self.asked = False  # finite differences, on the first inputs
        self.compiled: dict[Any, Any] = {}

    def told(self) -> Iterator[str]:
        """Yield what is to be known of every case."""
        if self.argnums is not None and not self.argnums:
            yield "outputs alone: no gradient was asked for"
        if any(interpreted(x.jaxpr.jaxpr) for (_, *which), x in self.compiled.items() if which == [KERNEL]):
            yield INTERPRETED
        yield from self.notes

    def case(self, case: str, inputs: tuple[Any, ...]) -> tuple["_Case", list[Found]]:
        """Return every array of both sides."""
        places = self._places(inputs)
        shapes = {side: self._shape(side, f, inputs, " " in case) for side, f in self.sides.items()}
        _same(shapes[KERNEL], shapes[REFERENCE])
        cotangents = _cotangents(shapes[KERNEL], shapes[REFERENCE])
        both = {side: differentiated(f, places) for side, f in self.sides.items()}
        lined = {side: differentiated(f, places, own_lines=True) for side, f in self.sides.items()}
        straight, held = jax.tree.map(single, (cotangents, tuple(inputs)))
        key = tuple((np.shape(x), str(jnp.asarray(x).dtype)) for x in jax.tree.leaves(inputs))
        oracle = lined[REFERENCE] if self.exact is None else differentiated(self.exact, places)
        formula = self._formula(key, "exact", oracle, straight, held)
        rounded = self._formula(key, "single", lined[REFERENCE], straight, held)
        try:
            exact = formula.exact(straight, held)
            called = names(self.sides[REFERENCE], shapes[REFERENCE], inputs, places)
            if " " not in case and not self.asked:
                self.asked = True
                for told in disagreements(formula, straight, held, places, called, exact):
                    self.notes[f"{told}: a stop_gradient, or a derivative rule of its own?"] = None
        except CannotLift as error:
            raise UserError(f"the reference: {error}, or the formula in FP64 as exact") from None
        lost = [] if self.exact is not None else rounded.constants()
        for constant in lost:
            self.notes[f"the reference holds {constant}: if that was rounded, FP64 is too; give it as an input"] = None
        draws = rounded.draws(straight, held, jax.default_backend())
        if self.exact is not None:  # draws are off their own formula, whatever that is
            own = rounded.exact(straight, held)
            draws = [[e + (x - o) for e, x, o in zip(exact, d, own, strict=True)] for d in draws]
        c = _Case(
            case, inputs, cotangents, called,
            len(jax.tree.leaves(shapes[REFERENCE])), exact,
            {side: self._run(key, side, f, cotangents, inputs) for side, f in both.items()},
            {side: self._formula(key, side, f, cotangents, inputs) for side, f in lined.items()}, draws,
        )  # fmt: skip
        wider: list[list[Array]] = []
        found = []
        for i in range(len(c.names)):
            each = {side: c.judged(side, i, draws) for side in self.sides}
            if all(f.record.nonfinite for f in each.values()):
                text = "float32 leaves its range on both sides"
                each = {s: _told(f, skipped=text) for s, f in each.items()}
            elif lost:
                each = {s: _doubted(f) for s, f in each.items()}
            elif each[KERNEL].verdict.status == "fail" and c.own[REFERENCE].narrow():
                wider = wider or c.own[REFERENCE].draws(cotangents, inputs, jax.default_backend(), declared=True)
                looser = {side: replace(c.judged(side, i, wider), declared=True) for side in self.sides}
                if all(f.verdict.status == "pass" for f in looser.values()):
                    each = looser
            found += list(each.values())
        again = self._run(key, KERNEL, both[KERNEL], cotangents, inputs)
        return c, [*found, *c.differing(again)]

    def _places(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        floats = [
            i for i, x in enumerate(inputs)
            if all(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) for leaf in jax.tree.leaves(x))
        ]  # fmt: skip
        if self.argnums is None:
            if not floats:
                raise UserError("no input holds floats: there is nothing to differentiate")
            return tuple(floats)
        for i in self.argnums:
            if not 0 <= i < len(inputs):
                raise UserError(f"argnums names input {i} of {len(inputs)}")
            if i not in floats:
                raise UserError(f"input {i} holds integers: it has no gradient; leave it out of argnums")
        return tuple(self.argnums)

    def _shape(self, side: str, function: Callable[..., Any], inputs: tuple[Any, ...], made: bool) -> Any:
        try:
            out = jax.eval_shape(function, *inputs)
        except Exception as error:
            if made:
                raise NotApplicable(f"the {side} does not take it") from None
            first = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"the {side} cannot be traced on these inputs: {type(error).__name__}: {first}") from None
        for leaf in jax.tree.leaves(out):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UserError(f"the {side} returns {leaf.dtype}{list(leaf.shape)}: no gradient; return floats alone")
        if not jax.tree.leaves(out):
            raise UserError(f"the {side} returns no array")
        return out

    def _formula(self, key: Any, which: str, both: Any, cotangents: Any, inputs: Any) -> Formula:
        if (key, which) not in self.compiled:
            self.compiled[key, which] = Formula.of(both, cotangents, inputs)
        found: Formula = self.compiled[key, which]
        return found

    def _run(self, key: Any, side: str, both: Any, cotangents: Any, inputs: Any) -> list[Array]:
        if (key, "run", side) not in self.compiled:
            self.compiled[key, "run", side] = jax.jit(both)
        try:
            return [np.asarray(x) for x in jax.tree.leaves(self.compiled[key, "run", side](cotangents, *inputs))]
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            how = "differentiated" if self.argnums is None or self.argnums else "run"
            raise UserError(f"the {side} cannot be {how}: {type(error).__name__}: {first}") from None


@dataclass(frozen=True)
class _Case:
    """One case run: both sides' arrays beside FP64's, and their jaxprs. ``outputs``: how many of them are outputs."""

    name: str
    inputs: tuple[Any, ...]
    cotangents: Any
    names: list[str]
    outputs: int
    exact: list[Array]
    runs: dict[str, list[Array]]
    own: dict[str, Formula]
    draws: list[list[Array]]

    def judged(self, side: str, i: int, draws: Sequence[Sequence[Array]]) -> Found:
        """Judge one array by what honest realisations make of the same inputs."""
        stored, exact = self.runs[side][i], self.exact[i]
        true = rounder(FORMATS[stored.dtype.name].name)(exact)
        true = np.where(np.isfinite(true), exact, true)  # what overflows in the format is infinite there
        tiny = float(jnp.finfo(stored.dtype).smallest_normal)
        wide = widen(stored)
        # ∞ or NaN: which depends on the order of honest sums. A device may take what is subnormal for zero.
        same = ~np.isfinite(wide) & ~np.isfinite(true) | (np.abs(wide) <= tiny) & (np.abs(true) <= tiny)
        kept = np.where(same, np.zeros((), stored.dtype), stored).astype(stored.dtype)
        apart, together = (
            [d[i] for d in some if np.array_equal(np.isfinite(d[i]), np.isfinite(exact))]
            for some in (draws[:DRAWS], draws[DRAWS:])
        )
        with np.errstate(all="ignore"):
            honest = [np.where(same, 0.0, x) for x in spread(apart, together, exact)]
            record = measured(kept, np.where(same, 0.0, true), honest, self.names[i]).record
        phase = "forward" if i < self.outputs else "backward"
        record = msgspec.structs.replace(
            record, prompt=self.name, phase=phase, point=f"{side}.{self.names[i]}", candidate=side
        )
        verdict = judge(record, default_limits())
        if verdict is None or verdict.status == "pass":
            verdict = Verdict.of(record, "pass")
        return Found(self.name, side, self.names[i], record, verdict, distance(stored, true))

    def differing(self, again: Sequence[Array]) -> list[Found]:
        """Return the kernel's arrays that have other bits when it runs again on the same inputs."""
        found = []
        for name, a, b in zip(self.names, self.runs[KERNEL], again, strict=True):
            if a.tobytes() != b.tobytes():
                r = ErrorRecord(
                    prompt=self.name, phase=AGAIN, step=0, layer=None, point=f"{KERNEL}.{name}", kind="state",
                    candidate=KERNEL, reference=KERNEL, n=a.size, mismatched=max(int(np.sum(a != b)), 1),
                )  # fmt: skip
                verdict = judge(r, default_limits())
                assert verdict is not None
                found.append(Found(self.name, KERNEL, name, r, verdict))
        return found

    def told(self, f: Found, every: Sequence[Found], line: bool) -> str:
        """Return what is wrong with one array, in words; ``line``: and which line makes it so, compiled for each."""
        r, v = f.record, f.verdict
        at = f"{f.array} ({f.case})"
        if r.phase == AGAIN:
            return f"{f.side}: {at}: {r.mismatched:,} of {r.n:,} elements differ in a second run on the same inputs"
        if v.value is None or f.distance is None:
            return f"{f.side}: {at}: {v.text}"
        if v.status == "nonfinite":
            return f"{f.side}: {at}: {r.nonfinite:,} elements are not finite where FP64 is, or finite where it is not"
        size = f"{f.distance.componentwise:.3g} roundings off at {list(f.distance.worst)}, "
        size += f"{f.distance.normwise:.2g} of its norm"
        why = f"; {self._line(f)}" if line else ""
        other = next((x for x in every if x.side != f.side and x.array == f.array), f)
        if f.side == REFERENCE and other.verdict.status == "pass":
            return f"the reference is the less precise side: {at} is {size}{why}"
        gain = r.unexplained.gain if r.unexplained is not None else None
        only = gain is not None and abs(value(gain.value)) >= NEARLY * f.distance.normwise
        scaled = f"; it is {1 + value(gain.value):.6g} × FP64" if gain is not None and only else ""
        over = f"{v.metric} {value(v.value):.3g} at {v.scope}, limit {v.limit:.3g}"
        return f"{f.side}: {at} is {size}: more than float32 makes ({over}){scaled}{why}"

    def _line(self, f: Found) -> str:
        """Return the line whose rounding makes most of the error, if formats that the function declares explain it."""
        formula, i = self.own[f.side], self.names.index(f.array)
        narrow = formula.narrow()
        if not narrow:
            return self._tf32(f, i) or "no format narrower than float32 explains it: the formula differs"
        if formula.places:
            return self._inside(f, formula, i)
        try:
            draws = formula.draws(self.cotangents, self.inputs, jax.default_backend(), declared=True)
            if self.judged(f.side, i, draws).verdict.status != "pass":
                return "rounding to the formats it declares does not explain it: the formula differs"
            lines = shares(formula, self.cotangents, self.inputs, i, self.exact[i])
        except CannotLift:
            return f"formats narrower than float32 inside: {', '.join(map(_short, narrow))}"
        return f"rounding explains it: {_named(lines)}"

    def _tf32(self, f: Found, i: int) -> str | None:
        """Return that a GPU's float32 products explain it, None where they do not."""
        if jax.default_backend() != "gpu":
            return None
        draws = self.own[f.side].draws(self.cotangents, self.inputs, "gpu", declared=True)
        if self.judged(f.side, i, draws).verdict.status != "pass":
            return None
        return 'TF32 explains it, of which this GPU makes float32 products below precision="highest"'

    def _inside(self, f: Found, formula: Formula, i: int) -> str:
        """Return the same of a function with Pallas kernels: it runs again with what they round in float32."""
        straight = formula.raised(self.cotangents, self.inputs)
        again = replace(self, runs={**self.runs, f.side: straight}).judged(f.side, i, self.draws)
        before, after = (x.distance.normwise if x.distance is not None else np.inf for x in (f, again))
        if again.verdict.status != "pass" and not after < NEARLY * before:
            return "with all that its kernels round inside in float32 it does not pass either: the formula differs"
        told = _named(inside(formula, self.cotangents, self.inputs, i, straight[i]))
        if again.verdict.status != "pass":
            return f"{after:.2g} of its norm without what rounds inside its kernels, {told}; the rest stands outside"
        return f"rounding explains it, {after:.2g} of its norm without: {told}"


def _named(lines: Sequence[tuple[str, float]]) -> str:
    """Return the lines with the largest shares, in words."""
    return ", ".join(f"{_short(line)} ({100 * share:.0f} %)" for line, share in lines[:NAMED] if share >= SOME)


def _short(line: str) -> str:
    """Return ``FILE:LINE (function)`` from here, or from where packages are installed."""
    return line.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")


def _doubted(f: Found) -> Found:
    """Return what was found where FP64 itself may be off: unknown unless it passes."""
    if f.verdict.status == "pass":
        return f
    text = "the reference's FP64 values hold a constant that a narrow format rounded"
    return _told(f, unknown=text)


def _told(f: Found, **why: str) -> Found:
    """Return what was found with the reason that it is not judged, in its record too."""
    record = msgspec.structs.replace(f.record, **why)
    verdict = judge(record, default_limits())
    assert verdict is not None
    return replace(f, record=record, verdict=verdict)


def _cotangents(kernel: Any, reference: Any) -> Any:
    """Return what is pulled back: 1 for a scalar, else normal, in the narrower of both outputs' formats."""
    random = np.random.default_rng(20020801)

    def one(a: Any, b: Any) -> Any:
        dtype = min((a.dtype, b.dtype), key=lambda d: jnp.finfo(d).nmant)
        x = random.standard_normal(a.shape) if a.shape else np.ones(())
        return jnp.asarray(x, jnp.float32).astype(dtype)

    return jax.tree.map(one, kernel, reference)


def _same(kernel: Any, reference: Any) -> None:
    """Raise UserError unless two outputs have one structure and the same shapes."""
    told = [
        ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(out)) for out in (kernel, reference)
    ]  # fmt: skip
    if jax.tree.structure(kernel) != jax.tree.structure(reference) or [x.shape for x in jax.tree.leaves(kernel)] != [
        x.shape for x in jax.tree.leaves(reference)
    ]:
        raise UserError(f"the kernel returns {told[0]}, the reference {told[1]}: they have to be of one structure")


def _cases(
    inputs: Callable[..., Any] | Sequence[Any], seeds: int, hostile: bool
) -> list[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """Return (name, what makes the inputs); those that are made from others have a blank in their name."""
    found: list[tuple[str, Callable[[], tuple[Any, ...]]]] = []
    for form in formats(inputs) if callable(inputs) else ("",):
        first: tuple[Any, ...] = ()
        for seed in range(seeds if callable(inputs) else 1):
            made = inputs if not callable(inputs) else _made(inputs, seed, form)
            each = made if isinstance(made, Mapping) else {"": made}
            for label, given in each.items():
                if not isinstance(given, list | tuple):
                    raise UserError(f"inputs gives {type(given).__name__}: a tuple of arrays is wanted")
                held = tuple(given)
                first = first or held
                name = "-".join(x for x in (form, label, f"seed{seed}" if callable(inputs) else "given") if x)
                found.append((name, lambda held=held: held))  # type: ignore[misc]
        if hostile:
            found += [(f"{form} {label}".strip(), make) for label, make in awkward(first)]
    return found


def formats(inputs: Callable[..., Any]) -> tuple[str, ...]:
    """Return the float formats that a function of inputs is asked for; one of no name where it takes none."""
    import inspect

    try:
        takes = len(inspect.signature(inputs).parameters) > 1
    except (TypeError, ValueError):
        takes = False
    return ("float32", "bfloat16") if takes else ("",)


def _made(inputs: Callable[..., Any], seed: int, form: str) -> Any:
    try:
        return inputs(seed, form) if form else inputs(seed)
    except Exception as error:
        raise UserError(f"inputs failed: {type(error).__name__}: {error}") from None
