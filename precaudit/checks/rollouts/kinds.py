"""Whether a file is one of a rollout's records, from its first line. No numerics, as gate has none."""

from pathlib import Path

import msgspec

KINDS = ("rollout", "timing", "mismatch", "rounding", "answers", "paired", "divergence", "cause")


class Kind(msgspec.Struct):
    """The kind of a line, empty where it has none."""

    kind: str = ""


def is_rollouts(path: Path) -> bool:
    """Whether a file's first line is one of rollouts.jsonl."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        first = f.readline(1 << 24)
    try:
        return msgspec.json.decode(first, type=Kind).kind in KINDS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
