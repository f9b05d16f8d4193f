"""The judgement for a pull request: Markdown, worst first, and GitHub annotations."""

import os
from pathlib import Path

from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.reports.escaping import code, workflow, workflow_property
from precaudit.reports.escaping import markdown as escaped
from precaudit.reports.judgement import SHOWN, drift_lines, groups, message, place_text_of, rest, tally
from precaudit.schema.records.base import value

TITLES = {0: "passes", 1: "fails", 3: "cannot be judged"}


def markdown(j: Judgement) -> str:
    """Return a Markdown comment: the outcome, a table of what is wrong, worst first, and drift."""
    out = [f"### precaudit: {code(j.name)} {TITLES[j.exit_code]}", "", f"{tally(j)}.", ""]
    out += [f"- {escaped(n)}" for n in j.notes]
    found = groups(j.verdicts)
    if found:
        out += [
            "",
            "| verdict | where | source | kind | metric | value | limit | others | budget's reason |",
            "| :-- | :-- | :-- | :-- | :-- | --: | --: | :-- | :-- |",
        ]
    for g in found[:SHOWN]:
        v = g.first
        cells = (
            v.status, place_text_of(v), j.sources.get(v.point, ""), v.kind, f"{v.metric} {v.scope}".strip() or v.text,
            _size(v, "value"), _size(v, "limit"), rest(g).strip(" ()"), v.why,
        )  # fmt: skip
        out.append("| " + " | ".join(map(escaped, cells)) + " |")
    if len(found) > SHOWN:
        out.append(f"\n… and {len(found) - SHOWN} more groups.")
    out += ["", *(f"- {escaped(line)}" for line in drift_lines(j))]
    return "\n".join(out).rstrip() + "\n"


def _size(v: Verdict, name: str) -> str:
    found = getattr(v, name)
    return "" if found is None else f"{value(found):.3g}"


def annotations(j: Judgement, root: Path | None = None) -> list[str]:
    """Return GitHub workflow commands, one a group: ``::error file=…,line=…,title=…::message``.

    Files are told from the root of the repository (``root``, else $GITHUB_WORKSPACE, else here); a point whose file is
    not known, or lies outside, has none.
    """
    base = (root or Path(os.environ.get("GITHUB_WORKSPACE") or ".")).resolve()
    found = []
    for g in groups(j.verdicts)[:SHOWN]:
        level = "error" if g.first.status in ("fail", "nonfinite") else "warning"
        properties = {**_line(j.sources.get(g.first.point, ""), base), "title": f"precaudit {g.first.status}"}
        given = ",".join(f"{k}={workflow_property(x)}" for k, x in properties.items())
        found.append(f"::{level} {given}::{workflow(message(g.first) + rest(g))}")
    return found


def _line(source: str, base: Path) -> dict[str, str]:
    """Return ``file`` and ``line`` of a source below ``base``; nothing of another."""
    name, _, line = source.rpartition(":")
    path = Path(name).resolve()
    if not name or not path.is_file() or not path.is_relative_to(base):
        return {}
    return {"file": path.relative_to(base).as_posix(), "line": line}
