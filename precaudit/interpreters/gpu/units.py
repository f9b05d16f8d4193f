"""How a GPU makes each product of a compiled program: on tensor cores, in which parts, or as a sum of terms."""

import re
from collections.abc import Iterator

from precaudit.interpreters.jaxpr.multiplying import ASKED, FLOAT32, ROUNDED_TERMS, TF32
from precaudit.interpreters.jaxpr.products import PRODUCTS, label_in
from precaudit.interpreters.tpu.hlo import ArrayType, Computation, Instruction, Module
from precaudit.schema.records.devices import Way

LIBRARY = re.compile(r"__cublas\$(?:lt\$matmul.*|gemm)|__cudnn\$conv.*")  # NVIDIA's matrix products and convolutions
_PRECISION = re.compile(r'"operand_precision":\[([^\]]*)\]')
_ALGORITHM = re.compile(r'"algorithm":"ALG_(\w+)"')
X9 = "dot_bf16_bf16_f32_x9"
ALGORITHMS = {f"dot_{name.lower()}": way for name, way in ASKED.items()} | {X9: TF32}


def ways_by_label(module: Module) -> dict[str, tuple[Way, ...]]:
    """Return {label of a program's product: the ways in which it is made}, "" for those without a label.

    Tensor cores make TF32 of float32 operands below the highest precision, a library's too; a ``dot`` in a loop's
    fusion is made element by element, in float32; a product without one is a sum of terms, in the format of its
    multiplication. X9 of bfloat16 is TF32 (seen on an H100, JAX 0.11.2: ``traces/gpu/precisions.txt``).
    """
    found: dict[str, set[Way]] = {}
    for label, way in _labels_and_ways(module):
        found.setdefault(label, set()).add(way)
    return {label: tuple(sorted(ways)) for label, ways in sorted(found.items())}


def _labels_and_ways(module: Module) -> Iterator[tuple[str, Way]]:
    loops = {
        name for _, x in module.walk() if x.attributes.get("kind") in ("kLoop", "kInput") for name in x.computations
    }
    for computation, x in module.walk():
        label = label_in(x.op_name)
        if x.opcode == "dot" and computation.name in loops:
            yield label, FLOAT32
        elif x.opcode in ("dot", "convolution"):
            asked = (x.attributes.get(key, "") for key in ("operand_precision", "algorithm"))
            yield label, _cores(computation, x, *asked)
        elif x.opcode == "custom-call" and LIBRARY.fullmatch(x.attributes.get("custom_call_target", "")):
            config = x.attributes.get("backend_config", "")
            precision, algorithm = _PRECISION.search(config), _ALGORITHM.search(config)
            named = algorithm.group(1).lower() if algorithm else ""
            way = _cores(computation, x, precision.group(1) if precision else "", named)
            yield label, way
            if way == TF32 and "$conv" in x.attributes["custom_call_target"]:
                yield label, FLOAT32  # some of cuDNN's algorithms are not for tensor cores
        elif x.opcode == "multiply" and x.op_name.rpartition("/")[2] in PRODUCTS:
            yield label, ROUNDED_TERMS if _dtype(x) in ("bf16", "f16") else FLOAT32


def _cores(computation: Computation, x: Instruction, precision: str, algorithm: str) -> Way:
    """Return how tensor cores make a product, by its precision and algorithm as the text writes them."""
    if algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    wide = any(_dtype(computation.instructions[name]) == "f32" for name in x.operands[:2])
    return TF32 if wide and "highest" not in precision.lower() else FLOAT32


def _dtype(x: Instruction) -> str:
    return x.type.dtype if isinstance(x.type, ArrayType) else ""
