"""Float32 values that the compiler keeps in memory as bfloat16."""

from collections.abc import Iterator, Sequence

from precaudit.lint.rule import Hit, Rule
from precaudit.lint.view import View, array, place_of

STORED = ("fusion", "copy", "convolution", "dot", "dynamic-update-slice", "concatenate", "transpose")


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit values outside of fusions that are bfloat16 where no equation of their line makes a bfloat16 value."""
    for view in views:
        assert view.module is not None
        inside = {name for _, i in view.instructions if i.opcode == "fusion" for name in i.called}
        makes: dict[str, set[str]] = {}
        for e in view.equations:
            makes.setdefault(e.source, set()).update(str(getattr(v.aval, "dtype", "")) for v in e.made.outvars)
        for computation, i in view.instructions:
            shape = array(i)
            if computation in inside or i.opcode not in STORED or shape is None or shape.dtype != "bf16":
                continue
            source, point = place_of(view, i)
            formats = makes.get(source, set())
            if "float32" in formats and "bfloat16" not in formats:
                yield Hit(view.phase, source, point)


RULE = Rule(
    "hidden-bf16",
    "warning",
    "tpu",
    "Float32 values stored as bfloat16",
    "The program says float32; between two fusions the compiler stores the value as bfloat16, because a one-pass "
    "product reads it. In a gradient these are saved activations.",
    "highest or high precision of the products that read it: --set matmul=highest",
    "the compiled program's text and its machine-level dump",
    check,
)
