"""State between prompts, calls and steps; what capturing disturbs; and that no format is guessed."""

import json

import numpy as np
from safetensors.numpy import save_file

from precaudit.checkpoints.safetensors_files import SafetensorsFiles
from precaudit.comparison.compare import Options, compare
from precaudit.diagnosis.diagnose import diagnose
from precaudit.judging.gate import gate
from precaudit.records import Neutrality
from precaudit.selection import Selection
from precaudit.store import file_hash, open_run, tensor_hash
from precaudit.tracing import session
from tests.programs import record

LONG = "def f(x):\n    return x + 1\n" * 6


def reentered(folder, name, change):
    """Rewrite a JSONL file of a run, ``change`` altering rows in place, and enter its hash."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for row in rows:
        change(row)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    raw = json.loads((folder / "run.json").read_text())
    raw["hashes"][name] = file_hash(folder / name)
    (folder / "run.json").write_text(json.dumps(raw))


def altered(folder, phase, step, key, change):
    """Replace a tensor of prompt p0 by what ``change`` makes of it, as if it had been recorded so."""
    path = folder / "tensors" / f"p0.{phase}.{step}.safetensors"
    files = SafetensorsFiles.open([path])
    tensors = {k: np.array(files.read(k)) for k in files.entries}
    new = tensors[key] = np.ascontiguousarray(change(tensors[key]))
    save_file(tensors, path)

    def enter(row):
        if (row["prompt"], row["phase"], row["step"], row["key"]) == ("p0", phase, step, key):
            row["hash"] = tensor_hash(new)

    reentered(folder, "points.jsonl", enter)


def test_no_format_is_guessed(tmp_path):
    """Noise that no variant makes, in a program whose formula is the reference's: unknown, not a format."""
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    noise = 1 + 0.03 * np.random.default_rng(1).normal(size=1 << 16)
    altered(run.folder, "prefill", 0, "2.v", lambda x: (x * noise[: x.size].reshape(x.shape)).astype(x.dtype))
    found = diagnose(run.folder, options=Options(accum=(), cache=tmp_path / "refs"))
    assert (found.formula.unknown, found.formula.differs) == (None, ())
    first = found.findings[0]
    assert (first.kind, first.cause, first.point, first.layer) == ("unknown", "none reproduces it", "v", 2)
    assert found.exit_code == 1


# Neutrality


def test_every_compiled_program_is_checked_once(tmp_path):
    """Two buckets, two batch sizes, and decode with and without whole caches: eight programs, not three."""
    prompts = ["import os", LONG, "x = 1"]
    run = record(tmp_path / "run", prompts=prompts, batch=2, select=Selection.parse(points="attn_out"))
    found = [(n.phase, n.step, n.shape) for n in run.record.neutrality]
    assert found == [
        ("prefill", 0, (2, 256)), ("decode", 0, (2, 256)), ("decode", 1, (2, 256)), ("rescore", 0, (2, 256)),
        ("prefill", 0, (1, 32)), ("decode", 0, (1, 32)), ("decode", 1, (1, 32)), ("rescore", 0, (1, 32)),
    ]  # fmt: skip
    assert all(n.bitwise for n in run.record.neutrality)


def test_a_program_that_capturing_disturbs_does_not_pass(tmp_path, monkeypatch):
    """Only the second bucket's captured prefill is another program than the bare one."""
    honest = session.prefill_program

    def disturbed(subject, capture):
        program = honest(subject, capture)

        def call(params, tables, tokens, *rest):
            logits, cache, taps = program(params, tables, tokens, *rest)
            return (logits + 1 if capture is None and tokens.shape[1] > 32 else logits), cache, taps

        return call

    monkeypatch.setattr(session, "prefill_program", disturbed)
    select = Selection.parse(points="v", phases="prefill")
    run = record(tmp_path / "run", prompts=["x = 1", LONG], select=select)
    assert [n.bitwise for n in run.record.neutrality] == [True, False]
    found = gate(compare(run, options=Options(accum=(), cache=tmp_path / "refs")))
    assert [(v.status, v.kind, v.prompt) for v in found.verdicts] == [("unknown", "neutrality", "p1")]
    assert "by up to 1: the audit disturbs the program" in found.verdicts[0].text
    assert found.exit_code == 3


def test_a_phase_whose_neutrality_is_not_known_is_missing(tmp_path):
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    path = run.folder / "run.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"neutrality": []}))
    found = gate(compare(run.folder, options=Options(accum=(), cache=tmp_path / "refs")))
    assert [(v.status, v.kind, v.phase) for v in found.verdicts] == [("missing", "neutrality", "prefill")]


def test_a_run_of_before_tells_its_neutrality_by_phase(tmp_path):
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    raw = json.loads((run.folder / "run.json").read_text())
    raw["neutrality"] = [{k: n[k] for k in ("phase", "prompts", "bitwise", "max_diff")} for n in raw["neutrality"]]
    (run.folder / "run.json").write_text(json.dumps(raw))
    assert open_run(run.folder).record.neutrality == (
        Neutrality(phase="prefill", prompts=("p0",), bitwise=True, max_diff=0.0),
    )
