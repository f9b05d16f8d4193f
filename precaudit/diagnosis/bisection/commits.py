"""Bisection by commits: a worktree of each that is tried; the user's own tree is left as it is."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.processes import Site
from precaudit.errors import UserError


@dataclass(frozen=True)
class Commits:
    """The commits after A, up to B, oldest first, by what a trial calls them; ``root``: of the repository."""

    root: Path
    good: str
    hashes: dict[str, str]

    @property
    def changes(self) -> Changes:
        """The commits, by hash and subject."""
        return tuple(self.hashes)

    @contextmanager
    def site(self, changes: Changes) -> Iterator[Site]:
        """Yield where the last of some commits runs: in a worktree, in the folder that the user is in."""
        commit = self.hashes[changes[-1]] if changes else self.good
        inside = Path.cwd().resolve().relative_to(self.root)
        with TemporaryDirectory(prefix="precaudit-") as made:
            tree = Path(made).resolve() / "tree"
            ask_git(self.root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            try:
                if not (tree / inside).is_dir():
                    raise UserError(f"commit {commit[:10]} has no folder {inside}")
                yield Site(where=tree / inside)
            finally:
                ask_git(self.root, "worktree", "remove", "--force", str(tree))


def commits_between(good: str, bad: str) -> Commits:
    """Return the commits after ``good`` up to ``bad`` of the repository that this is in; raises UserError."""
    root = Path(ask_git(Path.cwd(), "rev-parse", "--show-toplevel").strip()).resolve()
    a, b = (ask_git(root, "rev-parse", "--verify", "--quiet", f"{x}^{{commit}}", what=x).strip() for x in (good, bad))
    if a == b:
        raise UserError(f"{good} and {bad} are the same commit: nothing to bisect")
    if ask_git(root, "merge-base", a, b, what=f"{good} and {bad}").strip() != a:
        raise UserError(f"{good} is no ancestor of {bad}: give an older commit that is good")
    lines = ask_git(root, "log", "--reverse", "--first-parent", "--format=%H %h %s", f"{a}..{b}").splitlines()
    return Commits(root, a, {name: commit for commit, _, name in (line.partition(" ") for line in lines)})


def ask_git(where: Path, *words: str, what: str = "") -> str:
    """Return what git says; raises UserError where there is none, or it refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=where, check=False, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise UserError("--by commits: there is no git here") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"git: {said[-1].removeprefix('fatal: ') if said else f'{what} is no commit here'}")
    return done.stdout
