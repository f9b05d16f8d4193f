"""RUN on a command line: the folder of a run, or one of several that trace wrote for several policies."""

import shlex
from pathlib import Path
from typing import Any

import click

from precaudit.cli._options import given_options


class RunFolder(click.Path):
    """A run's folder; one of several runs is refused, its runs named as they are typed.

    ``several``: whether the command takes a folder of runs.
    """

    def __init__(self, several: bool = False) -> None:
        super().__init__(path_type=Path)
        self.several = several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; raises UserError for a folder of several runs where the command is for one."""
        path = Path(str(super().convert(value, param, ctx)))
        if not self.several and ctx is not None and not ctx.resilient_parsing:
            require_one_run(path, ctx.info_name or "")
        return path


def require_one_run(path: Path, command: str) -> None:
    """Raise UserError for a folder that holds runs and is none, saying what to type."""
    if not path.is_dir() or not (runs := _runs_in(path)):
        return
    from precaudit.errors import UserError

    typed = "; ".join(f"precaudit {command} {shlex.quote(str(run))}" for run in runs)
    raise UserError(f"{path} holds {len(runs)} runs, and {command} is for one: {typed}")


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder, where it is none itself, by the files that are there."""
    from precaudit.recording.runs.folders import runs_of_lengths
    from precaudit.recording.runs.kinds import MANIFESTS

    if any((path / name).is_file() for name in MANIFESTS) or runs_of_lengths(path):
        return []
    return sorted({p.parent for name in MANIFESTS for p in path.glob(f"*/{name}")})


def every_run(context: click.Context, folder: Path, names: tuple[str, ...], why: str) -> list[Path]:
    """Return the runs in a folder; raises UserError where options are given that are for one run alone."""
    from precaudit.errors import UserError

    runs = _runs_in(folder) if folder.is_dir() else []
    given = given_options(context)
    if runs and (other := [given[name] for name in names if name in given]):
        raise UserError(f"{folder} holds {len(runs)} runs, and {why}; leave out {', '.join(other)}")
    return runs
