"""Hold a file of numbers from a TPU against the prediction: ``python -m exams.tpu_calibration.compare FILE``.

A row a program: the share of elements that are the file's, bit for bit, and the relative distance from it, as predicted
with bfloat16 results inside fusions rounded and not. What is nearer answers the program's question.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

from exams.tpu_calibration.programs import PROGRAMS
from precaudit.interpreters.tpu.execute import function
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.target import compile_for, parse_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="v5e")
    given = parser.parse_args()
    with np.load(given.file, allow_pickle=False) as held:
        seen = {name: held[name] for name in held.files}
    about = json.loads(str(seen.pop("about")))
    print(f"{about['device']}, libtpu {about['versions'].get('libtpu', 'none')}; predicted for {given.target}")
    print(f"{'program':18} {'rounded inside':>22} {'not rounded':>22}  asks")
    for name, program in PROGRAMS.items():
        if name not in seen:
            print(f"{name:18} not in the file")
            continue
        inputs = program.inputs()
        text = compile_for(parse_target(given.target), program.function, inputs).text
        told = []
        for inside in (True, False):
            made = np.asarray(function(parse_module(text), rounded_inside=inside)(*jax.tree.leaves(inputs)), np.float32)
            told.append(beside(made, seen[name]))
        print(f"{name:18} {told[0]:>22} {told[1]:>22}  {program.asks}")


def beside(made: np.ndarray, seen: np.ndarray) -> str:
    """Return how much of what was predicted is what was seen, and how far the rest is."""
    if made.shape != seen.shape:
        return f"shape {made.shape}, not {seen.shape}"
    off = np.linalg.norm(made.astype(np.float64) - seen) / np.linalg.norm(seen.astype(np.float64))
    return f"{100 * np.mean(made == seen):.0f} %, {off:.1e}"


if __name__ == "__main__":
    main()
