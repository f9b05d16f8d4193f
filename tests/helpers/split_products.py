"""A product whose terms lie on four devices, audited: what the compiled text says, and what the gate finds with it.

Run in a process of its own: ``python -m tests.helpers.split_products FOLDER`` with four host devices; prints JSON.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from precaudit import Program
from precaudit.judging.gate import gate
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import open_program_run
from precaudit.references.comparison.programs import compare_program


def main(folder: Path) -> None:
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((64, 48), (2, 16, 64)))
    w, x = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((w, P("model")), (x, P(None, None, "model"))))
    program = Program(lambda w, x: jnp.tanh(x @ w), w, {"a": (x,)}, outputs="out")
    run = trace_program(program, folder / "run")
    compare_program(run, program)
    (noted,) = run.record.neutrality
    found = {"split": msgspec.to_builtins(noted.split), "code": gate(run.folder).exit_code}
    without = msgspec.structs.replace(run.record, neutrality=(msgspec.structs.replace(noted, split={}),))
    write_manifest(run.folder, without)
    compare_program(open_program_run(run.folder), program)
    found["without"] = [v.point for v in gate(run.folder).verdicts if v.status == "fail"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
