"""What can go wrong, and the exit code each kind ends with (docs/exit-codes.md)."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PrecauditError(Exception):
    """Base of the errors precaudit raises on purpose; the command line prints the message without a traceback."""

    exit_code = 70


class UserError(PrecauditError):
    """Wrong use or bad input: a path, an option, a file that is broken or was altered."""

    exit_code = 2


class Interrupted(PrecauditError):
    """Ctrl-C, where something can be said of what is there."""

    exit_code = 130


class CannotJudge(PrecauditError):
    """What was asked cannot be known here: a device died, a reference is missing."""

    exit_code = 3


class ToldElsewhere(PrecauditError):
    """Another of several processes says what is wrong; this one says nothing and ends with the same code."""

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'scores'?``, or the known words when none is close."""
    words = sorted(known)
    return close(word, words) or f"; known: {', '.join(words)}"


def close(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'scores'?``; empty when no known word is close.

    Close: alike by 0.6 as difflib counts, or by 0.5 from the first letter on, as an abbreviation is.
    """
    found = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
    near = [x for x in found if x[:1] == word[:1] or difflib.SequenceMatcher(None, x, word).ratio() >= 0.6]
    return f"; did you mean {near[0]!r}?" if near else ""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raise UserError, in a sentence, for what ran out of a device's or the machine's memory; also a decorator."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not re.search(r"RESOURCE_EXHAUSTED.*(memory|allocat)", text, re.I):
            raise
        asked = re.search(r"allocat\w+ (\d+) ?bytes", text)
        much = f": it was asked for {int(asked[1]) / 1e9:,.1f} GB at once" if asked else ""
        raise UserError(f"the device's memory is too small{much}; give smaller inputs, or another device") from None
