"""What needs the program itself: shares in logits and remedies, computed at the first whole selection and kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from precaudit.diagnosis.evidence.kept import read_kept, write_kept
from precaudit.diagnosis.evidence.records import Remedy, Shares
from precaudit.errors import UserError
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.arrays import Array
from precaudit.progress import Advance
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import manifest_of
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.formula import ProgramOn
from precaudit.schema.records.devices import device_kind

LONGEST = 512  # tokens of the prompts looked at: a gradient in FP64 takes 6 GB there on a model of 135 M parameters
SHARED, TRIED = 3, 2  # prompts whose logits are shared out; prompts other policies are tried on


@dataclass(frozen=True)
class RecordedModel:
    """A recorded run and its program, on a device.

    ``whole``: compute what is not kept yet. ``objective``: what shares are of, as ``shares`` takes it.
    """

    recorded: Recorded
    model: Model
    program_on: ProgramOn
    whole: bool
    objective: str = "margin"

    @property
    def identity(self) -> str:
        """Hash of run.json, which kept lines carry."""
        return file_hash(manifest_of(self.recorded.run.folder))

    def shares(self, tell: Advance) -> tuple[Shares, ...]:
        """Return the shares of operations in the change of the objective, of a few prompts."""
        before = read_kept(self.recorded.run.folder, "shares.jsonl", Shares)
        if before and all(s.objective == self.objective for s in before):
            return before
        subject = self._program()
        if subject is None or "prefill" not in self.recorded.requested.phases:
            return ()
        from precaudit.diagnosis.evidence.shares import shares, unknown_shares  # JAX
        from precaudit.interpreters.jaxpr import CannotLift

        found = []
        ids = [i for i, _ in self._prompts()][-SHARED:]
        for i, prompt in enumerate(ids):
            tell(i, len(ids), "gradients of logits")
            try:
                made = shares(self.recorded, subject, prompt, self.objective)
            except CannotLift as error:
                made = unknown_shares(prompt, str(error), self.objective)
            found.append(msgspec.structs.replace(made, run=self.identity))
        if any(s.unknown is not None for s in found):
            return tuple(found)  # another selection may bring the meaning that lacked
        return write_kept(self.recorded.run.folder, "shares.jsonl", found)

    def remedies(self, tell: Advance, shared: Sequence[Shares] = ()) -> tuple[Remedy, ...] | None:
        """Return what raising parts of the policy buys, None without its device; ``shared`` tells which layer alone."""
        if before := read_kept(self.recorded.run.folder, "remedies.jsonl", Remedy):
            return before
        try:
            subject = self._program(device_kind(self.recorded.run.record.device))
        except UserError:
            return None
        if subject is None:
            return ()
        from precaudit.diagnosis.evidence.remedies import remedies  # JAX

        tokens = [t for _, t in self._prompts()][-TRIED:]
        model = Model(self.recorded.config, self.model.read)  # what a policy's mask leaves out is a price, too
        made = remedies(subject, model, self.identity, tokens, tell, heaviest(shared))
        return write_kept(self.recorded.run.folder, "remedies.jsonl", made)

    def _prompts(self) -> list[tuple[str, Array]]:
        """Return the prompts of up to LONGEST tokens by length, or the shortest."""
        every = sorted(
            ((p.id, np.asarray(p.tokens, np.int32)) for p in self.recorded.run.prompts.values()),
            key=lambda x: len(x[1]),
        )
        return [x for x in every if len(x[1]) <= LONGEST] or every[:1]

    def _program(self, device: str = "cpu") -> Any:
        return self.program_on(device) if self.whole else None


def heaviest(shared: Sequence[Shares]) -> int | None:
    """Return the layer whose operations' shares are largest in size over prompts; None without shares."""
    sizes: dict[int, float] = {}
    for s in shared:
        for x in s.shares:
            if x.layer is not None:
                sizes[x.layer] = sizes.get(x.layer, 0.0) + abs(float(x.share))
    return max(sizes, key=lambda layer: sizes[layer]) if sizes else None
