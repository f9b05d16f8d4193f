"""What compare writes beside errors: the lines of prefill_decode.jsonl, and compare.json."""

import msgspec

from precaudit.schema.records.base import Index, Number, Record


class PrefillDecodeRecord(Record, frozen=True):
    """A line of prefill_decode.jsonl: the same position seen by prefill (or rescore) and by decode.

    ``f64_against_top1``: FP64's top-1 of the first view where that has a formula of its own, since RoPE turned its rows
    by another length (precaudit/schema/lengths.py); ``f64_top1`` is decode's. Of a program ``against`` and ``view`` are
    the entry points, ``view`` the one that sees a row at a time; ``f64_apart``: ‖a − b‖ / ‖b‖ of their FP64 logits
    where these are apart, so that they are not one function. ``kl_noise``: what rounding of both views makes of ``kl``.
    """

    prompt: str
    against: str
    step: Index
    position: Index
    prefill_top1: Index
    decode_top1: Index
    f64_top1: Index | None
    prefill_gap: Number
    decode_gap: Number
    f64_gap: Number | None
    match: bool
    f64_match: bool | None
    near_tie: bool | None
    kl: Number | None
    max_diff: Number | None
    prefill_last_top1: Index | None = None
    decode0_top1: Index | None = None
    f64_against_top1: Index | None = None
    f64_apart: Number | None = None
    kl_noise: Number | None = None
    view: str = "decode"

    @property
    def agree(self) -> bool | None:
        """Whether both views have the top-1 of FP64, each of its own where formulas differ; None where unknown."""
        if self.f64_match is None or self.f64_against_top1 is None:
            return self.f64_match and self.match
        return self.f64_match and self.prefill_top1 == self.f64_against_top1

    @property
    def kl_ratio(self) -> float | None:
        """KL over what rounding makes of it; None where that is not known, or each view has a formula of its own."""
        if self.kl is None or self.kl_noise is None or self.f64_against_top1 is not None:
            return None
        most, noise = float(self.kl), float(self.kl_noise)
        return most / noise if noise else float("inf") if most else 0.0

    @property
    def finite(self) -> bool:
        """Whether no number of it is NaN, as those of logits that are NaN are."""
        return "nan" not in (self.prefill_gap, self.decode_gap, self.f64_gap, self.kl, self.max_diff)


class Selected(Record, frozen=True, omit_defaults=False):
    """A selection that was computed, resolved; ``formula``: with the program's FP64 shadow, at all its places."""

    prompts: tuple[str, ...]
    phases: tuple[str, ...]
    points: tuple[str, ...]
    layers: tuple[Index, ...]
    accum: tuple[str, ...]
    weights: bool
    formula: bool = False


class CompareRecord(Record, frozen=True, omit_defaults=False):
    """compare.json: what errors.jsonl was computed from, so that a later selection can reuse its rows.

    ``run``: hash of run.json; ``sigma``: rms logit error of the emulated policy.
    """

    schema: int
    precaudit: str
    run: str
    selections: tuple[Selected, ...] = msgspec.field(name="looks")
    sigma: Number | None
    notes: tuple[str, ...]
    hashes: dict[str, str]
