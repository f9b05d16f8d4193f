"""Findings of lint: the first sentence, a table by rule and place, why and what to change, what phases take; SARIF."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precaudit.checks.lint.linting import Linted, count_by_unit, phase_numbers
from precaudit.checks.lint.rule import SEVERITIES, LintRecord, Rule, Severity
from precaudit.checks.lint.rules import every
from precaudit.reports.fitting import Table
from precaudit.reports.report import Headline, Mark, Report, Section
from precaudit.schema.digits import digits

LEVELS = {"error": "error", "unknown": "warning", "warning": "warning", "note": "note"}  # SARIF's own words
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
FEW = 6  # places that a sentence names


def lint_report(found: Linted, name: str, fail_on: Severity) -> Report:
    """Return the report of lint: findings by rule and place, why and what to change, what each phase takes."""
    sections = (
        Section("Findings", tables=(places_table(found.findings),), lines=tuple(_reasons(found.findings))),
        Section(
            "What phases take",
            tables=(
                _phases(found),
                *([_exchanged(found)] if found.exchanged else []),
            ),
        ),
    )
    notes = tuple(f"note: {n}" for n in found.notes)
    return Report(_verdict(found, name, fail_on), sections, notes, command="lint", title=name, records=found.findings)


def _verdict(found: Linted, name: str, fail_on: Severity) -> Headline:
    """Return the first sentence: the worst rule that fires and where, or that none does."""
    code = found.exit_code(fail_on)
    mark: Mark = "✗" if code == 1 else "?" if code == 3 else "✓"
    if not found.findings:
        return Headline("✓", f"{name}: no rule fires{_where(found)}.")
    first = found.findings[0]
    same = [f for f in found.findings if f.rule == first.rule]
    places = list(dict.fromkeys(finding_place(f) for f in same))
    more = f" and {len(places) - FEW} more" if len(places) > FEW else ""
    count = sum(f.count for f in same)
    at = f"{', '.join(places[:FEW])}{more}"
    other = len({f.rule for f in found.findings}) - 1
    rest = f" {other} more {'rules fire' if other > 1 else 'rule fires'}." if other else ""
    title = next((r.title for r in every() if r.id == first.rule), first.rule)
    says = f"{title}, {count} ×{_where(found)}: {at}.{rest}"
    return Headline(mark, says if mark != "✓" else f"nothing as severe as {fail_on}; {first.severity}: {says}")


def _where(found: Linted) -> str:
    on = found.views[0].target.name if found.views and found.views[0].target else ""
    return f" on {on}" if on else ""


def finding_place(f: LintRecord) -> str:
    """Return where a finding is: its point, else its line."""
    return f.point or brief(f.source) or f.phase or "the program"


def brief(source: str) -> str:
    """Return FILE:LINE as short as it can be found from here."""
    file, _, line = source.rpartition(":")
    if not file:
        return source
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if Path(file).is_relative_to(root):
            return f"{Path(file).relative_to(root)}:{line}"
    return source


def places_table(findings: Sequence[LintRecord]) -> Table:
    """Return a row a rule and place, its phases in a column."""
    rows: dict[tuple[str, ...], dict[str, int]] = {}
    for f in findings:
        at = " ".join(filter(None, (f.point, "" if f.layers is None else f"0:{f.layers}")))
        phases = rows.setdefault((f.severity, f.rule, at, brief(f.source)), {})
        phases[f.phase or "all"] = phases.get(f.phase or "all", 0) + f.count
    cells = tuple((*key, _phases_text(phases)) for key, phases in rows.items())
    columns = ("severity", "rule", "point, layers", "line", "phase")
    return Table("", columns, cells, columns, 2)


def _reasons(findings: Sequence[LintRecord]) -> Iterator[str]:
    """Yield, for every rule that fires, why, what to change and what that rests on."""
    seen: set[tuple[str, str]] = set()
    for f in findings:
        if (f.rule, f.says) not in seen:
            seen.add((f.rule, f.says))
            yield f"- {f.rule}: {f.says} To change: {f.fix}. Rests on: {f.rests}."


def _phases_text(phases: Mapping[str, int]) -> str:
    """Return the phases with how often; one number for both where it is the same."""
    if len(phases) > 1 and {1} != set(phases.values()) == {max(phases.values())}:
        return f"{max(phases.values())} × each"
    return ", ".join(p if n == 1 else f"{n} × {p}" for p, n in phases.items())


def _phases(found: Linted) -> Table:
    """Return what each phase takes on the target: seconds to compile, MB on the chip, flops, products by unit."""
    rows: list[tuple[str, ...]] = []
    for v in found.views:
        n = phase_numbers(v)
        if v.compiled is None:
            rows.append((v.phase, f"{n['products']:,}"))
            continue
        made = count_by_unit(v)
        rows.append(
            (
                v.phase,
                f"{n['seconds']:.1f}",
                *(f"{n[key] / 1e6:,.1f}" for key in MEMORY),
                digits(n["flops"], 2),
                *(f"{made[key]:,}" for key in ("passes1", "passes3", "passes6", "vector")),
            )
        )
    if found.views and found.views[0].compiled is None:
        return Table("", ("phase", "products"), tuple(rows), ("phase",))
    columns = (
        "phase",
        "compile s",
        "args MB",
        "out MB",
        "temp MB",
        "flops",
        "1 pass",
        "3 passes",
        "6 passes",
        "vector unit",
    )
    return Table("What a phase takes; products by unit:", columns, tuple(rows), ("phase",))


def _exchanged(found: Linted) -> Table:
    """Return a row for each collective of the partitioned program; none without a mesh."""
    rows = tuple(
        (
            x.phase,
            x.kind,
            x.point,
            str(x.chips),
            x.format,
            f"{x.times:,}",
            "?" if x.bytes is None else f"{x.bytes:,}",
            "the sum is rounded with every chip" if x.rounds else "",
        )
        for x in found.exchanged
    )
    columns = ("phase", "collective", "point", "chips", "format", "times", "bytes", "adds")
    words = ("phase", "collective", "point", "format", "adds")
    return Table("What chips exchange; bytes on one chip, of all layers in a step:", columns, rows, words)


MEMORY = ("arguments", "outputs", "temporaries")


def rule_lines(listed: Sequence[Rule]) -> Iterator[str]:
    """Yield what every rule says, needs and rests on, for ``lint --list``."""
    for r in listed:
        yield f"{r.id} ({r.severity}, reads {NEEDS[r.needs]}): {r.title}"
        yield f"    {r.why}"
        yield f"    To change: {r.fix}."
        yield f"    Based on: {r.rests}."


NEEDS = {"jaxpr": "the program", "tpu": "what a TPU's compiler writes", "run": "a recorded run"}


def sarif(found: Linted, rules: Sequence[Rule], version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log (OASIS) of one run; a finding without a line has none."""
    described = [
        {
            "id": r.id,
            "shortDescription": {"text": r.title},
            "fullDescription": {"text": r.why},
            "help": {"text": f"{r.fix}. Rests on: {r.rests}."},
            "defaultConfiguration": {"level": LEVELS[r.severity]},
        }
        for r in rules
    ]
    ids = [r.id for r in rules]
    results = [
        {
            "ruleId": f.rule,
            "ruleIndex": ids.index(f.rule),
            "level": LEVELS[f.severity],
            "message": {"text": f"{f.says} To change: {f.fix}."},
            "locations": _locations(f),
            "properties": {
                "severity": f.severity,
                "phase": f.phase,
                "point": f.point,
                "layers": f.layers,
                "count": f.count,
                "target": f.target,
            },
        }
        for f in sorted(found.findings, key=lambda f: SEVERITIES.index(f.severity))
    ]
    driver = {"name": "precaudit", "version": version, "rules": described}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _locations(f: LintRecord) -> list[dict[str, Any]]:
    file, _, line = brief(f.source).rpartition(":")
    if not file or not line.isdigit():
        return []
    uri = Path(file).as_uri() if Path(file).is_absolute() else Path(file).as_posix()
    return [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": int(line)}}}]
