"""The judgement for a pull request: Markdown, worst first, and GitHub annotations."""

from precaudit.judging.gate import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.records import value
from precaudit.reports.escaping import code, workflow
from precaudit.reports.escaping import markdown as escaped
from precaudit.reports.judgement import SHOWN, drift_lines, groups, message, place_text_of, rest, tally

TITLES = {0: "passes", 1: "fails", 3: "cannot be judged"}


def markdown(j: Judgement) -> str:
    """Return a Markdown comment: the outcome, a table of what is wrong, worst first, and drift."""
    out = [f"### precaudit: {code(j.name)} {TITLES[j.exit_code]}", "", f"{tally(j)}.", ""]
    out += [f"- {escaped(n)}" for n in j.notes]
    found = groups(j.verdicts)
    if found:
        out += [
            "",
            "| verdict | where | kind | metric | value | limit | others |",
            "| :-- | :-- | :-- | :-- | --: | --: | :-- |",
        ]
    for g in found[:SHOWN]:
        v = g.first
        cells = (v.status, place_text_of(v), v.kind, f"{v.metric} {v.scope}".strip() or v.text, _size(v, "value"))
        out.append("| " + " | ".join(escaped(c) for c in (*cells, _size(v, "limit"), rest(g).strip(" ()"))) + " |")
    if len(found) > SHOWN:
        out.append(f"\n… and {len(found) - SHOWN} more groups.")
    out += ["", *(f"- {escaped(line)}" for line in drift_lines(j))]
    return "\n".join(out).rstrip() + "\n"


def _size(v: Verdict, name: str) -> str:
    found = getattr(v, name)
    return "" if found is None else f"{value(found):.3g}"


def annotations(j: Judgement) -> list[str]:
    """Return GitHub workflow commands, one a group: ``::error title=…::message``."""
    found = []
    for g in groups(j.verdicts)[:SHOWN]:
        level = "error" if g.first.status in ("fail", "nonfinite") else "warning"
        found.append(f"::{level} title=precaudit {g.first.status}::{workflow(message(g.first) + rest(g))}")
    return found
