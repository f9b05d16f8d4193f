"""The textbook as the reference of a run: its FP64 forward, its operations, and what its policy's rounding makes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precaudit.models.checkpoints import Checkpoint
from precaudit.models.checkpoints.readers import WeightReader
from precaudit.models.configs import with_window
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.numbers.executors import Threads
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.formula import FormulaPieces, batch_formulas
from precaudit.references.textbook.forward import forward_errors, reference_values
from precaudit.references.textbook.handover import POINT as HANDED
from precaudit.references.textbook.handover import handover_errors
from precaudit.references.textbook.local import LocalEmulations, local_errors
from precaudit.references.textbook.pieces import HERE, Execution
from precaudit.references.textbook.pooled import emulate, named_sums
from precaudit.references.textbook.sums import sum_errors
from precaudit.references.textbook.whole import Whole
from precaudit.schema.places import Place
from precaudit.schema.policies import Policy, declared_policy, recorded_policy
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord, FormulaError, ForwardError, LocalError

LACKS = "weights"  # why there are no numbers where there are none


@dataclass(frozen=True)
class Textbook:
    """The NumPy decoder beside a recorded run; ``whole``: its FP64 forward, None where the weights are not at hand.

    ``model``: attends as the policy's mask says, as operations and emulations do; ``whole`` is of the model itself.
    """

    recorded: Recorded
    model: Model
    policy: Policy
    emulations: LocalEmulations
    whole: Whole | None

    @classmethod
    def of(
        cls,
        recorded: Recorded,
        selected: Selected,
        checkpoint: Checkpoint | None,
        cache: Path,
        execution: Execution = HERE,
    ) -> "Textbook":
        """Compute, or find in the cache, all that a selection needs of the whole model."""
        record = recorded.run.record
        policy = recorded_policy(record)
        model = Model(with_window(recorded.config, policy), _no_weights)
        whole = None
        if checkpoint is not None:
            model.read = WeightReader.of(checkpoint, declared_policy(record), record.model.sha256)
            whole = reference_values(recorded, model, selected, cache.absolute(), execution)
        return cls(recorded, model, policy, LocalEmulations(policy, selected.accum), whole)

    def of_prompts(self, prompts: Collection[str]) -> "Textbook":
        """Return what is needed of some prompts, for other processes: it has nothing open."""
        kept = None if self.whole is None else self.whole.of_prompts(prompts)
        return replace(self, recorded=self.recorded.of_prompts(prompts), whole=kept)

    def warm(self, layer: int | None) -> None:
        """Read a layer's weights before its operations ask for them, one by one."""
        if layer is not None and self.whole is not None:
            self.model.warm(layer)

    def values(self, place: Place) -> Array | None:
        """Return FP64 values of the whole sequence at a place (logits: of the recorded rows); None without weights."""
        return None if self.whole is None else self.whole.values(place.prompt, place.phase, place.layer, place.point)

    def local(self, place: Place) -> Iterator[ErrorRecord]:
        """Yield the local and accumulation records of one point of one phase."""
        yield from local_errors(self.recorded, self.model, self.whole is not None, self.emulations, place)

    def forward(self, place: Place) -> Iterator[ErrorRecord]:
        """Yield the forward records of one point of one phase; unknown without weights."""
        if self.whole is not None:
            yield from forward_errors(self.recorded, self.whole, place)
            return
        for step in self.recorded.steps(place.phase):
            here = place._replace(step=step)
            if here in self.recorded.index:
                yield here.record(ForwardError, self.recorded.run.record.id, "fp64", unknown=LACKS)

    def handover_records(self, place: Place) -> Iterator[ErrorRecord]:
        """Yield the state records of what a layer was handed by the one before."""
        yield from handover_errors(self.recorded, self.model, self.whole is not None, place)

    def sums(self, prompt: str, phase: str, layer: int | None) -> Iterator[ErrorRecord]:
        """Yield the records of a layer's operations that sums of rows tell, all steps of a phase together.

        None: of those after the layers.
        """
        handed = Place(prompt, phase, 0, layer, HANDED)
        yield from sum_errors(self.recorded, self.model, self.whole is not None, self.policy, handed)

    def summed_as(self, errors: Iterable[ErrorRecord], execution: Execution) -> bool:
        """Emulate the policy again with the sums by which local records close; whether there are such."""
        sums = _sums(errors)
        if sums is None or self.whole is None:
            return False
        emulate(self.whole, self.model, self.recorded, self.policy, sums, execution)
        return True


def shadow_records(
    recorded: Recorded,
    checkpoint: Checkpoint,
    selected: Selected,
    program: tuple[Any, str | None],
    execution: Execution = HERE,
) -> list[FormulaError]:
    """Return the formula records of a selection: the program's FP64 shadow against the textbook.

    ``program``: as ``recorded_program`` takes it. One that is in memory is evaluated in this process.
    """
    record = recorded.run.record
    subject, where = program
    read = WeightReader.of(checkpoint, declared_policy(record), record.model.sha256)
    model = Model(with_window(recorded.config, recorded_policy(record)), read)
    executor = execution.executor if subject is None else Threads()
    if not executor.here:
        recorded, where = recorded.of_prompts(recorded.run.prompts), read.source
    shared = FormulaPieces(recorded, model, subject, where, selected.phases)
    batches = dict.fromkeys(recorded.batch_of(p) for p in selected.prompts)
    pieces = [tuple(p for p in batch if p in selected.prompts) for batch in batches]
    made = executor.map(batch_formulas, shared, pieces, execution.tell, "the program in FP64")
    return [e for errors in made for e in errors]


def _sums(errors: Iterable[ErrorRecord]) -> str | None:
    """Return the name of another honest form's sums by which local records close, that of most; None without any."""
    known = named_sums()
    used = Counter(
        name
        for e in errors
        if isinstance(e, LocalError)
        for names in (e.elided or {}).values()
        for name in names
        if name in known
    )
    return used.most_common(1)[0][0] if used else None


def _no_weights(name: str) -> Array:
    raise AssertionError(f"{name} was asked for without weights")
