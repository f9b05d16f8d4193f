"""Runs that were recorded on a GPU (traces/gpu), ready to be opened: long tables and tensors are kept packed (xz)."""

import lzma
import shutil
from pathlib import Path

from tests.helpers.paths import ROOT

RECORDED = ROOT / "traces" / "gpu"


def unpacked(name: str, folder: Path) -> Path:
    """Copy a recorded run into a folder, its tables and tensors unpacked."""
    shutil.copytree(RECORDED / name, folder)
    for packed in folder.rglob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        packed.unlink()
    return folder
