"""Which kind of device a run is of, and the ways in which one, or several, make a product."""

from typing import Literal

from precaudit.schema.records.base import Count, Record


def device_kind(device: str) -> str:
    """Return cpu, tpu or gpu of a run's device, which GPUs give by their maker's name."""
    first = device.replace(":", " ").lower().split(" ")[0]
    return first if first in ("", "cpu") else "tpu" if first.startswith("tpu") else "gpu"


FROM_JAXPR = "(emulated from the jaxpr)"  # ends the device of a run whose products take the passes asked for
# How a product is made: of operands in bfloat16 parts on a TPU's matrix unit, or in float32 on its vector unit; on a
# GPU of operands in TF32 parts, in float32, or of terms rounded to the result's format


PRODUCT, SUM = "product", "sum"  # before the numbers of labels


class SplitSum(Record, frozen=True, omit_defaults=False):
    """A product or sum over several devices: in how many parts, each rounded to its format, and how they add.

    ``summed``: the format in which parts are added, rounded after each where that is of 16 bits.
    """

    parts: Count
    summed: str


Way = Literal[
    "1 pass",
    "3 passes",
    "6 passes",
    "float32",
    "float32, one operand bfloat16",
    "float32, both operands bfloat16",
    "1 TF32 pass",
    "3 TF32 passes",
    "rounded products",
]
