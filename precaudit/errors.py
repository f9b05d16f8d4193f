"""What can go wrong, and the exit code each kind ends with (design §6)."""

import difflib
from collections.abc import Iterable


class PrecauditError(Exception):
    """Base of the errors precaudit raises on purpose; the command line prints the message without a traceback."""

    exit_code = 70


class UserError(PrecauditError):
    """Wrong use or bad input: a path, an option, a file that is broken or was altered."""

    exit_code = 2


class CannotJudge(PrecauditError):
    """What was asked cannot be known here: a device died, a reference is missing."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'scores'?``, or the known words when none is close."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(words)}"
