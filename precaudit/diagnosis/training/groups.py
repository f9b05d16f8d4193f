"""What a tensor of a training step is: its loss, a gradient, a parameter, a moment of the optimizer. By its name."""

import re
from collections.abc import Collection, Sequence

from precaudit.diagnosis.training.records import Group, Where

WORDS = re.compile(r"[^a-zA-Z0-9]+")
LOSS = {"loss", "losses", "nll", "cost"}
GRADIENT = {"grad", "grads", "gradient", "gradients"}
# Of the trees that optimizers keep; one letter alone is the name of a moment where it is a state's.
MOMENTS = {
    "accumulator",
    "ema",
    "m",
    "moment",
    "momentum",
    "moments",
    "mu",
    "nu",
    "opt",
    "optimiser",
    "optimizer",
    "slots",
    "sum_of_squares",
    "trace",
    "v",
    "velocity",
}


def name_words(name: str) -> set[str]:
    """Return the words of a tensor's name, in small letters."""
    return {w for part in WORDS.split(name) for w in (part.lower(), *part.lower().split("_")) if w}


def tensor_group(where: Where, name: str, shape: Sequence[int], parameters: Collection[tuple[int, ...]]) -> Group:
    """Return the group of a tensor; ``parameters``: the sorted shapes of the state's tensors that are no moments.

    A cotangent (``.grad``) is a gradient where it has the shape of a parameter, turned or not.
    """
    words = name_words(name)
    if where != "state" and words & LOSS and len(shape) == 0:
        return "loss"
    if words & GRADIENT:
        return "gradient" if tuple(sorted(shape)) in parameters else "other"
    if where != "state":
        return "other"
    return "moments" if words & MOMENTS else "other" if len(shape) == 0 else "parameters"
