"""What ``same`` says: the answer, how far outputs are apart, and where two programs part or which line rounds most."""

from collections.abc import Iterator, Sequence

from precaudit.diagnosis.sameness.records import Parting, Sameness, TensorHeld, step_text
from precaudit.reports.fitting import Table
from precaudit.reports.mesh import split_text
from precaudit.reports.report import Headline, Mark, Report, Section
from precaudit.schema.digits import short
from precaudit.schema.places import spans

MARKS: dict[str, Mark] = {"same": "✓", "other": "✗", "unknown": "?"}


def sameness_report(cases: Sequence[Sameness]) -> Report:
    """Return the report of ``same``: the worst case's answer first."""
    worst = worst_case(cases)
    of = f" ({worst.case})" if len(cases) > 1 else ""
    off = [f"{program} as it ran" for program in worst.programs]
    columns = ("case", "output", "rows", "apart in FP64", *off, "top-1 is FP64's")
    title = "relative distances: of rows from each other in FP64, of outputs from FP64"
    table = Table(title, columns, tuple(_rows(cases)), ("case", "output"), keys=2)
    outputs = Section("Outputs", tables=(table,))
    lines = [line for c in cases for line in _lines(c, len(cases) > 1, c is not worst)]
    return Report(
        Headline(MARKS[worst.answer], f"{' and '.join(worst.programs)}{of} {worst.says}."),
        (Section("Where, and what", lines=tuple(lines)), outputs if table.rows else _held(cases)),
        command="same",
        title=" and ".join(worst.programs),
        subtitle=f"{len(cases)} cases",
        words=("point", "FP64"),
        records=tuple(cases),
    )


def _held(cases: Sequence[Sameness]) -> Section:
    """Return which value of the program every tensor of a dump is, what is none first."""
    each = sorted(((c.case, t) for c in cases for t in c.tensors), key=lambda x: x[1].equal)
    rows = tuple(
        (case, t.tensor, t.dtype, _held_text(t), "" if t.off is None else short(t.off), t.axes, t.source)
        for case, t in each
    )
    title = "tensors of the dump, and the program's values in FP64 that they match"
    columns = ("case", "tensor", "format", "is", "error", "axes", "at")
    words = tuple(c for c in columns if c != "error")
    return Section("Tensors", tables=(Table(title, columns, rows, words, keys=2),))


def _held_text(t: TensorHeld) -> str:
    if not t.finite:
        return "not finite"
    return t.value if t.equal else "no value" + f"; nearest: {t.value}" * bool(t.value)


def worst_case(cases: Sequence[Sameness]) -> Sameness:
    """Return the first case that is of two formulas, else one that is not known, else the first."""
    return min(cases, key=lambda c: ("other", "unknown", "same").index(c.answer))


def _rows(cases: Sequence[Sameness]) -> Iterator[tuple[str, ...]]:
    for c in cases:
        for r in c.outputs:
            top1 = "" if r.top1 is None else " and ".join(f"{n} of {r.rows}" for n in r.top1)
            yield c.case, r.output, str(r.rows), short(r.apart), short(r.rounding[0]), short(r.rounding[1]), top1


def _lines(c: Sameness, several: bool, whole: bool) -> Iterator[str]:
    before = f"{c.case}: " if several else ""
    if whole:
        yield f"{before}they {c.says}."
    for m in c.causes:
        where = f" at {m.source}" if m.source else ""
        yield f"{before}{m.program}: {m.name}{where}: {m.says}."
    if c.causes:
        both = "these mistakes" if len(c.causes) > 1 else "this mistake"
        yield f"{before}With {both} undone, all outputs agree in FP64."
    for p in c.partings:
        yield before + parting_text(p)
    for program, line in zip(c.programs, c.lines, strict=False):
        if line:
            yield f"{before}{program} rounds most at {line}."
    for x in c.sums:
        how = split_text(x.split, x.format)
        yield f"{before}{x.program} adds a product up over devices at {x.source}: it is {how}."


def parting_text(p: Parting) -> str:
    """Return where a program leaves the other, in a sentence or two."""
    last = f" The last that the other has before it: {p.before}." if p.before else ""
    if not p.point:
        return f"{p.program}: every point has the other's values, its outputs do not.{last}"
    made = f", computed from {', '.join(p.made_of)}, which the other has" if p.made_of else ""
    where = f"{p.point}{p.at}{step_text(p.step)} in call {p.call} ({p.source}){made}"
    alone = f"layers {spans(p.layers)}" if len(p.layers) > 1 else f"layer {spans(p.layers)} alone"
    each = f" On the other's values, {p.point} differs in {alone}." if p.layers else ""
    return f"{p.program} differs first at {where}.{each}{last}"
