"""Run the programs on this machine's TPU and write what they give (``python -m exams.tpu_calibration.record``)."""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

from exams.tpu_calibration.programs import PROGRAMS
from precaudit.recording.tracing.conditions import number_versions
from precaudit.recording.tracing.devices import choose_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="tpu", help="cpu: to try the kit itself")
    given = parser.parse_args()
    device = choose_device(given.device)
    found = {}
    for name, program in PROGRAMS.items():
        out = jax.jit(program.function)(*jax.device_put(program.inputs(), device))
        found[name] = np.asarray(out.astype(np.float32))
        print(f"{name}: {found[name].shape}")
    about = {"device": device.device_kind, "platform": device.platform, "versions": number_versions()}
    with given.file.open("wb") as file:
        np.savez(file, about=np.asarray(json.dumps(about)), **found)
    print(f"{given.file}: {len(found)} programs on {device.device_kind}")


if __name__ == "__main__":
    main()
