"""FP64 forward values on disk, one file a point, named by the hash of everything they depend on."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from precaudit.configs import DecoderConfig
from precaudit.formats import Array

LIMIT = 4 << 30  # bytes kept; the least recently used sequences go first


def default_folder() -> Path:
    """Return $PRECAUDIT_REFS, else refs/cache in the working folder."""
    return Path(os.environ.get("PRECAUDIT_REFS") or Path("refs") / "cache")


@cache
def _code() -> str:
    """Hash of the reference's own source: values of another version are not reused."""
    digest = hashlib.sha256()
    root = resources.files("precaudit")
    for folder in (root / "numpy_decoder", root / "numpy_decoder" / "families"):
        for path in sorted(folder.iterdir(), key=lambda p: p.name):
            if path.name.endswith(".py"):
                digest.update(path.read_bytes())
    digest.update((root / "formats.py").read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class References:
    """The cached values of one sequence under one model."""

    folder: Path

    @classmethod
    def of(cls, root: Path, weights: str, config: DecoderConfig, tokens: tuple[int, ...]) -> "References":
        """Return the place of a sequence; ``weights`` identifies the tensors as they are used."""
        parts = (_code(), weights, msgspec.json.encode(config).decode(), np.asarray(tokens, np.int64).tobytes().hex())
        return cls(root / hashlib.sha256("|".join(parts).encode()).hexdigest()[:32])

    def path(self, layer: int | None, point: str, rows: Array) -> Path:
        """Return a point's file; logits depend on which rows were wanted."""
        name = point if layer is None else f"{layer}.{point}"
        if point == "logits":
            name += "." + hashlib.sha256(rows.astype(np.int64).tobytes()).hexdigest()[:12]
        return self.folder / f"{name}.npy"

    def load(self, layer: int | None, point: str, rows: Array) -> Array | None:
        """Return the values by mmap, or None when they are not there or not readable."""
        path = self.path(layer, point, rows)
        try:
            found: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError):
            return None
        return np.asarray(found)  # a plain array over the map: np.memmap slows every slice

    def save(self, layer: int | None, point: str, rows: Array, values: Array) -> None:
        """Write a point's values, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(layer, point, rows)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with temporary.open("wb") as f:
                np.save(f, values, allow_pickle=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def touch(self) -> None:
        """Mark as used now."""
        if self.folder.is_dir():
            os.utime(self.folder)


def prune(root: Path, keep: set[Path]) -> None:
    """Delete the least recently used sequences until the cache is within its limit; never those in ``keep``."""
    if not root.is_dir():
        return
    folders = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    sizes = {p: sum(f.stat().st_size for f in p.iterdir() if f.is_file()) for p in folders}
    total = sum(sizes.values())
    for folder in folders:
        if total > LIMIT and folder not in keep and len(folder.name) == 32:
            shutil.rmtree(folder, ignore_errors=True)
            total -= sizes[folder]
