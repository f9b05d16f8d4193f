"""The judgement as GitHub annotations, worst first."""

import os
from pathlib import Path

from precaudit.judging.judgement import Judgement
from precaudit.reports.escaping import workflow, workflow_property
from precaudit.reports.gate import SHOWN
from precaudit.reports.judgement import groups, rest, verdict_message


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
        found.append(f"::{level} {given}::{workflow(verdict_message(g.first) + rest(g))}")
    return found


def _line(source: str, base: Path) -> dict[str, str]:
    """Return ``file`` and ``line`` of a source below ``base``; nothing of another."""
    name, _, line = source.rpartition(":")
    path = Path(name).resolve()
    if not name or not path.is_file() or not path.is_relative_to(base):
        return {}
    return {"file": path.relative_to(base).as_posix(), "line": line}
