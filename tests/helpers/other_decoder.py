"""Dumps of examples/dumped_decoder.py, which shares no line with our decoders, of a fixture's weights."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.paths import EXAMPLES, FIXTURES

MODEL = FIXTURES / "llama-gqa"
MAP = (EXAMPLES / "dumped_decoder.toml").read_text().replace("h = 4", "h = 6")
spec = spec_from_file_location("dumped_decoder", EXAMPLES / "dumped_decoder.py")
example = module_from_spec(spec)
spec.loader.exec_module(example)
run_decoder = partial(example.run_decoder, MODEL)


def fixture_tokens(family="llama-gqa"):
    """The tokens of which transformers' own expected values are."""
    return load_file(FIXTURES / "expected" / f"{family}.safetensors")["tokens"]


def write_dump(folder: Path, cases, wide=False, steps=0, change=lambda _name, x: x, names=MAP, **how):
    """Write a file of tensors for every case, and the map beside the folder; return the map.

    ``wide``: all numbers as float32, whatever format holds them. ``steps``: of the last tokens, those that decode was
    fed one by one. ``change``: what becomes of a tensor by its name, None: it is not written.
    """
    folder.mkdir(parents=True)
    for case, tokens in cases.items():
        made, n = run_decoder(tokens, **how), len(tokens) - steps
        calls = [slice(0, n), *(slice(i, i + 1) for i in range(n, len(tokens)))]
        arrays = {"ids": made.pop("ids")}
        for name, x in made.items():
            x = x.astype(np.float32) if wide else x
            for call, rows in enumerate(calls):
                arrays[f"{call}/{name}"] = x[:, rows] if name.endswith("mix") else x[rows]
        changed = {n: y for n, x in arrays.items() if (y := change(n, x)) is not None}
        save_file({n: np.ascontiguousarray(x) for n, x in changed.items()}, folder / f"{case}.safetensors")
    path = folder.parent / f"{folder.name}.toml"
    path.write_text(names)
    return path
