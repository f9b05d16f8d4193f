"""A custom call: what it computes cannot be read."""

import re
from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView, formats_of, instruction_place

# They move values or reserve room for them.
HARMLESS = frozenset(
    ("AssumeGatherIndicesInBound", "AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape")
)
WHOLE = re.compile(r"[su]\d+$|pred$")


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit custom calls that read or make floats and are not known to leave values as they are."""
    for view in views:
        for computation, i in view.instructions:
            name = i.attributes.get("custom_call_target", "")
            if i.opcode != "custom-call" or name in HARMLESS:
                continue
            if {x for x in (*formats_of(i.type), *view.reads(computation, i)) if not WHOLE.match(x)}:
                source, point = instruction_place(view, i)
                yield Hit(
                    view.phase, source, point, f"The custom call {name} hides its arithmetic: nothing is known of it."
                )


RULE = Rule(
    "custom-call",
    "unknown",
    "tpu",
    "An operation the compiler hides",
    "A custom call hides its arithmetic: nothing is known of its precision.",
    "trace the program and compare it: recorded values are judged whatever made them",
    "the compiled program's text",
    check,
)
