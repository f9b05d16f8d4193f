"""What a program was fed up to a call: token ids sequence by sequence, and which rows of the call are whose."""

from typing import NamedTuple

from precaudit.numbers.arrays import Array


class FedTokens(NamedTuple):
    """What a program was fed up to a call, sequence by sequence, padding left out.

    ``ids``: of each sequence its token ids so far [n]; ``lead`` [B]: the slots before its first; ``at`` [B, T]: the
    position of each row of the call, −1 of padding; ``counted``: RoPE turns a row by its slot, padding counted.
    """

    ids: tuple[Array, ...]
    lead: tuple[int, ...]
    at: Array
    counted: bool = False

    @property
    def slots(self) -> list[slice]:
        """Of each sequence the slots that a cache has its rows in."""
        return [slice(a, a + len(x)) for a, x in zip(self.lead, self.ids, strict=True)]

    @property
    def turned(self) -> tuple[int, ...]:
        """By how much more than its position RoPE turns every row of each sequence."""
        return self.lead if self.counted else (0,) * len(self.lead)
