"""A program inside shard_map on four devices, recorded and compared, as a line of JSON for test_shard_maps.py."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from precaudit import Program, gate
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr import plant, reap
from precaudit.recording.programs.planning import ProgramSelection, points
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.comparison.programs import compare_program

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
ROWS, COLUMNS = PartitionSpec("rows"), PartitionSpec(None, "columns")


def block(x, up, down):
    """Return a tensor-parallel MLP's result: a part of the hidden channels on every device of a row."""
    hidden = jax.nn.silu(x @ up)
    part = hidden @ down
    return lax.psum(part, "columns")


def call(params, x):
    specs = (ROWS, COLUMNS, PartitionSpec("columns"))
    made = jax.shard_map(block, mesh=MESH, in_specs=specs, out_specs=ROWS)(x, *params)
    return x + made


def drawn():
    draw = np.random.default_rng(0)
    x, up, down = (jnp.asarray(draw.standard_normal(shape) / 3, jnp.bfloat16) for shape in ((6, 8), (8, 16), (16, 8)))
    return Program(call, (up, down), {"a": (x,), "b": (x,)}, outputs="result")


def audited(folder):
    """Return what was recorded beside NumPy's shards of it, and where verdicts fail after a fault on one shard of b."""
    program = drawn()
    opened = trace_program(program, folder / "run")
    taps = opened.tensors("a", 0, "taps")
    x, up = program.cases["a"][0], program.params[0]
    parts = [np.asarray(x[i : i + 3], np.float64) @ np.asarray(up[:, j : j + 8], np.float64)
             for i in (0, 3) for j in (0, 8)]  # fmt: skip
    product = next(p.name for p in opened.record.points if p.primitive == "dot_general")
    off = float(np.max(np.abs(taps[product].astype(np.float64) - np.stack(parts))))
    name = file_name(opened.record, "b", 0, "taps")
    tensors = load_file(opened.folder / name)
    changed = tensors["part"].astype(np.float32)
    changed[2] *= 1.02
    save_file({**tensors, "part": changed.astype(tensors["part"].dtype)}, opened.folder / name)
    hashes = {**opened.record.hashes, name: file_hash(opened.folder / name)}
    write_manifest(opened.folder, msgspec.structs.replace(opened.record, hashes=hashes))
    compare_program(open_program_run(opened.folder), program)
    judged = gate(opened.folder)
    failed = [[v.prompt, v.layer, v.point] for v in judged.verdicts if v.status == "fail" and v.kind == "local"]
    return {"stacked": {p.name: p.stacked for p in points(program)}, "off": off, "failed": failed,
            "statuses": sorted({v.status for v in judged.verdicts}), "passed": judged.counts["pass"]}  # fmt: skip


def planted():
    """Return the errors of a value planted on one shard, the program's output then, and the gradient by every shard."""

    def f(x):
        doubled = jax.shard_map(lambda y: lax.psum(tap(y * 2, "doubled"), "columns"), mesh=MESH,
                                in_specs=PartitionSpec("rows", "columns"), out_specs=ROWS)(x)  # fmt: skip
        return (doubled * jnp.array([[1.0], [3.0]], doubled.dtype)).sum()

    x = jnp.arange(4.0).reshape(2, 2)
    _, taps = reap(f)(x)
    changed = taps["doubled"].at[3].add(0.5)
    with jax.enable_x64(True):
        out, errors = plant(f, "force")({"doubled": changed}, x)
        slopes = jax.grad(lambda v: plant(f, "add")({"doubled": v}, x)[0])(jnp.zeros((4, 1, 1)))
    return [float(f(x)), float(out), np.asarray(errors["doubled"]).ravel().tolist(), slopes.ravel().tolist()]


def layers(folder):
    """Return what is said of some layers of it."""
    try:
        trace_program(drawn(), folder / "some", ProgramSelection(layers=(0,)))
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(json.dumps({"audited": audited(where), "planted": planted(), "layers": layers(where)}))
