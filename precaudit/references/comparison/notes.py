"""What a reader of a comparison should know beside the records."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from precaudit.recording.runs.positions import unpack_positions
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.comparison.prefill_decode import NEAR, independent_prompts
from precaudit.references.textbook.single_rows import single_rows
from precaudit.references.textbook.whole import Whole
from precaudit.schema import predictions
from precaudit.schema.digits import digits
from precaudit.schema.graphs.decoder import CACHES, POINTS
from precaudit.schema.limits.checks import disturbance, logit_noise
from precaudit.schema.places import Place, point_text
from precaudit.schema.policies import besides
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import Selected
from precaudit.schema.records.errors import ErrorRecord, LocalError, StateError


def routing(recorded: Recorded, selected: Selected, whole: Whole) -> Iterator[str]:
    """Yield how many tokens use other experts than FP64, and how many of those FP64 held for a tie.

    Near: FP64's router logits of an expert that came in and one that fell out differ by at most NEAR σ, σ the rms error
    of the layer's router logits under the emulated policy, or of this row's where that is larger.
    """
    route = next(p for p in POINTS.values() if p.kind == "route")
    chosen_at, router = route.name, route.inputs[0]
    rows = flips = near = 0
    for prompt, phase, layer in product(selected.prompts, selected.phases, selected.layers):
        exact, logits = (whole.values(prompt, phase, layer, p) for p in (chosen_at, router))
        energy = whole.noise.get((whole.alike[prompt, phase], layer, router))
        for step in recorded.steps(phase):
            key = Place(prompt, phase, step, layer, chosen_at)
            if key not in recorded.index or exact is None or logits is None or energy is None:
                continue
            rows_rms = np.sqrt(np.asarray(energy).sum(axis=-1) / logits.shape[1])
            sigma = float(np.sqrt(np.mean(rows_rms**2)))
            chosen = recorded.run.tensor(recorded.index[key]) != 0
            for at, mine in zip(unpack_positions(recorded.index[key]), chosen, strict=True):
                theirs, rows = exact[at] != 0, rows + 1
                came, fell = logits[at][mine & ~theirs], logits[at][theirs & ~mine]
                if len(came) or len(fell):
                    flips += 1
                    apart = np.abs(came[:, None] - fell[None, :])
                    near += bool(len(came) == len(fell) and apart.max() <= NEAR * max(sigma, float(rows_rms[at])))
    if rows:
        ties = f", {near} of them near ties" if flips else ""
        yield f"routing: {flips} of {rows} tokens use other experts than FP64{ties}"


def prices(errors: list[ErrorRecord]) -> Iterator[str]:
    """Yield what rounding costs where an operation amplifies it: the price of the format, not a fault."""
    worst: dict[tuple[str, str], LocalError] = {}
    for e in errors:
        if isinstance(e, LocalError) and e.costly is not None:
            key = (e.point, e.costly)
            worst[key] = max(worst.get(key, e), e, key=lambda x: value(x.rel_l2))
    for (_, place), e in worst.items():
        yield (
            f"rounding at {place} costs up to {100 * value(e.rel_l2):.0f} % of {point_text(e)} here "
            f"(prompt {e.prompt}, {e.phase}): the operation amplifies it; that is the format's price"
        )


def notes_on(
    recorded: Recorded, selected: Selected, whole: Whole | None, errors: list[ErrorRecord], absent: str
) -> Iterator[str]:
    """Yield the notes of a comparison; ``absent`` says why weights are not at hand, or nothing."""
    if absent:
        yield f"no weights: {absent}; only what needs none was computed (--model PATH gives them)"
    yield from recorded.run.record.warnings
    if other := besides(recorded.run.record.policy):
        yield (
            f"{other} is another formula than the model's: local errors, and prefill against decode, are judged with "
            "it; forward errors, KL and top-1 are from FP64 of the model, which reads every key, and pass where the "
            "mask explains them"
        )
    noise = logit_noise(errors)
    for n in recorded.run.record.neutrality:
        if not n.bitwise:
            times = disturbance(n, noise)
            told = f", {digits(times, 2)} × the noise of their rounding" if math.isfinite(times) else ""
            yield f"recording changed the {n.phase} logits by up to {digits(n.max_diff)}{told}"
    for a, b in independent_prompts(recorded, selected.prompts, whole):
        yield f"decode does not depend on the prompt: {a} and {b} have the same decode logits, different tokens"
    differing = [e for e in errors if isinstance(e, StateError) and e.mismatched and e.point in CACHES.values()]
    if differing:
        first = differing[0]
        yield (
            f"state: {len(differing)} caches differ from the rows that were written; first layer {first.layer} "
            f"{first.point}, prompt {first.prompt}, step {first.step}, {first.mismatched} elements"
        )
    yield from predictions.prediction_notes((n.phase, n.predicted) for n in recorded.run.record.neutrality)
    if whole is not None and any(
        POINTS[p].kind == "route" for p in (*recorded.requested.points, *recorded.requested.support)
    ):
        yield from routing(recorded, selected, whole)
    yield from prices(errors)
    yield from single_rows(errors)
    bad = [e for e in errors if e.nonfinite]
    if bad:
        at = bad[0].point if bad[0].layer is None else f"layer {bad[0].layer} {bad[0].point}"
        yield f"{len(bad)} records hold NaN or infinities; first: {at}, {bad[0].kind}"
