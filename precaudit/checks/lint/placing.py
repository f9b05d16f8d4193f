"""Which points of a program a run recorded: by their names, of models and of programs alike."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from precaudit.checks.lint.flow import tap
from precaudit.checks.lint.recorded import OCCURRENCE, Extents
from precaudit.checks.lint.rules.overflow import MOST
from precaudit.checks.lint.view import CallView
from precaudit.errors import UserError


def with_recorded_extents(views: Sequence[CallView], run: Extents) -> list[CallView]:
    """Return views with what a run recorded of their points; raises UserError where it recorded none of them."""
    names = _names(views)
    if not names & run.extents.keys():
        raise UserError(
            f"{run.folder}: it recorded {_few(run.extents)}; this program has {_few(names)}: give a run of these points"
        )
    return [replace(v, extents=run.extents) for v in views]


def _names(views: Sequence[CallView]) -> set[str]:
    return {name for v in views for e in v.tapped_graph.equations if (name := tap(e))}


def missing_points_note(views: Sequence[CallView]) -> list[str]:
    """Return a note of the points of a run that no view has, where float16 would not hold their values."""
    large = [name for name, x in (views[0].extents or {}).items() if x.most > MOST] if views else []
    lacking = [x for x in large if x not in _names(views) and OCCURRENCE.sub("", x) == x] if large else []
    return [f"points of the run that are not here had values above 65,504: {_few(lacking)}"] if lacking else []


def _few(names: Iterable[str]) -> str:
    """Return the first names of some."""
    found = sorted(names)
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "") if found else "no points"
