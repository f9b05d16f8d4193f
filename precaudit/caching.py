"""The user's cache folder, and what decides whether something kept there still holds.

What is kept is named by the hash of all it was computed from, the source that computed it among that, and holds the
hash of its own bytes.

``references/`` holds FP64 values, at most 4 GiB; the least recently used go first. ``xla/`` holds compiled programs,
``numba/`` compiled functions. What is damaged is computed again, and said.
"""

import hashlib
import os
import shutil
from collections.abc import Collection
from functools import cache
from importlib import metadata, resources
from pathlib import Path

from precaudit.errors import UserError

LIMIT = 4 << 30  # bytes of references kept; the least recently used go first
# The source that reads a model and computes references; that records; that computes records; that computes findings:
# all that each imports, but for NO_NUMBERS (tests/project/test_caching.py).
READS = (
    "models/checkpoints",
    "models/configs",
    "models/numpy_decoder",
    "numbers",
    "schema/configuration.py",
    "schema/graphs",
    "schema/lengths.py",
    "schema/policies",
    "schema/records",
    "schema/tensors.py",
    "schema/toml.py",
)
TRACES = (
    *READS,
    "interpreters/jaxpr",
    "interpreters/mesh",
    "interpreters/tpu",
    "models/jax_decoder",
    "recording/programs/own.py",
    "recording/programs/program.py",
    "recording/programs/served.py",
    "recording/runs",
    "recording/tracing",
    "schema/coverage.py",
    "schema/digits.py",
    "schema/emulations.py",
    "schema/meshes.py",
    "schema/metrics",
    "schema/places.py",
    "schema/prompts.py",
    "schema/selection.py",
)
COMPARES = (
    *TRACES,
    "interpreters/gpu",
    "judging",
    "recording/dumps",
    "recording/opening.py",
    "recording/programs",
    "references",
    "schema/limits",
    "schema/predictions.py",
)
DIAGNOSES = (*COMPARES, "diagnosis")
NO_NUMBERS = (
    "buckets.py",
    "caching.py",
    "errors.py",
    "mirrors.py",
    "models/__init__.py",
    "progress.py",
    "recording/__init__.py",
    "recording/watching/__init__.py",
    "recording/watching/records.py",
    "schema/__init__.py",
    "schema/brief.py",
    "schema/filed.py",
    "schema/frames.py",
    "schema/point_names.py",
    "schema/program_names.py",
    "writing.py",
)
COMPILERS = ("jax", "jaxlib", "llvmlite", "numba")  # the libraries that compile what is computed, beside NumPy


def cache_folder(kind: str) -> Path:
    """Return where a kind of thing is kept: below $PRECAUDIT_CACHE, else below the user's cache folder."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("PRECAUDIT_CACHE")
    if chosen and "://" in chosen:
        raise UserError(
            f"PRECAUDIT_CACHE={chosen} is no folder here; references in a bucket: PRECAUDIT_REFERENCES={chosen}"
        )
    return (Path(chosen) if chosen else user_cache_path("precaudit", appauthor=False)) / kind


@cache
def computed_by(sources: tuple[str, ...]) -> str:
    """Return the hash of parts of this package's source, and of the libraries that compute and compile."""
    digest = hashlib.sha256(repr((numerics(), [metadata.version(name) for name in COMPILERS])).encode())
    root = Path(str(resources.files("precaudit")))
    for name in sorted(sources):
        where = root / name
        for path in sorted(where.rglob("*")) if where.is_dir() else (where,):
            if path.is_file() and path.suffix in (".py", ".toml", ".json"):
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def numerics() -> tuple[str, ...]:
    """Return what NumPy computes with: its version, its own BLAS and the kernels that chose for this processor."""
    import numpy as np
    from threadpoolctl import threadpool_info

    every = [x for x in threadpool_info() if x["user_api"] == "blas"]
    own = [x for x in every if "numpy" in x["filepath"]] or every  # other libraries bring and load theirs
    keys = ("internal_api", "version", "architecture")
    return (np.__version__, *sorted({" ".join(str(x.get(k)) for k in keys) for x in own}))


def prune(root: Path, keep: Collection[Path], limit: int = LIMIT) -> None:
    """Delete the least recently used folders below ``root`` until it is within ``limit`` bytes, none in ``keep``."""
    if not root.is_dir():
        return
    folders = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    sizes = {p: sum(f.stat().st_size for f in p.iterdir() if f.is_file()) for p in folders}
    total = sum(sizes.values())
    for folder in folders:
        if total > limit and folder not in keep and len(folder.name) == 32:
            shutil.rmtree(folder, ignore_errors=True)
            total -= sizes[folder]
