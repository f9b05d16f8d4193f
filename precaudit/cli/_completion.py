"""What a shell completes after an option: names out of small tables, without JAX."""

from collections.abc import Callable, Iterable
from typing import Any

Words = Callable[[], Iterable[str]]


def point_names() -> tuple[str, ...]:
    """Return the names of points."""
    from precaudit.schema.graphs.decoder import POINTS

    return (*POINTS, "all")


def phase_names() -> tuple[str, ...]:
    """Return the names of phases."""
    from precaudit.schema.selection import PHASES

    return PHASES


def complete_word(_context: Any, _parameter: Any, incomplete: str) -> list[str]:
    """Complete a word of the glossary."""
    from precaudit.schema.glossary import lookup_key, terms_by_name

    return [name.replace(" ", "-") for name in terms_by_name() if name.startswith(lookup_key(incomplete))]


def complete_last(words: Words) -> Callable[[Any, Any, str], list[str]]:
    """Return a completer of ``a,b,c``: of what stands after the last comma."""

    def complete(_context: Any, _parameter: Any, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = set(before.split(","))
        return [before + comma + word for word in words() if word.startswith(last) and word not in taken]

    return complete
