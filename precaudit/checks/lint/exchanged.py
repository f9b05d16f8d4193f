"""What the chips of a mesh exchange in a compiled program: each collective, its format, and the bytes of a step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from precaudit.interpreters.mesh.groups import group_size
from precaudit.interpreters.mesh.sums import ADDING
from precaudit.interpreters.tpu.hlo import ArrayType, Instruction, Module
from precaudit.schema.graphs.decoder import point_of

MOVING = ("all-gather", "all-gather-start", "all-to-all", "collective-permute", "collective-permute-start")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
NARROW = ("bf16", "f16")
GATHERED = "gather"  # of a table cut by rows: one chip has the row, the others add nothing
LOOP = "while"  # in the path of what a loop over layers makes


@dataclass(frozen=True)
class Exchange:
    """A collective of a phase: at which point, over how many chips, in which format, how often, and a step's bytes.

    ``bytes``: of its results on one chip; None where its type is not known. ``rounds``: whether it adds in 16 bits.
    """

    phase: str
    kind: str
    point: str
    chips: int
    format: str
    times: int
    bytes: int | None
    rounds: bool


def exchanges(phase: str, module: Module, layers: int) -> Iterator[Exchange]:
    """Yield the collectives of a phase of the decoder; those in its loop over layers are made once a layer."""
    for _, x in module.walk():
        if x.opcode not in (*ADDING, *MOVING):
            continue
        path = x.op_name.split("/")
        times = layers if LOOP in path else 1
        made = _array(x)
        size = None if made is None or made.dtype not in BYTES else times * math.prod(made.dims) * BYTES[made.dtype]
        dtype = "?" if made is None else made.dtype
        rounds = x.opcode in ADDING and dtype in NARROW and path[-1] != GATHERED
        yield Exchange(
            phase, x.opcode.removesuffix("-start"), point_of(path), group_size(x), dtype, times, size, rounds
        )


def _array(x: Instruction) -> ArrayType | None:
    """Return the type of its result, where that is one array."""
    return x.type if isinstance(x.type, ArrayType) else None
