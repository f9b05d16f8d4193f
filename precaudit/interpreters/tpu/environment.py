"""What libtpu must be told where no TPU is, before JAX starts."""

import os
from collections.abc import MutableMapping
from pathlib import Path

# libtpu looks for its machine's name and kind, prints what it does not find, and takes a lock one process may hold.
ABSENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def chips(devices: Path = Path("/dev")) -> bool:
    """Whether a TPU's device files are here (accel0 …, or vfio/0 … on newer machines)."""
    return any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))


def allow_libtpu(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let libtpu compile, and say nothing, where there is no TPU; what the user has set stays."""
    if not chips():
        for name, text in ABSENT.items():
            environment.setdefault(name, text)
