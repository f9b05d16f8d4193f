"""Formula: is the program's FP64 shadow the independent FP64 reference, at every point and in the batches recorded.

JAX is imported where a shadow is computed, and nowhere else in comparison.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from precaudit.errors import UserError
from precaudit.models.numpy_decoder.model import Model
from precaudit.progress import Advance
from precaudit.recording.runs.recorded import Recorded
from precaudit.schema.coverage import formula_keys
from precaudit.schema.places import Place
from precaudit.schema.records.base import Number, json_number
from precaudit.schema.records.errors import ErrorRecord, FormulaError

ProgramOn = Callable[[str], Any]  # device kind to Subject; None where the program is not at hand
OTHER = "the program is not the shipped decoder: compare(run, subject=…) or diagnose(run, subject=…) checks it"


def formula_errors(
    recorded: Recorded,
    model: Model,
    prompts: Sequence[str],
    program_on: ProgramOn,
    phases: Collection[str] | None = None,
) -> Iterator[FormulaError]:
    """Yield a record for every place of ``prompts`` (coverage.formula_keys); ``rel_l2``: ‖shadow − FP64‖ / ‖FP64‖.

    A program that is not at hand, or holds what has no FP64 meaning, is unknown.
    """
    asked = [p for p in recorded.requested.phases if phases is None or p in phases]
    program = program_on("cpu")
    for batch in dict.fromkeys(recorded.batch_of(p) for p in prompts):
        found, unknown = ({}, OTHER) if program is None else _shadow_numbers(recorded, model, batch, program, asked)
        for prompt in (p for p in batch if p in prompts):
            for phase, step, layer, point in formula_keys(recorded.requested, recorded.config, asked):
                here = Place(prompt, phase, step, layer, point)
                if unknown:
                    yield here.record(FormulaError, "shadow", "fp64", unknown=unknown)
                elif here not in found:
                    yield here.record(FormulaError, "shadow", "fp64", missing="the program in FP64 never came here")
                else:
                    yield here.record(FormulaError, "shadow", "fp64", **found[here])


@dataclass(frozen=True)
class FormulaPieces:
    """What pieces share, of a batch each; ``subject``, ``where``: as ``recorded_program`` takes them."""

    recorded: Recorded
    model: Model
    subject: Any
    where: str | None
    phases: tuple[str, ...]

    @cached_property
    def program_on(self) -> ProgramOn:
        """What brings the program to a device of the process that asks."""
        return recorded_program(self.recorded, self.subject, self.where)


def batch_formulas(shared: FormulaPieces, prompts: tuple[str, ...], tell: Advance) -> list[ErrorRecord]:
    """Return the formula records of some prompts of a batch."""
    tell(0, 1, "the program in FP64")
    return list(formula_errors(shared.recorded, shared.model, prompts, shared.program_on, shared.phases))


def recorded_program(recorded: Recorded, subject: Any = None, where: str | None = None) -> ProgramOn:
    """Return what brings the recorded program to a device, its weights read once there.

    ``subject``: the program, whatever the device; None: the shipped decoder, if that was recorded, with the weights
    at ``where`` (None: where they were). Calls raise UserError without JAX, the device or those weights.
    """

    @cache
    def program_on(device: str) -> Any:
        if subject is not None:
            return subject
        try:
            from precaudit.recording.tracing.subject import program_of
        except ImportError as error:
            raise UserError(f"the formula needs JAX ({error}); compare without --formula") from None
        return program_of(recorded.run, device, where)

    return program_on


def _shadow_numbers(
    recorded: Recorded, model: Model, batch: tuple[str, ...], subject: Any, phases: list[str]
) -> tuple[dict[Place, dict[str, Any]], str]:
    """Return the numbers of every place of a batch, or why there are none."""
    from precaudit.interpreters.jaxpr import CannotLift
    from precaudit.recording.tracing import shadowed
    from precaudit.recording.tracing.session import run_batches

    groups = dict.fromkeys(recorded.batch_of(p) for p in recorded.requested.prompts if p in recorded.run.prompts)
    each = ([recorded.run.prompts[p] for p in group] for group in groups)
    whole = run_batches(each, recorded.requested, recorded.config.parameters)[list(groups).index(batch)]
    fed = {p: recorded.fed_tokens(p) for p in batch}
    points = frozenset(point for *_, point in formula_keys(recorded.requested, recorded.config, phases))
    try:
        work = shadowed.ShadowWork(whole, fed, recorded.requested, phases, points)
        found = list(shadowed.tap_distances(subject, model, work))
    except CannotLift as error:
        return {}, str(error)
    return {Place(d.prompt, d.phase, d.step, d.layer, d.point): _numbers(d) for d in found}, ""


def _numbers(d: Any) -> dict[str, Any]:
    worst: tuple[Number, int] = (json_number(d.token[0]), d.token[1])
    return {
        "dtype": "float64",
        "n": d.n,
        "nonfinite": d.nonfinite,
        "max_diff": json_number(d.largest),
        "rel_l2": json_number(d.distance),
        "scopes": {"token": {"rel_l2": worst}},
    }
