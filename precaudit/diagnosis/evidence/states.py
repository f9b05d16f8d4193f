"""What a cache that differs is found to hold."""

from typing import NamedTuple

from precaudit.references.mutations.variants import Class

ENOUGH = 0.9  # share of elements an integer grid must give bit for bit: a scale in another format moves some


class State(NamedTuple):
    """``explained``: share of the rows that differ which the cause gives bit for bit; ``rows``: those rows."""

    cause: str
    kind: Class
    says: str
    explained: float
    rows: tuple[int, ...]
