"""The lines of probe.jsonl: scores that a device made in one way."""

from typing import Literal

from precaudit.schema.records.base import Count, Index, Number, Record
from precaudit.schema.records.errors import ProductError, Worst, as_kind


class ProbeRecord(Record, frozen=True, kw_only=True, tag_field="kind", tag="product"):
    """Scores q·kᵀ that a device made in one way, against FP64 of the operands as they are.

    ``shape``: as ``--shape`` takes it; ``operands``: their format; ``way``: how the scores were asked for;
    ``candidate``: the device's kind; ``target``: the TPU whose compiler said what it would make. ``unknown``: what the
    device said when it refused. ``asked``: the arithmetic that the way names; ``made``: what the scores were made of,
    more than one name where they cannot be told apart. ``version``: of JAX, or of libtpu. Sizes of the error are those
    of an ``ErrorRecord``. ``seconds`` of a call and ``time``, its ratio to a call of ``first`` in the same round: lower
    quartile, median, upper quartile. ``memory``: bytes of arguments, outputs and temporaries. ``unit``, ``passes``: of
    a TPU.
    """

    shape: str
    operands: str
    way: str
    target: str | None = None
    candidate: str
    version: str
    asked: str | None = None
    made: tuple[str, ...] = ()
    honoured: Literal["yes", "replaced", "undecided"] | None = None
    unknown: str | None = None
    dtype: str | None = None
    n: Count = 0
    nonfinite: Count = 0
    mae: Number | None = None
    max_diff: Number | None = None
    rel_l2: Number | None = None
    cosine: Number | None = None
    max_ulp: Count | None = None
    bits_lost: Number | None = None
    snr: Number | None = None
    gain: Number | None = None
    mean: Number | None = None
    worst: Worst | None = None
    first: str | None = None
    seconds: tuple[Number, Number, Number] | None = None
    time: tuple[Number, Number, Number] | None = None
    memory: tuple[Count, Count, Count] | None = None
    unit: Literal["matrix", "vector"] | None = None
    passes: Index | None = None

    @property
    def point(self) -> str:
        """The way, and ``on`` the target that it is predicted for."""
        return self.way if self.target is None else f"{self.way} on {self.target}"

    @property
    def numberless(self) -> str | None:
        """Why there are no numbers; None where there are."""
        return self.unknown

    def product(self) -> ProductError:
        """Return it as budgets judge it: the shape is its case, the operands' format its phase."""
        here = {"prompt": self.shape, "phase": self.operands, "step": 0, "layer": None, "reference": "fp64"}
        return as_kind(self, ProductError, **here)
