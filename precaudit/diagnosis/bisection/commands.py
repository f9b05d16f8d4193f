"""A user's command as the test of a bisection: its exit code answers, as git bisect takes it."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.limits import Criterion
from precaudit.diagnosis.bisection.tasks import Figures, Kind
from precaudit.errors import UserError

CANNOT = 125  # what a command ends with where it cannot tell
NOT_RUN = 126  # and all above: it was not run, or a signal ended it


def command_criterion(text: str) -> Criterion:
    """Return the test that a command is."""
    return Criterion(text, "exit", "=", 0.0)


@dataclass(frozen=True)
class CommandTrials:
    """Trials that a command answers. ``settings``: the policy of a trial, as TOML.

    The command sees PRECAUDIT_SUBJECT, PRECAUDIT_CHANGES, one a line, and PRECAUDIT_POLICY_FILE, the trial's policy.
    """

    command: str
    subject: str
    changes: Changes
    settings: Callable[[Changes], str] | None = None

    @property
    def kind(self) -> Kind:
        """Threads wait for the commands of several trials."""
        return "threads"

    def measure(self, changes: Changes, folder: Path) -> Figures:
        """Return the command's exit code; raises UserError where it cannot tell."""
        folder.mkdir(parents=True, exist_ok=True)
        said = command_variables(self.subject, changes)
        if self.settings is not None:
            path = folder / "policy.toml"
            path.write_text(self.settings(changes))
            said["PRECAUDIT_POLICY_FILE"] = str(path.resolve())
        return run_command(self.command, {**os.environ, **said}, Path.cwd())


def command_variables(subject: str, changes: Changes) -> dict[str, str]:
    """Return what a command sees of a trial in its environment."""
    return {"PRECAUDIT_SUBJECT": subject, "PRECAUDIT_CHANGES": "\n".join(changes)}


def run_command(command: str, variables: Mapping[str, str], where: Path) -> Figures:
    """Return the exit code of a shell's command; raises UserError where it cannot tell, or did not run."""
    done = subprocess.run(
        command,
        shell=True,
        env=dict(variables),
        cwd=where,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    code, said = done.returncode, [x for x in done.stderr.splitlines() if x.strip()]
    if code == CANNOT:
        raise UserError("the command says that it cannot decide (125)")
    if code < 0 or code >= NOT_RUN:
        raise UserError(f"the command ended with {code}{': ' + said[-1] if said else ''}")
    return {"exit": float(code)}
