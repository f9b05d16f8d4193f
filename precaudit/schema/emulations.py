"""What is emulated of an operation, and by which name records hold it: ``policy:bf16``, ``accum:float16``, or both.

Only here are these names written and read.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")
POLICY, SUMS, BOTH = "policy:", "accum:", "+accum:"


class Emulation(NamedTuple):
    """A policy's roundings, sums in a format (``float16``, ``float32/128``), or the first with the second.

    One of the two is not empty. ``policy`` is ``equations`` where a program's own equations say what is rounded.
    """

    policy: str = ""
    accumulation: str = ""

    @property
    def name(self) -> str:
        """Its name in records."""
        if not self.policy:
            return SUMS + self.accumulation
        return POLICY + self.policy + (BOTH + self.accumulation if self.accumulation else "")

    @classmethod
    def of(cls, name: str) -> "Emulation | None":
        """Return what a name in a record says; None of what is no emulation's, such as ``fp64``."""
        if name.startswith(SUMS):
            return cls(accumulation=name.removeprefix(SUMS))
        if not name.startswith(POLICY):
            return None
        policy, _, sums = name.removeprefix(POLICY).partition(BOTH)
        return cls(policy, sums)


def of_policy_alone(shares: Mapping[str, T]) -> tuple[str, T] | None:
    """Return the name and the value of the policy's emulation in its own sums; None where there is none."""
    for name, value in shares.items():
        found = Emulation.of(name)
        if found is not None and found.policy and not found.accumulation:
            return name, value
    return None
