"""A donated buffer that the compiled program copies."""

from collections.abc import Iterator, Sequence

from precaudit.checks.lint.rule import Hit, Rule
from precaudit.checks.lint.view import CallView


def check(views: Sequence[CallView]) -> Iterator[Hit]:
    """Hit a call whose donated bytes are not all given to outputs."""
    for view in views:
        if view.compiled is not None and view.compiled.aliased < view.donated:
            lost = view.donated - view.compiled.aliased
            yield Hit(
                view.phase, "", "", f"{lost:,} of {view.donated:,} donated bytes are no output's: they are copied."
            )


RULE = Rule(
    "cache-alias",
    "warning",
    "tpu",
    "A donated cache that is copied",
    "Donated bytes take the place of no output: every call copies them, and what is read may not be what was written.",
    "the same shape and format for what is donated and what is returned",
    "the compiler's memory analysis",
    check,
)
