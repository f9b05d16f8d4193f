"""Versions, and what the package's own metadata requires: the extras are read there, not listed here."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

NAMED = ("jax", "jaxlib", "libtpu", "numpy", "ml_dtypes", "transformers", "tokenizers", "safetensors", "gguf", "numba")
PACKAGE = "precaudit"


@dataclass(frozen=True)
class Extra:
    """An extra of the package: whether all it requires is there, what is not, and the line that installs it."""

    name: str
    installed: bool
    lacks: tuple[str, ...]
    line: str


def computing_versions() -> dict[str, str]:
    """Return {name: version} of what computes, NumPy's BLAS with its kernels among it."""
    import precaudit
    from precaudit.caching import numerics

    found = {"precaudit": precaudit.__version__, "python": platform.python_version()}
    found |= {name: version for name in NAMED if (version := _version(name)) is not None}
    if blas := numerics()[1:]:
        found["BLAS"] = ", ".join(blas)
    return found


def missing_packages() -> tuple[str, ...]:
    """Return what the package requires of everyone, and is not there or too old."""
    return tuple(text for each in _requires(PACKAGE, "") for text in _lacks(each, set()))


def extras() -> tuple[Extra, ...]:
    """Return the extras that the installed package declares; none where it is not installed."""
    try:
        names = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for name in sorted(names):
        lacks = tuple(text for each in _requires(PACKAGE, name) for text in _lacks(each, set()))
        found.append(Extra(name, not lacks, lacks, f"pip install '{PACKAGE}[{name}]'"))
    return tuple(found)


def _requires(package: str, extra: str) -> Iterator[Requirement]:
    """Yield what a package requires under one of its extras ("": of everyone)."""
    try:
        texts = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for each in map(Requirement, texts):
        plain = each.marker is None or each.marker.evaluate({"extra": ""})
        if plain is not bool(extra) and (each.marker is None or each.marker.evaluate({"extra": extra})):
            yield each


def _lacks(wanted: Requirement, seen: set[str]) -> Iterator[str]:
    """Yield what is not there of a requirement and of its extras."""
    version = _version(wanted.name)
    if version is None:
        yield wanted.name
    elif not wanted.specifier.contains(version, prereleases=True):
        yield f"{wanted.name}{wanted.specifier} (here {version})"
    elif str(wanted) not in seen:
        seen.add(str(wanted))
        for extra in sorted(wanted.extras):
            for each in _requires(wanted.name, extra):
                yield from _lacks(each, seen)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
