"""A preset of products that the TPU's compiler refuses."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView
from precaudit.interpreters.tpu.target import REFUSED


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit products whose equation names a preset of the table."""
    for view in views:
        for e in view.equations:
            preset = str(e.made.params.get("precision", "")).rpartition(".")[2] if e.primitive == "dot_general" else ""
            if preset in REFUSED:
                says = f"{preset} does not compile for a TPU."
                yield Hit(view.phase, e.source, e.point, says, severity="error" if view.platform == "tpu" else "note")


RULE = Rule(
    "refused-preset",
    "error",
    "jaxpr",
    "A preset that no TPU takes",
    "The product's preset does not compile for a TPU.",
    "default, high or highest; or BF16_BF16_F32, _X3, _X6",
    "compiles for v4, v5e, v5p, v6e and tpu7x that were tried (tests/interpreters/tpu/test_targets.py)",
    check,
)
