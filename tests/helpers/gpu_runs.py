"""Runs that were recorded on a GPU (traces/gpu), ready to be opened: long tables are kept packed."""

import gzip
import shutil
from pathlib import Path

from tests.helpers.paths import ROOT

RECORDED = ROOT / "traces" / "gpu"


def unpacked(name: str, folder: Path) -> Path:
    """Copy a recorded run into a folder, its tables unpacked."""
    shutil.copytree(RECORDED / name, folder)
    for packed in folder.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return folder
