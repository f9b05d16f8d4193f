"""Where a side's files lie: FP64's values of every step, members' distances, names of the state's leaves."""

from pathlib import Path

EXACT = "state."  # before the number of a leaf of the state, among the values of points and outputs
MEMBERS, NAMES = "members.jsonl", "names.txt"


def exact_file(case: int, call: int) -> str:
    """Return the file of a call's values in FP64, below the folder of a side's chains."""
    return f"exact/{case}.{call}.safetensors"


def chains_folder(run: Path) -> Path:
    """Return the folder of a side's chains, beside its run."""
    return run.with_name(f"{run.name}-chains")
