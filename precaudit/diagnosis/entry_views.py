"""Entry points of a program that give other logits at one position: another function, and where it begins (JAX)."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.named import UNNAMED
from precaudit.diagnosis.sameness.observed import observe
from precaudit.diagnosis.sameness.parting import first_parting
from precaudit.diagnosis.sameness.records import Parting, step_text
from precaudit.interpreters.jaxpr.shadow import CannotLift
from precaudit.judging.rules import judge_pair, parts_beyond_rounding
from precaudit.recording.programs.program import Program
from precaudit.recording.runs.programs import Opened
from precaudit.references.traced.forward import NotChained
from precaudit.schema.digits import digits
from precaudit.schema.places import spans
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.runs import call_of


def view_findings(
    opened: Opened, pairs: Sequence[PrefillDecodeRecord], before: Sequence[Finding], load: Callable[[], Program]
) -> Iterator[Finding]:
    """Yield one finding for every two entry points whose views of positions fail.

    What is found in one of them before (``before``) accounts for it. ``load`` gives the program, which is run in FP64
    to see where another function begins.
    """
    failing: dict[tuple[str, str], list[PrefillDecodeRecord]] = {}
    for p in pairs:
        if judge_pair(p).status == "fail":
            failing.setdefault((p.against, p.view), []).append(p)
    for (against, view), its in failing.items():
        if any({call_of(against), call_of(view)} & {*f.phases} for f in before):
            continue
        other = [p for p in its if p.f64_apart is not None]
        at = f"position{'s' if len(its) > 1 else ''} {spans(sorted({p.position for p in its}))}"
        if other:
            worst = max(value(p.f64_apart or 0.0) for p in other)
            parting = where_apart(opened, load(), other[0])
            says = (
                f"{view} is not the function that {against} is: FP64 logits are up to {digits(worst, 2)} apart at {at}"
            )
            if parting is not None and parting.point:
                says += f", first {parting.point}{step_text(parting.step)} ({parting.source})"
            yield _finding("semantics", f"{view} is not {against}", says, its, parting)
        else:
            far = [p.kl_ratio or 0.0 for p in its if parts_beyond_rounding(p)]
            says = (
                f"the KL of {view} and {against} is {digits(max(far))} × that of rounding"
                if far
                else f"top-1 of {view} or {against} is neither FP64's nor a near tie"
            )
            says += f" at {at}; no recorded operation fails"
            yield _finding("unknown", UNNAMED, says, its, None)


def where_apart(opened: Opened, program: Program, pair: PrefillDecodeRecord) -> Parting | None:
    """Return where FP64 of the entry point that sees a row at a time first leaves that of the other, in a call.

    None where FP64 does not come there.
    """
    try:
        seen = observe(opened, program, pair.prompt.partition(", row ")[0])
    except (CannotLift, NotImplementedError, NotChained):
        return None
    return first_parting(pair.view, seen[pair.view], seen[pair.against], 1.0, [pair.step])


def _finding(kind: str, cause: str, says: str, its: Sequence[PrefillDecodeRecord], at: Parting | None) -> Finding:
    first = its[0]
    return msgspec.convert(
        {
            "kind": kind,
            "cause": cause,
            "says": says,
            "layer": None if at is None or not at.step else at.step[-1],
            "point": "outputs.logits" if at is None or not at.point else at.point,
            "layers": (),
            "phases": (call_of(first.view),),
            "prompts": tuple(dict.fromkeys(p.prompt for p in its)),
            "records": len(its),
            "rel_l2": first.f64_apart,
            "explained": None,
            "equal": None,
            "second": None,
            "worst": None,
        },
        Finding,
    )
