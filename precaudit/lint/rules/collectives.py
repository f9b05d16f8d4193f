"""In what format a sharded program's chips exchange and add values."""

from collections.abc import Iterator, Sequence

from precaudit.lint.rule import Hit, Rule, Severity
from precaudit.lint.view import View, place_of

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip
NARROW = ("bf16", "f16")


def check(views: Sequence[View]) -> Iterator[Hit]:
    """Hit every collective with the formats it reads."""
    for view in views:
        assert view.module is not None
        for name, i in view.instructions:
            kind = i.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            formats = sorted(view.reads(name, i))
            adds = any(view.module.computations[c].root.opcode == "add" for c in i.called)
            source, point = place_of(view, i)
            says, severity = f"{kind} of {', '.join(formats)}.", _severity(formats, adds)
            if severity == "warning":
                says = f"{kind} adds in {', '.join(formats)}: the sum is rounded with every chip."
            yield Hit(view.phase, source, point, says, severity=severity)


def _severity(formats: Sequence[str], adds: bool) -> Severity:
    return "warning" if adds and set(formats) & set(NARROW) else "note"


RULE = Rule(
    "collectives",
    "note",
    "tpu",
    "Formats between chips",
    "Chips exchange values in this format; an all-reduce or reduce-scatter that adds in bfloat16 or float16 rounds the "
    "sum with every chip.",
    "cast to float32 before psum, or preferred_element_type=float32 on the product whose partial sums are added",
    "the compiled program's text",
    check,
)
