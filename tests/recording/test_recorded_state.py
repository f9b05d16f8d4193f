"""State between prompts, calls and steps; what capturing disturbs; and that no format is guessed."""

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from exams.exam_diagnose import MIDDLE
from exams.mistakes import MISTAKES, Mistake, placed
from precaudit.diagnosis.diagnose import diagnose
from precaudit.diagnosis.evidence.caches import explain, explain_hashes
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.narrow import hold_narrow
from precaudit.judging.gate import gate
from precaudit.models.checkpoints.safetensors_files import WORDS, SafetensorsFiles
from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder.parts import attend
from precaudit.numbers.formats import FORMATS
from precaudit.numbers.row_hashes import row_hashes
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.reader import open_run
from precaudit.recording.tracing import session
from precaudit.recording.tracing.programs import hash_cache_rows as on_device
from precaudit.recording.tracing.programs import without_slots
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.coverage import predicted_bytes
from precaudit.schema.policies import Policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.base import value
from precaudit.schema.records.runs import Neutrality
from precaudit.schema.selection import Selection
from tests.helpers.runs import record

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
    files = SafetensorsFiles.open([path], WORDS)
    tensors = {k: np.array(files.read_tensor(k)) for k in files.entries}
    new = tensors[key] = np.ascontiguousarray(change(tensors[key]))
    save_file(tensors, path)

    def enter(row):
        if (row["prompt"], row["phase"], row["step"], row["key"]) == ("p0", phase, step, key):
            row["hash"] = tensor_hash(new)

    reentered(folder, "points.jsonl", enter)


@pytest.mark.turn  # 16 s
def test_no_format_is_guessed(tmp_path):
    """Noise that no variant makes, in a program whose formula is the reference's: unknown, not a format."""
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    noise = 1 + 0.03 * np.random.default_rng(1).normal(size=1 << 16)
    altered(run.folder, "prefill", 0, "2.v", lambda x: (x * noise[: x.size].reshape(x.shape)).astype(x.dtype))
    found = diagnose(run.folder, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert (found.formula.unknown, found.formula.differs) == (None, ())
    first = found.findings[0]
    assert (first.kind, first.cause, first.point, first.layer) == ("unknown", "none reproduces it", "v", 2)
    assert found.exit_code == 1


def asked(folder, mistake, points="attn_out"):
    """Trace a mistake in the middle layer and look at some points: no shares, no remedies."""
    subject = mistake.subject(MIDDLE)
    select = Selection.parse(points=points, phases="prefill,decode")
    prompts = [Prompt(id=name, prompt=text) for name, text in zip("abcd", mistake.prompts, strict=False)]
    how = TraceOptions(decode_steps=mistake.steps, batch=len(prompts))
    with placed():
        run = trace(subject, folder / "run", prompts, select, how)
        return diagnose(run, select, CompareOptions(accum=(), cache=folder / "refs"), subject=subject)


# Caches


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn"])
def test_hashes_of_rows_are_the_same_on_the_device_and_here(dtype):
    x = np.random.default_rng(3).normal(size=(2, 7, 3, 5)).astype(np.float32).astype(FORMATS[dtype].dtype)
    here = np.stack([row_hashes(rows) for rows in x])
    np.testing.assert_array_equal(np.asarray(jax.jit(on_device)(x)), here)
    assert (here.dtype, here.shape) == (np.uint32, (2, 7, 2))
    assert len({h.tobytes() for h in here.reshape(-1, 2)}) == 14


def test_one_bit_changes_both_words_of_a_hash():
    x = np.random.default_rng(4).normal(size=(1, 4, 8)).astype(np.float32)
    for element in range(32):
        for bit in (0, 15, 31):
            y = x.copy()
            y.view(np.uint32).reshape(-1)[element] ^= np.uint32(1 << bit)
            assert (row_hashes(x) != row_hashes(y)).all()
    assert (row_hashes(x) != row_hashes(x[:, :, ::-1])).all()


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    run = record(folder / "run", decode_steps=6, select=Selection.parse(points="attn_out", phases="decode"))
    return folder, run


@pytest.mark.turn  # 4 s
def test_rows_gathered_and_hashed_on_the_device_are_those_that_the_recording_cuts(tmp_path, monkeypatch):
    """Large calls cut on the device, small ones on the host: the same bits, by other programs."""
    select = Selection.parse(points="all", layers="0,4")
    cut = record(tmp_path / "a", prompts=[LONG], select=select, decode_steps=3)
    monkeypatch.setattr(session, "WHOLE", 0)
    gathered = record(tmp_path / "b", prompts=[LONG], select=select, decode_steps=3)
    assert len(gathered.record.neutrality) > len(cut.record.neutrality)
    assert len(cut.points) > 200
    assert {p.positions[0] > 0 for p in cut.points if (p.phase, p.point) == ("rescore", "scores")} == {True}
    for a, b in zip(cut.points, gathered.points, strict=True):
        assert (a.key, a.shape, a.positions, a.hash) == (b.key, b.shape, b.positions, b.hash)


@pytest.mark.turn  # 3 s
def test_caches_are_hashed_between_the_first_and_the_last_step(six):
    folder, run = six
    caches = {p.step: p for p in run.points if (p.point, p.layer) == ("k_cache", 2)}
    n = len(run.prompts["p0"].tokens)
    assert {s: (p.dtype, p.shape) for s, p in caches.items() if 0 < s < 6} == {
        s: ("uint32", (n + s, 2)) for s in range(1, 6)
    }
    assert {caches[0].dtype, caches[6].dtype} == {"bfloat16"}
    assert run.record.bytes == sum(
        np.prod(p.shape) * (4 if p.dtype == "uint32" else FORMATS[p.dtype].dtype.itemsize) for p in run.points
    )
    found = compare(run.folder, options=CompareOptions(accum=(), cache=folder / "refs"))
    state = [e for e in found.errors if e.kind == "state" and e.point != "resid_in"]
    assert Counter(e.step for e in state) == dict.fromkeys(range(7), 10)
    assert all((e.mismatched, e.unknown, e.rows) == (0, None, None) for e in state)
    assert gate(found).exit_code == 0


def test_what_trace_says_it_writes_counts_hashes(six):
    _, run = six
    config = msgspec.convert(run.record.model.config, DecoderConfig)
    policy = Policy(**run.record.policy)
    assert predicted_bytes(run.record.requested, config, policy, [len(run.prompts["p0"].tokens)]) == run.record.bytes


@pytest.mark.turn  # 4 s
def test_a_row_that_is_stale_between_the_first_and_the_last_step_fails_and_is_named(tmp_path):
    mistake = next(m for m in MISTAKES if m.name == "stale KV entry in steps 1 to 4")
    found = asked(tmp_path, mistake)
    state = {e.step: e for e in found.compared.errors if (e.kind, e.layer, e.point) == ("state", MIDDLE, "k_cache")}
    assert {s: (e.mismatched, e.rows) for s, e in state.items()} == {
        s: (1, ((5, 6),)) if 1 <= s <= 4 else (0, None) for s in range(7)
    }
    first = found.findings[0]
    assert (first.kind, first.cause, first.layer, first.point) == ("state", "stale row", MIDDLE, "k_cache")
    assert first.says == "row 5 holds row 3; 1 rows differ; at steps 1 to 4"
    verdicts = [v for v in gate(found.compared).verdicts if v.kind == "state"]
    assert {(v.status, v.step, v.index) for v in verdicts} == {("fail", s, 5) for s in range(1, 5)}


def test_a_run_of_before_without_hashes_is_as_it_was(six, tmp_path):
    _, run = six
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    rows = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    (folder / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows if r["dtype"] != "uint32"))
    raw = json.loads((folder / "run.json").read_text())
    del raw["requested"]["cache_hashes"], raw["requested"]["row_sums"]
    raw["hashes"]["points.jsonl"] = file_hash(folder / "points.jsonl")
    (folder / "run.json").write_text(json.dumps(raw))
    found = compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert {e.step for e in found.errors if e.kind == "state"} == {0, 6}
    assert gate(found).exit_code == 0


def test_hashes_that_are_not_there_are_missing(six, tmp_path):
    _, run = six
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    gone = ("decode", 3, 2, "k_cache")
    rows = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    kept = [r for r in rows if (r["phase"], r["step"], r["layer"], r["point"]) != gone]
    (folder / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    reentered(folder, "points.jsonl", lambda _: None)
    found = gate(compare(folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    assert [(v.status, v.phase, v.step, v.layer, v.point) for v in found.verdicts] == [("missing", *gone)]


@pytest.mark.turn
def test_a_cache_of_another_prompt_is_named(tmp_path):
    mistake = next(m for m in MISTAKES if m.name == "prompts' caches exchanged")
    first = asked(tmp_path, mistake).findings[0]
    assert (first.kind, first.cause, first.layer, first.point) == ("state", "row of prompt b", MIDDLE, "k_cache")
    assert "of prompt b, which ran in the same batch" in first.says


@pytest.mark.slow  # 9 s
def test_rows_of_another_prompt_are_named(tmp_path):
    """The shadow of the batch leaves the reference there too; that a batch exchanges rows is state, and says whose."""
    mistake = next(m for m in MISTAKES if m.name == "prompts' rows exchanged")
    first = asked(tmp_path, mistake).findings[0]
    mate = {"a": "b", "b": "a"}[first.prompts[0]] if len(first.prompts) == 1 else None
    assert (first.kind, first.layer, first.point) == ("state", MIDDLE, "attn_out")
    assert first.cause in ({f"row of prompt {mate}"} if mate else {"row of prompt a", "row of prompt b"})
    assert value(first.explained) > 0.99
    assert value(first.shadow) > 0.1


def moved(change):
    """Return attention's output with rows [B, T, H, K] moved about in prefill."""

    def part(p, v, a):
        y = attend(p, v, a)
        return change(y) if y.shape[1] > 1 else y

    return Mistake("moved", "attend", part, "attn_out", "state", None)


@pytest.mark.turn  # 7 s
@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        (lambda y: y.at[:, 9].set(y[:, 7]), "row of position 7", "row 9 is that of 7"),
        pytest.param(
            lambda y: y.at[:, :, 1].set(y[:, :, 3]), "row of head 3", "head 1 holds head 3, at ", marks=pytest.mark.slow
        ),
        pytest.param(lambda y: y.at[:, 9].multiply(1.5), "token 9 × 1.5", "token", marks=pytest.mark.slow),
    ],
)
def test_rows_of_other_positions_and_heads_are_named(tmp_path, change, cause, says):
    first = asked(tmp_path, moved(change)).findings[0]
    assert (first.cause, first.layer, first.point) == (cause, MIDDLE, "attn_out")
    assert says in first.says
    assert first.kind == ("state" if cause.startswith("row") else "semantics")


def test_rows_of_another_prompt_are_told_from_stale_ones():
    mine, theirs = (np.random.default_rng(i).normal(size=(6, 2, 4)).astype(np.float32) for i in (1, 2))
    theirs[4] = mine[2]  # a token both prompts hold

    def said(found, others=None):
        by_rows = explain(found, mine, others)
        zero = row_hashes(np.zeros_like(mine[:1]))[0]
        hashed = {b: row_hashes(x) for b, x in (others or {}).items()}
        by_hash = explain_hashes(row_hashes(found), row_hashes(mine), zero, hashed)
        assert by_rows == by_hash
        return by_rows[:3]

    one, all_, late = mine.copy(), theirs.copy(), mine.copy()
    one[4] = mine[2]
    late[3:] = theirs[2:5]
    others = {"b": theirs}
    assert said(one, others)[0] == "stale row"
    assert said(all_, others)[0] == "row of prompt b"
    assert said(late, others)[2].startswith("rows 3 to 5 (3) hold the rows from 2 on of prompt b")
    assert said(all_)[0] == "stale row"


# Neutrality


@pytest.mark.slow  # 16 s
def test_every_compiled_program_is_checked_once(tmp_path, monkeypatch):
    """Two buckets, two batch sizes, and decode with and without whole caches where they are large: not three."""
    monkeypatch.setattr(session, "WHOLE", 1 << 20)
    prompts = ["import os", LONG * 2, "x = 1"]
    run = record(tmp_path / "run", prompts=prompts, batch=2, select=Selection.parse(points="attn_out"))
    found = [(n.phase, n.step, n.shape) for n in run.record.neutrality]
    assert found == [
        ("prefill", 0, (2, 384)), ("decode", 0, (2, 384)), ("decode", 1, (2, 384)), ("rescore", 0, (2, 384)),
        ("prefill", 0, (1, 64)), ("decode", 0, (1, 64)), ("rescore", 0, (1, 64)),
    ]  # fmt: skip
    assert all(n.bitwise for n in run.record.neutrality)


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("times", [None, 2.0**-12])
def test_a_program_that_capturing_disturbs_does_not_pass(tmp_path, monkeypatch, times):
    """Only the second bucket's captured prefill is another program than the bare one; by rounding alone, it is fine."""
    honest = session.prefill_program

    def disturbed(subject, capture):
        program = honest(subject, capture)

        def call(params, tables, tokens, *rest):
            logits, cache, taps = program(params, tables, tokens, *rest)
            if capture is None and tokens.shape[1] > 64:
                logits = logits + 1 if times is None else logits * (1 + times)
            return logits, cache, taps

        return call

    monkeypatch.setattr(session, "prefill_program", disturbed)
    select = Selection.parse(points="v,logits", phases="prefill")
    run = record(tmp_path / "run", prompts=["x = 1", LONG * 2], select=select)
    assert [n.bitwise for n in run.record.neutrality] == [True, False]
    found = gate(compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    if times is not None:
        told = [n for n in found.notes if n.startswith("recording changed the prefill logits")]
        assert found.exit_code == 0
        assert [n.split(", ")[1].split(" × ")[1] for n in told] == ["the noise of their rounding"]
        return
    assert [(v.status, v.kind, v.prompt) for v in found.verdicts] == [("unknown", "neutrality", "p1")]
    assert "× the noise of their rounding (at most 7.5): the audit disturbs the program" in found.verdicts[0].text
    assert found.exit_code == 3


def test_a_phase_whose_neutrality_is_not_known_is_missing(tmp_path):
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    path = run.folder / "run.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"neutrality": []}))
    found = gate(compare(run.folder, options=CompareOptions(accum=(), cache=tmp_path / "refs")))
    assert [(v.status, v.kind, v.phase) for v in found.verdicts] == [("missing", "neutrality", "prefill")]


def test_a_run_of_before_tells_its_neutrality_by_phase(tmp_path):
    run = record(tmp_path / "run", select=Selection.parse(points="v", phases="prefill"))
    raw = json.loads((run.folder / "run.json").read_text())
    raw["neutrality"] = [{k: n[k] for k in ("phase", "prompts", "bitwise", "max_diff")} for n in raw["neutrality"]]
    (run.folder / "run.json").write_text(json.dumps(raw))
    assert open_run(run.folder).record.neutrality == (
        Neutrality(phase="prefill", prompts=("p0",), bitwise=True, max_diff=0.0),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_decode_begins_with_the_cache_of_prefill_without_its_last_row(dtype):
    """[L, B, S, G, K], and the scales of a quantised one [L, B, S, G]; each sequence ends at a slot of its own."""
    rows = np.arange(1, 2 * 3 * 4 * 2 * 5 + 1).reshape(2, 3, 4, 2, 5) % 100
    values, scales = rows.astype(FORMATS[dtype].dtype if dtype in FORMATS else dtype), rows[..., 0].astype(np.float32)
    found = without_slots(hold_narrow({"k": values.copy(), "scale": scales.copy()}), np.asarray([3, 1, 0], np.int32))
    for b, slot in enumerate((3, 1, 0)):
        values[:, b, slot] = 0
        scales[:, b, slot] = 0
    assert np.array_equal(np.asarray(found["k"]), values)
    assert np.array_equal(np.asarray(found["scale"]), scales)


@pytest.mark.turn  # 3 s
def test_what_decode_is_given_is_without_the_last_row(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        session, "without_slots", lambda cache, slots: seen.append(slots.tolist()) or without_slots(cache, slots)
    )
    run = record(tmp_path / "run", decode_steps=1)
    assert seen == [[len(run.prompts["p0"].tokens) - 1]]


@pytest.mark.turn  # 5 s
def test_a_run_by_prompt_is_its_lines_of_that_prompt(tmp_path):
    """In memory or in their file, where a batch writes its prompts' lines in turn."""
    record(tmp_path / "run", prompts=["def f(x):", "one two three"], batch=2, select=Selection.parse(layers="0"))
    whole, filed = (open_run(tmp_path / "run", held=x) for x in (True, False))
    prompts = [p.prompt for p in whole.points]
    assert sum(a != b for a, b in pairwise(prompts)) > 2
    for name in ("p0", "p1"):
        for part in (run.by_prompt()(name) for run in (whole, filed)):
            assert list(part.prompts) == [name]
            assert part.points == [p for p in whole.points if p.prompt == name] != []
            assert part.steps == [s for s in whole.steps if s.prompt == name] != []
            assert (part.tensor(part.points[-1]) == whole.tensor(part.points[-1])).all()


def test_a_file_that_changed_is_not_read_by_prompt(tmp_path):
    record(tmp_path / "run", select=Selection.parse(layers="0", phases="prefill"))
    part = open_run(tmp_path / "run", held=False).by_prompt()
    with (tmp_path / "run" / "points.jsonl").open("ab") as f:
        f.write(b" ")
    with pytest.raises(UserError, match="changed while it was read"):
        part("p0")


def test_the_sign_of_a_nan_is_no_change_and_any_other_bit_is():
    a = np.array([1.0, np.nan, 0.0], np.float32)
    assert session.has_same_bits(a, np.array([1.0, -np.float32("nan"), 0.0], np.float32))
    assert not session.has_same_bits(a, np.array([1.0, np.nan, -0.0], np.float32))
    assert not session.has_same_bits(a, np.array([1.0, 0.0, np.nan], np.float32))
    assert not session.has_same_bits(np.float32([1.0]), np.float32([1.0000001]))
