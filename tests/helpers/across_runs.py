"""A run of tiny on one device held against meshes of eight, honest ones and one that leaves a shard out, as JSON.

Run: python -m tests.helpers.across_runs FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from precaudit.cli import run
from precaudit.diagnosis.evidence.sharding import across_meshes
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.reports.mesh import across_report
from precaudit.reports.sameness import sameness_report
from precaudit.schema.meshes import ONE, MeshShape
from precaudit.schema.selection import Selection
from precaudit.workflows.same import same
from tests.helpers.meshed_runs import PROMPTS, shard_left_out

POINTS = "q,attn_out,attn_proj,mlp_act,mlp_out,resid_out,logits"


def subject_on(mesh, **changed):
    subject = load("tiny", "bf16", device="cpu", mesh=mesh)
    return replace(subject, parts=replace(subject.parts, **changed)) if changed else subject


def told(found):
    """What is said of a run on one mesh."""
    report = across_report([found], ONE)
    points = {p.point: (p.status, p.noises) for p in found.points}
    return {"status": found.status, "points": points, "lines": report.sections[0].lines, "mark": report.headline.mark}


def same_on_one_device():
    """What ``same`` says of a program's products cut over eight devices, beside itself on one."""
    from tests.helpers.cases.row_parallel import program

    here = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), (program.params, program.cases["a"]))
    alone = replace(program, params=here[0], cases={"a": here[1]})
    return [sameness_report(same(*pair).cases).lines for pair in ((alone, program), (program, program))]


def main() -> None:
    folder = Path(sys.argv[1])
    select = Selection.parse(points=POINTS, phases="prefill,decode")
    made = trace(subject_on(ONE), folder / "run", PROMPTS[:1], select, TraceOptions(decode_steps=1))
    options = CompareOptions(accum=())
    errors = list(compare(made, options=options).errors)
    recorded = Recorded.of(made)

    def held(mesh, **changed):
        return told(across_meshes(recorded, errors, [mesh], lambda m: subject_on(m, **changed), options)[0])

    found = {
        "data": held(MeshShape(data=2)),
        "model": held(MeshShape(model=4)),
        "faulty": held(MeshShape(model=4), project=shard_left_out),
    }
    given = ["diagnose", str(folder / "run"), "--prompt", "a", "--invariance", "sharding"]
    found["codes"] = [run([*given, "--mesh", "data=2"]), run(given), run([*given, "--mesh", "model=16"])]
    found["same"] = same_on_one_device()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
