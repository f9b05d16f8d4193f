"""Programs under an explicit mesh of eight devices, audited, as one line of JSON; test_explicit_meshes.py runs this."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from precaudit import Program, gate
from precaudit.diagnosis.programs import diagnose_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.comparison.programs import compare_program
from tests.helpers.audited_cases import program

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
jax.set_mesh(MESH)


def drawn(shape, spec, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape) / 2
    return jax.device_put(jnp.asarray(values, jnp.bfloat16), NamedSharding(MESH, spec))


X, W = drawn((8, 16), P("data", None)), drawn((16, 32), P(None, "model"), 1)
BACK = drawn((32, 16), P("model", None), 2)


def block(params, x):
    """A scan of blocks: a choice of branch, a product with its sharding named, a cache that is written."""
    up, down = params

    def step(carry, shift):
        hidden = jax.nn.relu(carry @ up + shift)
        mixed = lax.cond(
            shift > 0, lambda h: jnp.matmul(h, down, out_sharding=P("data", None)), lambda _: carry, hidden
        )
        return carry + mixed, None

    out, _ = lax.scan(jax.checkpoint(step), x, jnp.arange(2, dtype=jnp.bfloat16))
    return jnp.zeros_like(out).at[:, 0].add(out[:, 1])


def shards(w, x):
    """A body on the shards."""
    specs = P("data", "model"), P("model", None)
    part = jax.shard_map(lambda a, b: lax.psum(a @ b, "model"), in_specs=specs, out_specs=P("data", None))(x @ w, BACK)
    return (x + part).astype(x.dtype)


PROGRAMS = {
    "where": program("explicit.py:program2"),
    "block": Program(block, (W, BACK), {"a": (X,)}, outputs="made"),
    "shards": Program(shards, W, {"a": (X,)}, outputs="made"),
}


def audited(folder, subject):
    """Return what gate and diagnose say of an honest run, and where gate fails one with a product 2 % too large."""
    opened = trace_program(subject, folder)
    compare_program(opened, subject)
    honest = gate(folder)
    findings = [f.cause for f in diagnose_program(opened, subject).findings]
    point = next(p.name for p in opened.record.points if p.primitive == "dot_general")
    name = file_name(opened.record, "a", 0, "taps")
    tensors = load_file(opened.folder / name)
    changed = (tensors[point].astype(np.float32) * 1.02).astype(tensors[point].dtype)
    save_file({**tensors, point: changed}, opened.folder / name)
    hashes = {**opened.record.hashes, name: file_hash(opened.folder / name)}
    write_manifest(opened.folder, msgspec.structs.replace(opened.record, hashes=hashes))
    compare_program(open_program_run(opened.folder), subject)
    failed = {v.point for v in gate(folder).verdicts if v.status == "fail" and v.kind == "local"}
    return {"honest": dict(honest.counts), "findings": findings, "point": point, "failed": sorted(failed)}


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(PROGRAMS)
    print(json.dumps({name: audited(Path(sys.argv[1]) / name, PROGRAMS[name]) for name in chosen}))
