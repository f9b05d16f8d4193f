"""Where CI installs precaudit from: the repository that this one came from, else a release."""

import json
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

EXTRA = "precaudit[html]"
VARIABLE = "PRECAUDIT_PACKAGE"  # of the repository in CI
SAFE = re.compile(r"[\w.~:/@+=%-]+")  # what needs no quoting in a shell
SSH = re.compile(r"(?P<user>\w+)@(?P<host>[\w.-]+):(?P<path>[^/].*)")  # user@host:path


@dataclass(frozen=True)
class PackageSource:
    """What pip installs precaudit from, and what that assumes, in a sentence."""

    requirement: str
    assumes: str


def package_source() -> PackageSource:
    """Return where CI gets precaudit: the repository that pip took it from (PEP 610) or the clone's, or a release."""
    other = f"for another, set the repository variable {VARIABLE}"
    if (found := _repository()) is not None:
        url, commit = found
        at = f" at {commit[:12]}" if commit else ""
        requirement = f"{EXTRA} @ git+{url}" + (f"@{commit}" if commit else "")
        return PackageSource(requirement, f"CI installs precaudit from {url}{at}, which it has to reach; {other}")
    release = f"{EXTRA}=={version('precaudit')}"
    assumes = f"CI installs {release} from its package index; before there is a release, set the repository variable"
    return PackageSource(release, f"{assumes} {VARIABLE} to where it is, such as '{EXTRA} @ git+URL'")


def _repository() -> tuple[str, str] | None:
    """Return (URL, commit) of the repository of this installation; None where nothing says which."""
    try:
        text = distribution("precaudit").read_text("direct_url.json")
        told = json.loads(text or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    url = str(told.get("url", ""))
    if "vcs_info" in told:
        return _checked(url, str(told["vcs_info"].get("commit_id", "")))
    folder = Path(unquote(urlsplit(url).path))
    if "dir_info" not in told or not (folder / ".git").exists():
        return None
    return _checked(_git(folder, "remote", "get-url", "origin"), _git(folder, "rev-parse", "HEAD"))


def _checked(url: str, commit: str) -> tuple[str, str] | None:
    """Return a URL that others can reach, without a password in it; None for any other."""
    if match := SSH.fullmatch(url):
        url = f"ssh://{match['user']}@{match['host']}/{match['path']}"
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http", "ssh", "git") or not parts.hostname:
        return None
    user = f"{parts.username}@" if parts.scheme == "ssh" and parts.username else ""
    port = f":{parts.port}" if parts.port else ""
    plain = urlunsplit((parts.scheme, f"{user}{parts.hostname}{port}", parts.path, "", ""))
    return (plain, commit) if SAFE.fullmatch(plain) and (not commit or SAFE.fullmatch(commit)) else None


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
