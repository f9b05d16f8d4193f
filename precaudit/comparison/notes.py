"""What a reader of a comparison should know beside the records."""

from collections.abc import Iterator

from precaudit.comparison.forward import Truth
from precaudit.comparison.prefill_decode import independent_prompts
from precaudit.comparison.recorded import Recorded
from precaudit.records import ErrorRecord, Look, value


def notes_on(
    recorded: Recorded, look: Look, truth: Truth | None, errors: list[ErrorRecord], absent: str
) -> Iterator[str]:
    """Yield the notes of a comparison; ``absent`` says why weights are not at hand, or nothing."""
    if absent:
        yield f"no weights: {absent}; only what needs none was computed (--model PATH gives them)"
    yield from recorded.run.record.warnings
    for n in recorded.run.record.neutrality:
        if not n.bitwise:
            size = value(n.max_diff)
            yield f"capturing changed the {n.phase} logits by up to {size:.3g}: the audit disturbs the program"
    for a, b in independent_prompts(recorded, look.prompts, truth):
        yield f"decode does not depend on the prompt: {a} and {b} have the same decode logits, different tokens"
    differing = [e for e in errors if e.kind == "state" and e.mismatched]
    if differing:
        first = differing[0]
        yield (
            f"state: {len(differing)} caches differ from the rows that were written; first layer {first.layer} "
            f"{first.point}, prompt {first.prompt}, step {first.step}, {first.mismatched} elements"
        )
    bad = [e for e in errors if e.nonfinite]
    if bad:
        yield f"{len(bad)} records hold NaN or infinities; first: layer {bad[0].layer} {bad[0].point}, {bad[0].kind}"
