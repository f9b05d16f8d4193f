"""What the numbers of a run depend on beside what is run: versions, XLA's flags, the commit; and the time."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import TypedDict

import precaudit


class Conditions(TypedDict):
    """As ``Manifest`` has them."""

    versions: dict[str, str]
    xla_flags: str
    commit: str | None


def run_conditions() -> Conditions:
    """Return the conditions of a run that starts now."""
    return Conditions(versions=number_versions(), xla_flags=os.environ.get("XLA_FLAGS", ""), commit=commit())


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def number_versions() -> dict[str, str]:
    """Return the versions that can change numbers."""
    found = {"python": platform.python_version(), "precaudit": precaudit.__version__}
    for name in ("jax", "jaxlib", "libtpu", "numpy", "transformers", "ml_dtypes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the working folder, with ``+`` when tracked files differ from it; None outside git."""
    try:
        run = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True)
        head = run(["git", "rev-parse", "HEAD"]).stdout.strip()
        return head + ("+" if run(["git", "status", "--porcelain", "-uno"]).stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None
