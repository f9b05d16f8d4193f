"""The diagnosis of a program's run in the terminal: the verdict first, then what matters and what would help."""

from collections.abc import Iterator, Sequence

from precaudit.diagnosis.evidence.raised_lines import MOST, WORTH, is_worth_a_word
from precaudit.diagnosis.evidence.records import LineRemedy
from precaudit.diagnosis.programs import Diagnosed
from precaudit.reports.diagnosis import shares_text
from precaudit.reports.program import growth_sentences
from precaudit.reports.report import Headline, Mark, Report, Section
from precaudit.schema.digits import digits, short
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord

FAR = 4.0  # times the size as it ran, from which what lines gain in the emulation is not what they gain


def program_diagnosis_report(
    found: Diagnosed, errors: Sequence[ErrorRecord], verbose: bool = False, among: str = ""
) -> Report:
    """Return the report of a program's diagnosis: findings, what is unknown or explained; then effects and growth.

    ``among``: what of the run was looked at, in words, where that is not all.
    """
    first, *lines = _lines(found, errors, verbose, among)
    mark: Mark = "✗" if found.findings else "✓" if first.startswith("✓") else "?"
    return Report(Headline(mark, first[2:]), (Section(lines=tuple(lines)),), records=found.findings)


def _lines(found: Diagnosed, errors: Sequence[ErrorRecord], verbose: bool, among: str) -> list[str]:
    lines = []
    for f in found.findings:
        off = 0.0 if f.rel_l2 is None else value(f.rel_l2)
        records = f"{f.records} record{'' if f.records == 1 else 's'}"
        size = f"; error {digits(off)} at {f.point}, {records}" if off else ""
        lines.append(f"✗ {f.kind}: {f.says}{size}")
    lines += [f"? unknown: {x}" for x in found.unknown]
    if not found.findings and not found.unknown and not found.explained:
        lines.append("? nothing was judged.")
    elif not found.findings and not found.unknown:
        lines.append(f"✓ rounding explains all {found.explained:,} errors that were judged{among}.")
    lines += [f"Note: {x}; within rounding" for x in found.notes]
    lines += [f"Growth: {x}." for x in growth_sentences(errors)[: None if verbose else 1]]
    lines += [f"Output: {shares_text(s)}" for s in found.effects.shares[: None if verbose else 1]]
    lines += list(_remedies(found.effects.lines, verbose))
    if found.effects.unknown:
        lines.append(f"To change: unknown: {found.effects.unknown}")
    return lines


def _remedies(lines: Sequence[LineRemedy], verbose: bool) -> Iterator[str]:
    """Yield what lines gain in float32: those worth a word, or all of them."""
    if not lines:
        return
    first, several = lines[0], sum(len(r.sources) == 1 for r in lines)
    what = "KL from FP64" if first.measure == "kl" else f"distance of {first.output} from FP64"
    after = f" after {first.calls} calls" if first.calls > 1 else ""
    wide = " and products at the highest precision" if any(r.products for r in lines) else ""
    ran = "" if first.real is None else f" ({short(first.real)} as it ran)"
    yield (
        f"To change, emulated: {what}{after} is {short(first.size[0])}{ran}, "
        f"and {short(first.all)} with {'the only line' if several == 1 else f'all {several} lines'} that "
        f"{'rounds' if several == 1 else 'round'} to less in float32{wide}"
    )
    if first.real is not None and value(first.size[0]) > FAR * value(first.real):
        yield "  the emulation's error is larger than the program's: the gains are the emulation's, and smaller here"
    shown = [r for r in lines if verbose or is_worth_a_word(r)]
    single = [r for r in shown if len(r.sources) == 1]
    for r in [*single[: None if verbose else MOST], *(r for r in shown if len(r.sources) > 1)]:
        yield f"  {remedy(r)}"
    if not shown:
        yield f"  no line alone removes {100 * WORTH:.0f} % of it"


def remedy(r: LineRemedy) -> str:
    """Return what a line, or several together, gain in float32 and cost."""
    which = f"{r.sources[0]} `{r.text[0]}`" if len(r.sources) == 1 else " and ".join(r.sources)
    flips = f", top-1 flips {r.flips[0]} to {r.flips[1]} of {r.rows} sampled rows" if any(r.flips) else ""
    gain, error = 100 * value(r.gain), 100 * value(r.error)
    how = f'; precision="highest" at {" and ".join(r.products)}' if r.products else ""
    return f"{-gain:+.0f} % (± {error:.0f}){flips}, {r.bytes:,} bytes more: {which}{how}"
