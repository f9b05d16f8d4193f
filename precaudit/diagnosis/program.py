"""What needs the program itself: shares in logits and remedies, computed at the first whole look and kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from precaudit.comparison.forward import Tell
from precaudit.comparison.recorded import Recorded
from precaudit.diagnosis.formula import program_of
from precaudit.diagnosis.records import Remedy, Shares
from precaudit.errors import UserError
from precaudit.formats import Array
from precaudit.numpy_decoder.model import Model
from precaudit.records import Record, device_kind, read_lines, write_lines
from precaudit.store import file_hash

LONGEST = 512  # tokens of the prompts looked at: a gradient in FP64 takes 6 GB there on a model of 135 M parameters
SHARED, TRIED = 3, 2  # prompts whose logits are shared out; prompts other policies are tried on
R = TypeVar("R", Remedy, Shares)


@dataclass(frozen=True)
class Program:
    """A recorded run and its program (``subject`` None: the shipped decoder if it was that one).

    ``whole``: compute what is not kept yet. ``objective``: what shares are of, as ``shares`` takes it;
    ``where``: where the weights lie now.
    """

    recorded: Recorded
    model: Model
    subject: Any
    whole: bool
    objective: str = "margin"
    where: str | None = None

    @property
    def identity(self) -> str:
        """Hash of run.json, which kept lines carry."""
        return file_hash(self.recorded.run.folder / "run.json")

    def shares(self, tell: Tell) -> tuple[Shares, ...]:
        """Return the shares of operations in the change of the objective, of a few prompts."""
        held = self._kept("shares.jsonl", Shares)
        if held is not None and all(s.objective == self.objective for s in held):
            return held
        subject = self._program()
        if subject is None or "prefill" not in self.recorded.requested.phases:
            return ()
        from precaudit.diagnosis.shares import shares, unknown_shares  # JAX
        from precaudit.transforms import CannotLift

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
            return tuple(found)  # another look may bring the meaning that lacked
        return self._keep("shares.jsonl", found)

    def remedies(self, tell: Tell, shared: Sequence[Shares] = ()) -> tuple[Remedy, ...]:
        """Return what raising parts of the policy buys; ``shared`` tells the layer to raise alone."""
        if (held := self._kept("remedies.jsonl", Remedy)) is not None:
            return held
        try:
            subject = self._program(device_kind(self.recorded.run.record.device))
        except UserError:
            return ()
        if subject is None:
            return ()
        from precaudit.diagnosis.remedies import remedies  # JAX

        tokens = [t for _, t in self._prompts()][-TRIED:]
        made = remedies(subject, self.model, self.identity, tokens, tell, heaviest(shared))
        return self._keep("remedies.jsonl", made)

    def _prompts(self) -> list[tuple[str, Array]]:
        """Return the prompts of up to LONGEST tokens by length, or the shortest."""
        every = sorted(
            ((p.id, np.asarray(p.tokens, np.int32)) for p in self.recorded.run.prompts.values()),
            key=lambda x: len(x[1]),
        )
        return [x for x in every if len(x[1]) <= LONGEST] or every[:1]

    def _program(self, device: str = "cpu") -> Any:
        if not self.whole:
            return None
        return program_of(self.recorded, device, self.where) if self.subject is None else self.subject

    def _kept(self, name: str, kind: type[R]) -> tuple[R, ...] | None:
        path = self.recorded.run.folder / name
        held = read_lines(path, kind) if path.is_file() else []
        return tuple(held) if held and all(x.run == self.identity for x in held) else None

    def _keep(self, name: str, found: list[R]) -> tuple[R, ...]:
        records: list[Record] = list(found)
        write_lines(self.recorded.run.folder / name, records)
        return tuple(found)


def heaviest(shared: Sequence[Shares]) -> int | None:
    """Return the layer whose operations' shares are largest in size over prompts; None without shares."""
    sizes: dict[int, float] = {}
    for s in shared:
        for x in s.shares:
            if x.layer is not None:
                sizes[x.layer] = sizes.get(x.layer, 0.0) + abs(float(x.share))
    return max(sizes, key=lambda layer: sizes[layer]) if sizes else None
