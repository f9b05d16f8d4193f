"""What a program was fed up to a call: token ids sequence by sequence, and which rows of the call are whose."""

from typing import NamedTuple

from precaudit.numbers.arrays import Array


class FedTokens(NamedTuple):
    """What a program was fed up to a call, sequence by sequence, padding left out.

    ``ids``: of each sequence its token ids so far [n]; ``lead`` [B]: the slots before its first; ``at`` [B, T]: the
    position of each row of the call, −1 of padding.
    """

    ids: tuple[Array, ...]
    lead: tuple[int, ...]
    at: Array

    @property
    def slots(self) -> list[slice]:
        """Of each sequence the slots that a cache has its rows in."""
        return [slice(a, a + len(x)) for a, x in zip(self.lead, self.ids, strict=True)]
