"""The judgement as GitHub annotations, worst first."""

import os
from pathlib import Path
from types import MappingProxyType

from precaudit.judging.judgement import Judgement
from precaudit.reports.escaping import workflow, workflow_property
from precaudit.reports.findings import Causes
from precaudit.reports.gate import SHOWN
from precaudit.reports.judgement import groups, rest, verdict_message

SILENT = ("input suspect", "not run")  # a fault that is told accounts for it, or nothing does


def annotations(j: Judgement, root: Path | None = None, causes: Causes = MappingProxyType({})) -> list[str]:
    """Return GitHub workflow commands, one a group: ``::error file=…,line=…,title=…::message``.

    ``causes``: what diagnose found, by layer and point; the first group there says it, too.

    Files are told from the root of the repository (``root``, else $GITHUB_WORKSPACE, else here); a point whose file is
    not known, or lies outside, has none.
    """
    base = (root or Path(os.environ.get("GITHUB_WORKSPACE") or ".")).resolve()
    found, left = [], dict(causes)
    for g in [g for g in groups(j.verdicts) if g.first.status not in SILENT][:SHOWN]:
        level = "error" if g.first.status in ("fail", "nonfinite") else "warning"
        properties = {**_line(j.sources.get(g.first.point, ""), base), "title": f"precaudit {g.first.status}"}
        given = ",".join(f"{k}={workflow_property(x)}" for k, x in properties.items())
        told = [verdict_message(g.first) + rest(g), *left.pop((g.first.layer, g.first.point), ())]
        found.append(f"::{level} {given}::{workflow('. '.join(told))}")
    return found


def _line(source: str, base: Path) -> dict[str, str]:
    """Return ``file`` and ``line`` of a source below ``base``; nothing of another."""
    name, _, line = source.rpartition(":")
    path = Path(name).resolve()
    if not name or not path.is_file() or not path.is_relative_to(base):
        return {}
    return {"file": path.relative_to(base).as_posix(), "line": line}
