"""A cell: one fault of the shipped decoder, where it is made, and which names of it are right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from precaudit.diagnosis.evidence.records import Finding
from precaudit.recording.tracing.subject import Subject, load

MIDDLE = 2  # the faulty layer of tiny's five
TEXT = "for name in os.listdir(here):"
OTHER = "x = [1, 2]\n"
NAMELESS = (
    "none reproduces it", "formula differs", "only one record fails", "inputs were not recorded", "foreign rows",
    "stream changed",
)  # fmt: skip
Named = Literal["right", "equal", "wrong", "not"]
Change = Callable[[Subject, Sequence[Any]], Subject]  # of a subject, and of the changes that its program holds beside


@dataclass(frozen=True)
class Cell:
    """A fault that ``change`` makes in a subject, and what may be said of it.

    ``origin``: what kind of public report or paper it is from. ``points``, ``layer``: where it must be flagged; layer
    None: outside layers. ``names``: a regular expression that a right name holds, "": no name is right. ``equal``: one
    of names that say the same of these values. ``policies``: those it is made in, where that matters. ``prompts`` run
    in one batch, padded on the left, ``steps`` after decode0; a model of random weights takes them as bytes.
    """

    name: str
    origin: str
    points: tuple[str, ...]
    names: str
    change: Change
    equal: str = ""
    layer: int | None = MIDDLE
    model: str = "tiny"
    policies: tuple[str, ...] = ("bf16", "fp32-highest")
    settings: tuple[tuple[str, str], ...] = ()
    prompts: tuple[str, ...] = (TEXT,)
    steps: int = 1

    def subject(self, policy: str, beside: Sequence["Cell"] = ()) -> Subject:
        """Return the model with the fault under a policy; those ``beside`` it are in its program, and are not chosen.

        One program for many faults is compiled once.
        """
        alike = [c.change for c in beside if (c.model, c.settings) == (self.model, self.settings)]
        return self.change(load(self.model, policy, dict(self.settings), "cpu"), alike)

    def named(self, found: Finding) -> Named:
        """Say whether a finding names this fault; an unknown one names nothing."""
        if found.kind == "unknown" or found.cause in NAMELESS:
            return "not"
        told = f"{found.kind}: {found.cause}: {found.says}"
        if self.names and re.search(self.names, told, re.IGNORECASE):
            return "right"
        return "equal" if self.equal and re.search(self.equal, told, re.IGNORECASE) else "wrong"
