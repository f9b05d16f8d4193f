"""Trials in processes of their own: the commands ``trace`` and ``compare``, somewhere else each time."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import precaudit
from precaudit.diagnosis.bisection.commands import command_variables, run_command
from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion
from precaudit.diagnosis.bisection.measuring import read_figures
from precaudit.diagnosis.bisection.tasks import Figures, Kind
from precaudit.errors import UserError
from precaudit.recording.programs.loading import is_reference

OURS = Path(precaudit.__file__).parents[1]


@dataclass(frozen=True)
class Site:
    """Where a trial runs: its Python, its working directory, and variables of its environment."""

    python: str = sys.executable
    where: Path = field(default_factory=Path.cwd)
    variables: Mapping[str, str] = field(default_factory=dict)


class Sides(Protocol):
    """A and B of trials in processes: what differs, and where A with some of it runs, as a context."""

    @property
    def changes(self) -> Changes:
        """All that differs."""

    def site(self, changes: Changes) -> AbstractContextManager[Site]:
        """Yield where A with these changes runs."""


@dataclass(frozen=True)
class ProcessTrials:
    """Trials of a program or a model, each in a process.

    ``arguments``: of ``trace``; ``good``: the folder of A's run; ``command``: what answers in place of figures.
    """

    subject: str
    sides: Sides
    criterion: Criterion
    against: str
    arguments: tuple[str, ...]
    good: Path
    command: str | None = None

    @property
    def changes(self) -> Changes:
        """All that differs between A and B."""
        return self.sides.changes

    @property
    def kind(self) -> Kind:
        """Threads wait for the processes of several trials."""
        return "threads"

    def measure(self, changes: Changes, folder: Path) -> Figures:
        """Return the figures of a trial; raises UserError where its process ends with an error."""
        folder, good = folder.resolve(), self.good.resolve()
        with self.sides.site(changes) as site:
            variables = site_variables(site)
            if self.command is not None:
                said = {**variables, **command_variables(self.subject, changes)}
                return run_command(self.command, said, site.where)
            asked = ["trace", self.subject, "-o", str(folder), "--force", *self.arguments]
            if folder != good and not is_reference(self.subject):
                asked += ["--tokens-from", str(good)]
            run_module(site, asked)
            if self.against == "fp64":
                run_module(site, ["compare", str(folder), "--accum", "none"])
        return read_figures(folder, good, self.against, self.criterion)


def site_variables(site: Site) -> dict[str, str]:
    """Return the environment of a process: the user's, with our code and its own Python found first."""
    found = {**os.environ, **site.variables}
    found["PYTHONPATH"] = os.pathsep.join(x for x in (str(OURS), os.environ.get("PYTHONPATH", "")) if x)
    found["PATH"] = os.pathsep.join((str(Path(site.python).parent), found.get("PATH", "")))
    return found


def run_module(site: Site, arguments: Sequence[str], module: str = "precaudit") -> None:
    """Run a module of ours somewhere; raises UserError with its last line where it fails."""
    done = subprocess.run(
        [site.python, "-m", module, *arguments],
        env=site_variables(site),
        cwd=site.where,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        said = [x for x in done.stderr.splitlines() if x.strip()]
        last = next((x for x in said if "Unknown flag" in x), said[-1] if said else "nothing said")
        what = arguments[0] if module == "precaudit" else module.rpartition(".")[2]
        raise UserError(f"{what} ended with {done.returncode}: {last.removeprefix('precaudit: ').strip()}")
