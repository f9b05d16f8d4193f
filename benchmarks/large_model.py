"""Memory that trace, compare and diagnose take of a model of 1.5 B parameters, over its weights' 3.1 GB in bfloat16.

Weights and tokens are random; two prompts of 24 tokens. Files' pages in memory count. About 20 minutes on two cores and
6.3 GB of disk. Run: python -m benchmarks.large_model
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.main_job import Line, show

SHAPE = {
    "model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "num_hidden_layers": 28, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
BOUNDS = {"trace": 2.5, "compare": None, "diagnose": 4.0}
CHILD = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writing = f"from benchmarks.large_reference import *; write(Path({place!r}), {SHAPE!r})"
        subprocess.run([sys.executable, "-c", writing], check=True)
        draw = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 24)).tolist()
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"id": f"p{i}", "tokens": x}) + "\n" for i, x in enumerate(draw)))
        size, run = (folder / "model.safetensors").stat().st_size, str(folder / "run")
        lines, codes = [], []
        for name, given in (
            ("trace", [place, "--prompts", str(prompts), "-o", run]),
            ("compare", [run]),
            ("diagnose", [run]),
        ):
            began = time.perf_counter()
            command = [sys.executable, "-m", "precaudit", name, *given]
            done = subprocess.run([sys.executable, "-c", CHILD, *command], check=True, capture_output=True, text=True)
            code, peak = map(int, done.stdout.split())
            codes.append(code)
            note = f"{peak / 2**30:.1f} GiB, {time.perf_counter() - began:.0f} s, exit code {code}"
            lines.append(Line(f"{name}: peak memory / weights", peak / size, "x", BOUNDS[name], note=note))
    show(lines)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
