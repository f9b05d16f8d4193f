"""Bisection by versions: a virtual environment of each, made once and kept in the cache folder."""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from precaudit.caching import cache_folder
from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.processes import Site
from precaudit.errors import UserError

REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[\w,]+\])?==(?P<version>[\w.!+]+)")
# Of these the version of one is that of another.
TOGETHER = ("jax", "jaxlib", "libtpu", "ml-dtypes", "jax-cuda12-plugin", "jax-cuda12-pjrt")
READY = "ready"  # the file that says an environment is whole
OFFLINE = re.compile(r"connection|network|resolution|resolve host|timed out|proxy", re.IGNORECASE)


@dataclass(frozen=True)
class Versions:
    """Requirements from A to B, in the order given."""

    good: str
    changes: Changes

    @contextmanager
    def site(self, changes: Changes) -> Iterator[Site]:
        """Yield where the last of some versions runs."""
        yield Site(python=str(environment(changes[-1] if changes else self.good)))


def versions_between(good: str, bad: str, between: str | None) -> Versions:
    """Return the versions of ``name==version`` from A to B; ``between``: those in the middle, ``0.11.0,0.11.1``."""
    sides = [REQUIREMENT.fullmatch(x) for x in (good, bad)]
    if sides[0] is None or sides[1] is None:
        raise UserError(f"--by versions: {good if sides[0] is None else bad!r} is no version; write jax==0.10.2")
    if sides[0]["name"] != sides[1]["name"]:
        raise UserError(f"--by versions: {good} and {bad} are of two packages")
    if good == bad:
        raise UserError(f"{good} is both A and B: nothing to bisect")
    given = [x.strip() for x in (between or "").split(",") if x.strip()]
    middle = tuple(good[: sides[0].start("version")] + version for version in given)
    if bad_one := next((x for x in middle if REQUIREMENT.fullmatch(x) is None), None):
        raise UserError(f"--between: {bad_one!r} is no version")
    return Versions(good, (*middle, bad))


def environment(requirement: str) -> Path:
    """Return the Python of an environment with a requirement, made where it is not kept; raises UserError.

    What the requirement does not bring comes from the environment that runs this, whose versions it is held to.
    """
    outer = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256(f"{requirement} {sys.version} {outer}".encode()).hexdigest()[:16]
    folder = cache_folder("environments") / key
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if (folder / READY).is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    constraints, uv = str(folder / "constraints.txt"), shutil.which("uv")
    if uv is not None:
        made, install = [uv, "venv", "--quiet"], [uv, "pip", "install", "--python", str(python)]
    else:
        made = [sys.executable, "-m", "venv", "--without-pip"]
        install = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    _make(requirement, [*made, str(folder)])
    Path(constraints).write_text(_constraints(requirement))
    _make(requirement, [*install, "--quiet", "-c", constraints, requirement])
    inner = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(inner) / "precaudit-outer.pth").write_text(outer + "\n")
    (folder / READY).write_text(requirement + "\n")
    return python


def _constraints(requirement: str) -> str:
    """Return what is installed here as constraints, without the requirement and what changes together with it."""
    match = REQUIREMENT.fullmatch(requirement)
    own = {match["name"].lower() if match else "", *TOGETHER, "precaudit"}
    held = {d.name: d.version for d in metadata.distributions() if d.name.lower().replace("_", "-") not in own}
    return "".join(f"{name}=={version}\n" for name, version in sorted(held.items()))


def _make(requirement: str, words: list[str]) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    said = [x.strip() for x in (done.stderr + done.stdout).splitlines() if x.strip()]
    errors = [x for x in said if re.match("error|×", x, re.IGNORECASE)] or said
    offline = any(OFFLINE.search(x) for x in said)
    if any("Requires-Python" in x for x in said):
        raise UserError(f"no environment with {requirement}: it needs another Python than {sys.version.split()[0]}")
    why = "the package index cannot be reached" if offline else errors[-1] if errors else "nothing said"
    raise UserError(f"no environment with {requirement}: {why}")
