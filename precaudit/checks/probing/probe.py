"""The verb ``probe``: products of attention scores, in every format and way, against FP64 on the device that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precaudit.checks.probing.limits import judge_sentences, parse_sentences
from precaudit.checks.probing.measuring import measure_shape, point
from precaudit.checks.probing.narrow_sums import narrow_sums
from precaudit.checks.probing.shapes import DEFAULT, FORMATS, ScoreShape, parse_formats, parse_shape
from precaudit.checks.probing.ways import product_ways
from precaudit.errors import UserError, enough_memory
from precaudit.interpreters.tpu.target import EXTRA, Target, libtpu_version, parse_target, untested_version
from precaudit.judging.judgement import Judgement
from precaudit.progress import Advance, silent
from precaudit.recording.tracing.devices import choose_device, platform_of
from precaudit.schema.brief import Brief
from precaudit.schema.frames import REAL, Column, flat, frame, list_column
from precaudit.schema.records.base import value
from precaudit.schema.records.probe import ProbeRecord


@dataclass(frozen=True, repr=False)
class Probed(Brief):
    """What was made of every product. ``judgement``: of ``fail_on``, None where nothing was to be judged."""

    device: str
    platform: str
    target: str | None
    records: tuple[ProbeRecord, ...]
    judgement: Judgement | None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 every sentence of ``fail_on`` holds, or there is none; 1 one does not; 3 one cannot be judged."""
        return 0 if self.judgement is None else self.judgement.exit_code

    def frame(self) -> Any:
        """Return the records as a pandas DataFrame, always with the same columns; of seconds and time the medians."""
        return frame(self.records, (*flat(ProbeRecord), list_column("made"), *map(_median, ("seconds", "time"))))


def _median(name: str) -> Column:
    return Column(name, REAL, lambda r: None if getattr(r, name) is None else value(getattr(r, name)[1]))


def probe(
    shapes: Sequence[str | ScoreShape] = (),
    formats: str | Sequence[str] = FORMATS,
    *,
    tpu: str | None = None,
    device: str = "auto",
    fail_on: Sequence[str] = (),
    timed: bool = True,
    advance: Advance = silent,
) -> Probed:
    """Return what the device makes of queries [B, H, Q, D] times keys [B, H, S, D], of every format and way.

    ``shapes``: as ``1,1,1,128x512`` (B,H,Q,DxS); default: two of decode, one of prefill. ``formats``: of the operands.
    ``tpu``: also what this TPU's compiler would make, such as ``v5e``. ``fail_on``: sentences such as ``default worse
    than 1e-3`` (the relative L2 error) or ``BF16_* replaced``. Errors are against FP64 of the operands as they are
    (standard normal; int8 uniform; one seed). Raises UserError for what is none of these, or for ``tpu`` without
    libtpu.
    """
    given = [parse_shape(s) if isinstance(s, str) else s for s in shapes] or list(DEFAULT)
    forms = parse_formats(formats if isinstance(formats, str) else ",".join(formats))
    target = _target(tpu)
    one = choose_device(device)
    limits = parse_sentences([fail_on] if isinstance(fail_on, str) else fail_on, _points(forms, target))
    records: list[ProbeRecord] = []
    each = list(dict.fromkeys(given))
    with enough_memory():
        for i, shape in enumerate(each):

            def within(j: int, n: int, what: str, i: int = i) -> None:
                advance(i * n + j, len(each) * n, what)

            records += measure_shape(shape, forms, one, target, timed, within)
    notes = [note for t in [target] if t is not None and (note := untested_version(libtpu_version() or ""))]
    notes += [x.text(platform_of(one)) for x in narrow_sums(one)]
    return Probed(
        str(one.device_kind),
        platform_of(one),
        target.name if target else None,
        tuple(records),
        judge_sentences("probe", records, limits) if limits else None,
        tuple(notes),
    )


def _target(tpu: str | None) -> Target | None:
    if tpu is None:
        return None
    target = parse_target(tpu)
    if libtpu_version() is None:
        raise UserError(f"compiling for a TPU needs libtpu: {EXTRA}")
    return target


def _points(forms: Sequence[str], target: Target | None) -> dict[str, list[str]]:
    names = {form: [w.name for w in product_ways(form)] for form in forms}
    targets = (None,) if target is None else (None, target)
    return {form: [point(n, t) for t in targets for n in its] for form, its in names.items()}
