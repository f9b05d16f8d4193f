"""The gate: what passes, what fails, and that nothing absent, stale or unknown passes."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace as replace_record
from safetensors.numpy import save_file

from precaudit.errors import UserError
from precaudit.judging.applied_rules import JUDGED
from precaudit.judging.baselines import drift, freeze, frozen_place, provenance, read_run_baseline, seal, stale
from precaudit.judging.gate import gate
from precaudit.judging.rules import judge, judge_pair
from precaudit.judging.verdicts import Verdict, counts, exit_code, inheriting
from precaudit.models.checkpoints.safetensors_files import WORDS, SafetensorsFiles
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.written import recall
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.schema.limits import default_limits
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.comparisons import PrefillDecodeRecord
from precaudit.schema.records.devices import device_kind
from precaudit.schema.records.errors import (
    ERROR_KINDS,
    AccumulationError,
    ForwardError,
    LocalError,
    WeightError,
    as_kind,
)
from precaudit.schema.records.lines import encode, read_lines
from precaudit.schema.selection import Selection
from tests.helpers.paths import ROOT
from tests.helpers.runs import record

LIMITS = default_limits()
PROMPTS = ["def f(x):\n", "import os"]
change = msgspec.structs.replace


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """One traced and compared run; tests that alter it copy its folder."""
    folder = tmp_path_factory.mktemp("honest")
    record(folder / "run", prompts=PROMPTS)
    return compare(folder / "run", options=CompareOptions(cache=folder / "refs", accum=("float16",)))


@pytest.fixture(scope="module")
def again(honest):
    """Return what compares an altered copy, with the references that are there."""
    return lambda folder: compare(folder, options=CompareOptions(cache=honest.folder.parent / "refs", accum=()))


@pytest.fixture
def copy(honest, tmp_path):
    return Path(shutil.copytree(honest.folder, tmp_path / "run"))


@pytest.fixture
def lines(honest, tmp_path):
    """Return the judged lines of errors.jsonl, and what writes some to a file."""

    def write(kept):
        path = tmp_path / "errors.jsonl"
        path.write_bytes(b"".join(x if isinstance(x, bytes) else encode(x) for x in kept))
        return path

    return [e for e in honest.errors if e.kind in JUDGED], write


@pytest.fixture
def frozen(honest, tmp_path):
    path = tmp_path / "baseline.jsonl"
    freeze(honest, path)
    return path


def edit(folder, name, keep=lambda _: True):
    """Rewrite a JSONL file of a run: ``keep`` may change a row in place, and says whether it stays."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows if keep(row)))
    return settle(folder, name)


def settle(folder, name):
    """Enter a file's hash in run.json, as if it had been recorded so."""

    def enter(raw):
        raw["hashes"][name] = file_hash(folder / name)

    return manifest(folder, enter)


def manifest(folder, change):
    raw = json.loads((folder / "run.json").read_text())
    change(raw)
    (folder / "run.json").write_text(json.dumps(raw))
    return folder


def retensor(folder, point, change):
    """Replace prompt p0's prefill tensor of layer 1 by what ``change`` makes of it; return nothing else altered."""
    path = folder / "tensors" / "p0.prefill.0.safetensors"
    files = SafetensorsFiles.open([path], WORDS)
    tensors = {k: np.array(files.read_tensor(k)) for k in files.entries}
    new = tensors[f"1.{point}"] = np.ascontiguousarray(change(tensors[f"1.{point}"]))
    save_file(tensors, path)

    def enter(row):
        if (row["prompt"], row["phase"], row["layer"], row["point"]) == ("p0", "prefill", 1, point):
            row |= {"shape": list(new.shape), "dtype": new.dtype.name, "hash": tensor_hash(new)}
            row["positions"] = [0, len(new)]
        return True

    return edit(folder, "points.jsonl", enter)


def places(found, status):
    return {v.place for v in found.verdicts if v.status == status}


def rewritten(path, **fields):
    """Change the first line of a baseline."""
    b = read_run_baseline(path)
    body = path.read_bytes().partition(b"\n")[2]
    record = change(b.record, **fields)
    digest = seal(record)
    digest.update(body)
    path.write_bytes(encode(change(record, sha256=digest.hexdigest())) + body)
    return path


def scaled(found, factor):
    """Return a comparison in which every error is ``factor`` times as large, and the emulated ones are as they were."""

    def larger(e):
        if not isinstance(e, LocalError | ForwardError):
            return e
        ratio = value(e.ratio) * factor if e.ratio is not None else None
        return change(e, rel_l2=value(e.rel_l2) * factor, ratio=ratio)

    return replace(found, errors=[larger(e) for e in found.errors])


def budgets(tmp_path, text):
    path = tmp_path / "budgets.toml"
    path.write_text(f'[[budget]]\nwhy = "measured"\n{text}\n')
    return path


# An honest run, and a file of its errors


def test_an_honest_run_passes(honest):
    judged = sum(e.kind in JUDGED for e in honest.errors)
    found = gate(honest.folder)
    assert found.counts == {"pass": judged + len(honest.prefill_decode)}
    assert (found.exit_code, found.verdicts, found.name, found.drift) == (0, (), honest.run.record.id, ())
    assert gate(honest).counts == found.counts


def test_the_errors_of_an_honest_run_pass_as_a_file(honest):
    found = gate(honest.folder / "errors.jsonl")
    assert found.counts == {"pass": sum(e.kind in JUDGED for e in honest.errors)}
    assert (found.exit_code, found.name) == (0, "errors.jsonl")


def test_a_second_record_of_one_place_is_refused(lines):
    errors, write = lines
    with pytest.raises(UserError, match=rf"errors\.jsonl:{len(errors) + 1}: a second local record of layer 0 q \(p0"):
        gate(write([*errors, errors[0]]))


def test_a_dropped_line_is_missing_against_a_baseline(lines, frozen):
    errors, write = lines
    found = gate(write(errors[:5] + errors[6:]), baseline=frozen)
    assert found.counts == {"missing": 1, "pass": len(errors) - 1}
    assert found.exit_code == 3
    assert (found.verdicts[0].kind, *found.verdicts[0].place) == frozen_place(errors[5])
    assert gate(write(errors), baseline=frozen).exit_code == 0


def test_nonfinite_wins_over_missing(lines, frozen):
    errors, write = lines
    found = gate(write([*errors[1:-1], change(errors[-1], nonfinite=2)]), baseline=frozen)
    assert found.counts == {"nonfinite": 1, "missing": 1, "pass": len(errors) - 2}
    assert found.exit_code == 1
    assert found.verdicts[0].status == "nonfinite"


def test_nothing_judged_is_no_pass(lines):
    errors, write = lines
    for kept in ([], [as_kind(errors[0], AccumulationError), as_kind(errors[0], WeightError)]):
        found = gate(write(kept))
        assert (found.counts, found.exit_code) == ({}, 3)


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", b'{"prompt":"p0"\n', b"\xff\n", b'{"prompt":NaN}\n'])
def test_a_line_that_is_no_record_is_named(lines, line):
    errors, write = lines
    with pytest.raises(UserError, match=r"errors\.jsonl:3: "):
        gate(write([*errors[:2], line, *errors[2:]]))


def test_a_long_file_streams(lines):
    errors, write = lines
    local = next(e for e in errors if e.kind == "local")
    made = [change(local, step=i, nonfinite=int(i % 500 == 7), missing="gone" if i % 400 == 9 else None)
            for i in range(2000)]  # fmt: skip
    found = gate(write(made))
    assert found.counts == {"nonfinite": 4, "missing": 5, "pass": 1991}
    assert Counter(v.status for v in found.verdicts) == {"nonfinite": 4, "missing": 5}
    assert {v.step for v in found.verdicts if v.status == "nonfinite"} == {7, 507, 1007, 1507}


# Coverage


@pytest.mark.parametrize(
    "gone", [("p0", "decode", 1, 3, "attn_out"), ("p1", "prefill", 0, 2, "attn_norm")], ids=["asked", "support"]
)
def test_a_tensor_that_is_not_there_is_missing(copy, again, gone):
    keep = lambda r: (r["prompt"], r["phase"], r["step"], r["layer"], r["point"]) != gone  # noqa: E731
    again(edit(copy, "points.jsonl", keep))
    found = gate(copy)
    assert gone in places(found, "missing")
    assert found.exit_code == 3
    assert Counter(v.place for v in found.verdicts)[gone] == 1
    assert set(found.counts) <= {"missing", "unknown", "pass"}
    assert {(v.prompt, v.phase, v.layer) for v in found.verdicts} <= {(gone[0], gone[1], gone[3])}


@pytest.mark.parametrize(
    ("field", "gone"), [("layer", 2), ("layer", None), ("phase", "decode"), ("phase", "prefill"), ("prompt", "p1")]
)
def test_a_part_that_is_not_there_is_missing_throughout(copy, again, honest, field, gone):
    expected = {(p.prompt, p.phase, p.step, p.layer, p.point) for p in honest.run.points if getattr(p, field) == gone}
    again(edit(copy, "points.jsonl", lambda r: r[field] != gone))
    found = gate(copy)
    assert expected
    assert expected <= places(found, "missing")
    assert found.exit_code == 3


def test_a_prompt_that_is_not_there_is_missing(copy, again):
    again(edit(copy, "prompts.jsonl", lambda r: r["id"] != "p1"))
    found = gate(copy)
    assert [(v.prompt, v.text) for v in found.verdicts] == [("p1", "the prompt is not in prompts.jsonl")]
    assert (found.counts["missing"], found.exit_code) == (1, 3)


def test_positions_that_are_not_there_are_missing(copy, again):
    again(retensor(copy, "attn_out", lambda x: x[:-2]))
    place = ("p0", "prefill", 0, 1, "attn_out")
    (v,) = [v for v in gate(copy).verdicts if v.place == place]
    assert (v.status, v.text) == ("missing", "2 of 10 positions are not there, first 8")


@pytest.mark.parametrize("point", ["q", "k", "v", "attn_out"])
@pytest.mark.parametrize("cut", [lambda x: x[..., :-2], lambda x: x[:, :-1], lambda x: x[:, :, None]])
def test_a_tensor_of_another_shape_fails_and_breaks_nothing(copy, again, point, cut):
    again(retensor(copy, point, cut))
    found = gate(copy)
    assert {v.text.partition(",")[0] for v in found.verdicts if v.status == "fail"} > set()
    assert [v.point for v in found.verdicts if v.status == "fail"] == [point]
    assert found.exit_code == 1


@pytest.mark.parametrize("name", ["points.jsonl", "steps.jsonl", "prompts.jsonl"])
def test_a_line_twice_is_refused(copy, name):
    first = (copy / name).read_text().splitlines()[0]
    with (copy / name).open("a") as f:
        f.write(first + "\n")
    with pytest.raises(UserError, match="a second line for"):
        open_run(settle(copy, name))


def test_a_pair_twice_is_refused(honest):
    with pytest.raises(UserError, match="a second line for"):
        gate(replace(honest, prefill_decode=[*honest.prefill_decode, honest.prefill_decode[0]]))


@pytest.mark.parametrize("scope", ["token", "head"])
def test_a_record_without_its_scopes_does_not_pass(honest, scope):
    e = next(e for e in honest.errors if e.kind == "local" and e.point == "q")
    cut = {k: v for k, v in (e.scopes or {}).items() if k != scope}
    assert judge(change(e, scopes=cut), LIMITS).status == "unknown"


def test_a_missing_record_excuses_no_failure(honest):
    errors = list(honest.errors)
    for i, e in enumerate(errors):
        if (e.kind, e.point, e.layer, e.phase) == ("local", "q", 0, "prefill"):
            errors[i] = Place(e.prompt, e.phase, 0, 0, "q").record(LocalError, "run", "fp64", missing="gone")
        if (e.kind, e.point, e.layer, e.phase) == ("local", "attn_out", 0, "prefill"):
            errors[i] = change(e, unexplained=change(e.unexplained, excess=1e6))
    found = gate(replace(honest, errors=errors))
    assert set(found.counts) == {"fail", "missing", "pass"}
    assert found.exit_code == 1


def test_a_file_may_end_in_blank_lines(lines):
    found, write = lines
    assert gate(write([*found, b"\n", b"  \n"])).exit_code == 0


def test_a_run_with_nan_or_gaps_is_no_baseline(honest, tmp_path):
    for fields in ({"nonfinite": 1}, {"missing": "gone"}):
        spoilt = replace(honest, errors=[change(honest.errors[0], **fields), *honest.errors[1:]])
        with pytest.raises(UserError, match="1 records are missing or not finite"):
            freeze(spoilt, tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_a_baseline_that_cannot_be_written_is_said(honest, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: .*; choose another -o"):
        freeze(honest, tmp_path / "file" / "b.jsonl")


def test_paths_may_be_texts(honest, frozen, tmp_path):
    path = budgets(tmp_path, 'points = "q"\nmetric = "rel_l2"\nratchet = 1.5')
    by_paths = gate(honest.folder, path, frozen)
    by_texts = gate(str(honest.folder), budgets=str(path), baseline=str(frozen))
    assert (by_texts.counts, by_texts.verdicts) == (by_paths.counts, by_paths.verdicts)
    for name, what in (("budgets", "no budgets at"), ("baseline", "no baseline at")):
        with pytest.raises(UserError, match=f"{what} .*nowhere"):
            gate(honest, **{name: str(tmp_path / "nowhere")})
        with pytest.raises(UserError, match=rf"{name}= takes a path, not dict"):
            gate(honest, **{name: {}})


def test_nothing_ratchets_from_a_stale_baseline(honest, frozen, tmp_path):
    path = budgets(tmp_path, 'points = "q"\nmetric = "rel_l2"\nratchet = 1.5')
    assert gate(honest, path, frozen).exit_code == 0
    found = gate(honest, path, rewritten(frozen, weights="0" * 64))
    assert {v.text for v in found.verdicts if v.point == "q"} == {"the baseline to ratchet from is stale"}
    assert set(found.counts) == {"stale", "pass"}


def test_another_format_than_the_policy_s_fails(copy, again):
    again(retensor(copy, "attn_out", lambda x: x.astype(np.float32)))
    found = gate(copy)
    (v,) = [v for v in found.verdicts if v.kind == "coverage"]
    assert (v.status, v.place) == ("fail", ("p0", "prefill", 0, 1, "attn_out"))
    assert v.text == "format float32, the policy says bfloat16"
    assert found.exit_code == 1


def test_another_policy_than_the_tensors_fails(copy, again):
    again(manifest(copy, lambda raw: raw["policy"].update(attn_out="float16")))
    found = gate(copy)
    failed = [v for v in found.verdicts if v.kind == "coverage"]
    assert {(v.status, v.point, v.text) for v in failed} == {
        ("fail", "attn_out", "format bfloat16, the policy says float16")
    }  # fmt: skip
    assert len(failed) == 2 * 5 * 5  # prompts, layers, calls
    assert found.exit_code == 1


def test_another_shape_fails(honest):
    at = next(i for i, p in enumerate(honest.run.points) if (p.phase, p.layer, p.point) == ("prefill", 1, "attn_out"))
    points = list(honest.run.points)
    points[at] = change(points[at], shape=(10, 3, 32))
    found = gate(replace(honest, run=replace(honest.run, points=points)))
    assert [(v.status, v.text) for v in found.verdicts] == [("fail", "shape [10, 3, 32], expected [10, 4, 32]")]
    assert found.exit_code == 1


def test_what_was_not_compared_is_missing(copy, again):
    shutil.rmtree(copy / "against", ignore_errors=True)
    (copy / "compare.json").unlink()
    select = Selection.parse(layers="1")
    compare(copy, select=select, options=CompareOptions(cache=copy.parent / "refs", accum=()))
    found = gate(copy)
    assert found.exit_code == 3
    assert {v.layer for v in found.verdicts} == {0, 2, 3, 4}
    assert {(v.status, v.text) for v in found.verdicts} == {
        ("missing", "no such record in errors.jsonl; compare again without filters")
    }  # fmt: skip
    again(copy)
    assert gate(copy).exit_code == 0


def test_a_record_taken_out_of_a_comparison_is_missing(honest):
    for kind in ("local", "forward"):
        at = next(i for i, e in enumerate(honest.errors) if e.kind == kind)
        found = gate(replace(honest, errors=honest.errors[:at] + honest.errors[at + 1 :]))
        assert [(v.kind, *v.place) for v in found.verdicts] == [frozen_place(honest.errors[at])]
        assert found.counts["missing"] == 1
        assert found.exit_code == 3


@pytest.mark.turn  # 5 s
def test_an_honest_run_of_decode_alone_passes(tmp_path, again):
    record(tmp_path / "run", prompts=PROMPTS[1:], select=Selection.parse(phases="decode", layers="0"))
    again(tmp_path / "run")
    assert gate(tmp_path / "run").exit_code == 0


def test_state_taken_out_of_a_comparison_is_missing(honest):
    found = gate(replace(honest, errors=[e for e in honest.errors if e.kind != "state"]))
    assert {v.point for v in found.verdicts} == {"k_cache", "v_cache", "resid_in"}
    assert found.exit_code == 3


@pytest.mark.parametrize("lost", ["steps", "pairs"])
def test_prefill_against_decode_that_is_not_there_is_missing(copy, again, lost):
    if lost == "steps":
        found = again(edit(copy, "steps.jsonl", lambda r: r["phase"] != "decode"))
    else:
        found = replace(recall(copy), prefill_decode=[])
    assert not found.prefill_decode
    assert gate(found).exit_code == 3


@pytest.mark.parametrize("name", ["errors.jsonl", "prefill_decode.jsonl"])
def test_errors_altered_after_compare_are_refused(copy, name):
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data.replace(b'"step":0', b'"step":1', 1))
    assert (copy / name).read_bytes() != data
    with pytest.raises(UserError, match="not compared yet, or changed since"):
        gate(copy)


def test_a_run_altered_after_compare_is_refused(copy):
    manifest(copy, lambda raw: raw.update(device="TPU v4"))
    with pytest.raises(UserError, match="not compared yet, or changed since"):
        gate(copy)


def test_what_is_no_compared_run_is_refused(copy, tmp_path):
    (copy / "compare.json").unlink()
    with pytest.raises(UserError, match="precaudit compare"):
        gate(copy)
    with pytest.raises(UserError, match="no run here"):
        gate(tmp_path / "nowhere")


def test_a_run_is_judged_under_budgets(honest, tmp_path):
    path = budgets(tmp_path, 'points = "attn_out"\nlayers = "-1"\nphases = ["prefill"]\nmetric = "rel_l2"\nlimit = 0')
    found = gate(honest, budgets=path)
    assert {(v.status, v.layer, v.point, v.phase, v.kind) for v in found.verdicts} == {
        ("fail", 4, "attn_out", "prefill", "local")
    }  # fmt: skip
    assert (found.counts["fail"], found.exit_code) == (2, 1)


@pytest.mark.parametrize("wrong", ['points = "scores"', 'points = "attn_norm"', 'points = "q"\nlayers = "5"'])
def test_a_budget_on_what_was_not_recorded_is_refused(honest, tmp_path, wrong):
    path = budgets(tmp_path, f'{wrong}\nmetric = "rel_l2"\nlimit = 1')
    with pytest.raises(UserError, match=rf"{path}:1: .*(match nothing recorded|out of range)"):
        gate(honest, budgets=path)


# Baselines


def test_a_baseline_comes_back_without_tensors(honest, frozen, tmp_path):
    alone = tmp_path / "alone" / "b.jsonl"
    alone.parent.mkdir()
    shutil.copy(frozen, alone)
    b = read_run_baseline(alone)
    judged = [e for e in honest.errors if e.kind in JUDGED]
    assert set(b.lines) == {frozen_place(e) for e in judged}
    assert all(b.lines[frozen_place(e)].rel_l2 == e.rel_l2 == b.lines[frozen_place(e)].first for e in judged)
    assert all(b.lines[frozen_place(e)].mae == e.mae for e in judged)
    r = honest.run.record
    assert (b.record.weights, b.record.policy, b.record.device) == (r.model.sha256, r.policy, r.device)
    assert (set(b.record.tokens), b.record.chain) == ({"p0", "p1"}, ())
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_a_run_passes_its_own_baseline(honest, frozen):
    found = gate(honest, baseline=frozen)
    assert (found.counts, found.exit_code, found.notes) == (gate(honest).counts, 0, gate(honest).notes)
    assert len(found.drift) == 10
    assert {(now, since) for now, since, _ in found.drift} == {(1.0, 1.0)}


def test_drift_is_told_largest_first(honest, frozen):
    found = gate(scaled(honest, 1.25), baseline=frozen).drift
    assert all(now == since == pytest.approx(1.25) for now, since, _ in found)
    one = next(i for i, e in enumerate(honest.errors) if e.kind == "forward" and e.rel_l2)
    errors = list(honest.errors)
    errors[one] = change(errors[one], rel_l2=errors[one].rel_l2 * 3)
    first = drift(read_run_baseline(frozen), errors)[0]
    text = f"{Place.of(errors[one]).text} [forward] rel_l2"
    assert (first.now, first.what) == (pytest.approx(3), text)


def test_a_baseline_is_no_file_of_records(frozen):
    with pytest.raises(UserError, match=r"is a baseline, and no error records: gate RUN --baseline"):
        gate(frozen)


@pytest.mark.parametrize("at", [0.001, 0.5, 0.8, 0.999])
def test_an_altered_baseline_is_refused(frozen, at):
    data = bytearray(frozen.read_bytes())
    i = next(i for i in range(int(len(data) * at), 0, -1) if chr(data[i]) in "12345678")
    data[i] += 1
    frozen.write_bytes(data)
    with pytest.raises(UserError, match="altered since it was frozen"):
        read_run_baseline(frozen)


def test_a_shortened_baseline_is_refused(frozen):
    frozen.write_bytes(b"".join(frozen.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="altered since it was frozen"):
        read_run_baseline(frozen)


@pytest.mark.parametrize("data", [None, b"", b"{}\n", b"text\n", b"\xff\xfe\n"])
def test_what_is_no_baseline_is_refused(honest, tmp_path, data):
    path = tmp_path / "b.jsonl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match="no baseline at" if data is None else "not a baseline"):
        gate(honest, baseline=path)


def test_a_baseline_is_not_replaced_by_accident(honest, frozen):
    before = frozen.read_bytes()
    with pytest.raises(UserError, match="--accept --why"):
        freeze(honest, frozen)
    with pytest.raises(UserError, match="needs --why"):
        freeze(honest, frozen, accept=True, why=" ")
    assert frozen.read_bytes() == before


def test_nothing_is_no_baseline(honest, tmp_path):
    with pytest.raises(UserError, match="errors to freeze"):
        freeze(replace(honest, errors=[e for e in honest.errors if e.kind == "accum"]), tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_a_chain_of_baselines_remembers_the_first(honest, frozen):
    one = read_run_baseline(frozen).record
    two = freeze(scaled(honest, 1.4), frozen, accept=True, why="new kernel")
    three = freeze(scaled(honest, 1.9), frozen, accept=True, why="another")
    assert [(x.sha256, x.why) for x in three.chain] == [(one.sha256, "new kernel"), (two.sha256, "another")]
    assert len({one.sha256, two.sha256, three.sha256}) == 3
    b = read_run_baseline(frozen)
    assert b.record == three
    moved = [e for e in honest.errors if e.kind in ("local", "forward") and e.rel_l2]
    assert moved
    for e in moved:
        line = b.lines[frozen_place(e)]
        assert (line.first, line.rel_l2) == (e.rel_l2, pytest.approx(1.9 * e.rel_l2))
    now, since, _ = drift(b, scaled(honest, 3.8).errors)[0]
    assert (now, since) == (pytest.approx(2), pytest.approx(3.8))


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("weights", {"weights": "0" * 64}, "weights 000000000000"),
        ("tokens", {"tokens": {"p0": "0" * 64}}, "token ids of prompt p0"),
        ("schema", {"schema": 0}, "schema 0, now 1"),
        ("device", {"device": "TPU v4"}, "device TPU v4, now cpu"),
    ],
)
def test_a_baseline_of_something_else_is_stale(honest, frozen, name, fields, words):
    found = gate(honest, baseline=rewritten(frozen, **fields))
    assert [(v.status, v.kind) for v in found.verdicts] == [("stale", "baseline")], name
    assert words in found.verdicts[0].text
    assert found.exit_code == 3


def test_a_baseline_of_another_policy_is_stale(honest, frozen):
    policy = honest.run.record.policy
    same = rewritten(frozen, policy=policy | {"name": "ours"})
    assert gate(honest, baseline=same).exit_code == 0  # a name is no setting
    found = gate(honest, baseline=rewritten(frozen, policy=policy | {"scores": "float32"}))
    assert [v.text for v in found.verdicts] == ["policy: scores float32, now bfloat16"]
    assert found.counts["stale"] == 1
    assert found.exit_code == 3


def test_everything_stale_is_told(honest, frozen):
    b = read_run_baseline(rewritten(frozen, weights="0" * 64, device="TPU v4", tokens={"p1": ""}))
    assert len(stale(b.record, provenance(honest.run), across_devices=False)) == 3
    assert len(stale(b.record, provenance(honest.run), across_devices=True)) == 2


def test_a_baseline_of_another_device_can_be_allowed(honest, frozen):
    rewritten(frozen, device="TPU v4")
    assert gate(honest, baseline=frozen, across_devices=True).exit_code == 0
    assert gate(honest, baseline=frozen).exit_code == 3


def test_devices_of_one_kind_are_alike():
    assert device_kind("TPU v4") == device_kind("TPU v5 lite") == "tpu"
    assert device_kind("cpu") == device_kind("cpu:0") == "cpu"
    assert device_kind("") == ""


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "AMD Instinct MI300X"])
def test_every_gpu_is_a_gpu(name):
    assert device_kind(name) == "gpu"


def test_other_versions_are_a_note(honest, frozen):
    versions = honest.run.record.versions
    old = {k: v for k, v in versions.items() if k != "numpy"} | {"jax": "0.1"}
    found = gate(honest, baseline=rewritten(frozen, versions=old))
    assert (found.exit_code, found.verdicts) == (0, ())
    (note,) = [n for n in found.notes if "versions differ" in n]
    assert f"jax 0.1 → {versions['jax']}" in note
    assert f"numpy absent → {versions['numpy']}" in note
    assert "jaxlib" not in note


def test_a_place_of_the_baseline_that_was_not_requested_is_missing(honest, tmp_path):
    wider = as_kind(honest.errors[-1], ForwardError, prompt="p7", layer=None, point="logits")
    path = tmp_path / "wider.jsonl"
    freeze(replace(honest, errors=[*honest.errors, wider]), path)
    found = gate(honest, baseline=path)
    assert [(v.kind, *v.place) for v in found.verdicts] == [frozen_place(wider)]
    assert found.exit_code == 3


def test_a_ratchet_holds_a_run_against_its_baseline(honest, frozen, tmp_path):
    path = budgets(tmp_path, 'points = ["attn_out", "logits"]\nkind = "forward"\nmetric = "rel_l2"\nratchet = true')
    assert gate(honest, budgets=path, baseline=frozen).exit_code == 0
    found = gate(scaled(honest, 4), budgets=path, baseline=frozen)
    held = {frozen_place(e) for e in honest.errors if e.kind == "forward" and e.point in ("attn_out", "logits")}
    worse = {
        frozen_place(e) for e in honest.errors if frozen_place(e) in held and e.rel_l2 and 4 * value(e.ratio) > 2
    }  # fmt: skip
    assert worse
    assert {(v.kind, *v.place) for v in found.verdicts if v.metric == "rel_l2" and v.status == "fail"} == worse
    alone = gate(honest, budgets=path)
    assert (alone.counts["missing"], alone.exit_code) == (len(held), 3)


# Verdicts


def local_of(honest):
    """Return a local record that holds everything a verdict is by."""
    e = next(e for e in honest.errors if e.kind == "local" and e.point == "attn_out" and e.phase == "prefill")
    assert {"token", "head", "channel"} <= set(e.scopes)
    return e


def at(e, path, new):
    """Return a record with one number replaced."""
    raw = json.loads(encode(e))
    *way, last = path
    inner = raw
    for key in way:
        inner = inner[key]
    assert inner[last] is not None
    inner[last] = new
    return msgspec.convert(raw, ERROR_KINDS)


LOCAL = [
    ("unexplained", "excess"), ("unexplained", "gain", "value"), ("unexplained", "gain", "noise"),
    ("unexplained", "mean", "value"), ("unexplained", "componentwise", 0), ("scopes", "token", "excess", 0),
    ("scopes", "head", "excess", 0), ("scopes", "channel", "excess", 0), ("scopes", "head", "gain", 0),
    ("scopes", "head", "mean", 0),
]  # fmt: skip


@pytest.mark.parametrize("path", LOCAL, ids=str)
def test_nan_in_a_local_number_never_passes(honest, path):
    e = at(local_of(honest), ("unexplained", "gain", "value"), 1e-9)  # a gain of 0 needs no noise
    assert judge(e, LIMITS).status == "pass"
    assert judge(at(e, path, "nan"), LIMITS).status == "fail"


@pytest.mark.parametrize("path", [p for p in LOCAL if p[-1] != "noise"], ids=str)
def test_a_large_local_number_fails_and_is_named(honest, path):
    found = judge(at(local_of(honest), path, 1e6), LIMITS)
    scope = path[1] if path[0] == "scopes" else "element" if path[1] == "componentwise" else "tensor"
    metric = path[2] if path[0] == "scopes" else path[1]
    assert (found.status, found.metric, found.scope) == ("fail", metric, scope)


@pytest.mark.parametrize("path", [("ratio",), ("distribution", "kl", 0), ("distribution", "kl_noise", 0)], ids=str)
def test_nan_in_a_forward_number_never_passes(honest, path):
    e = next(e for e in honest.errors if e.kind == "forward" and e.point == "logits")
    assert judge(e, LIMITS).status == "pass"
    assert judge(at(e, path, "nan"), LIMITS).status == "fail"


@pytest.mark.parametrize("field", ["rel_l2", "mae", "max_diff"])
def test_nan_in_any_size_never_passes(honest, field):
    assert judge(at(local_of(honest), (field,), "nan"), LIMITS).status != "pass"


def test_nan_at_any_position_never_passes(honest):
    e = next(e for e in honest.errors if e.kind == "forward" and e.point == "logits" and e.phase == "rescore")
    assert len(e.distribution.kl) > 1
    for i, position in enumerate(e.distribution.positions):
        found = judge(at(e, ("distribution", "kl", i), "nan"), LIMITS)
        assert (found.status, found.value, found.index) == ("fail", "nan", position)


def test_a_distribution_of_unequal_lengths_is_refused(lines):
    errors, write = lines
    e = next(e for e in errors if e.kind == "forward" and e.point == "logits")
    wrong = change(e, distribution=change(e.distribution, kl_noise=()))
    with pytest.raises(UserError, match=r"errors\.jsonl:1"):
        gate(write([wrong]))


def test_a_record_without_numbers_is_unknown(honest):
    e = local_of(honest)
    assert judge(change(e, unexplained=None), LIMITS).status == "unknown"
    assert judge(change(e, unexplained=change(e.unexplained, excess=None)), LIMITS).status == "unknown"
    assert judge(as_kind(e, ForwardError, ratio=None), LIMITS).status == "unknown"
    assert judge(change(e, unknown="no emulation"), LIMITS).text == "no emulation"


def test_nonfinite_and_missing_are_not_judged_by_size(honest):
    e = local_of(honest)
    assert judge(change(e, nonfinite=1), LIMITS).status == "nonfinite"
    assert judge(change(e, missing="gone", nonfinite=1), LIMITS).status == "missing"
    assert judge(as_kind(e, AccumulationError, nonfinite=1), LIMITS) is None


def test_a_cache_that_differs_in_one_element_fails(honest):
    e = next(e for e in honest.errors if e.kind == "state" and e.point == "k_cache")
    assert judge(e, LIMITS).status == "pass"
    found = judge(at(change(e, mismatched=1), ("scopes", "token", "max_diff"), (0.5, 3)), LIMITS)
    assert (found.status, found.metric, found.value, found.index) == ("fail", "mismatched", 1.0, 3)
    assert judge(change(e, mismatched=None), LIMITS).status == "unknown"


def pair(honest, **fields):
    return change(honest.prefill_decode[0], **fields)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "pass"),
        ({"match": False, "near_tie": True}, "pass"),
        ({"match": False, "near_tie": False}, "fail"),
        ({"match": False, "near_tie": None}, "unknown"),
        ({"match": False, "near_tie": None, "f64_match": None}, "unknown"),
        ({"match": True, "near_tie": None, "f64_match": None}, "unknown"),
        ({"match": True, "near_tie": True, "f64_match": False}, "pass"),
        ({"match": True, "near_tie": False, "f64_match": False}, "fail"),
        ({"kl": 6e-3, "kl_noise": 1e-4}, "pass"),
        ({"kl": 0.79, "kl_noise": 1e-4}, "fail"),
        ({"kl": 0.79, "kl_noise": 1e-4, "match": False, "near_tie": True}, "fail"),
    ],
)
def test_prefill_against_decode(honest, fields, status):
    found = judge_pair(pair(honest, **fields))
    assert (found.status, found.kind, found.phase) == (status, "prefill/decode", "decode")


def test_kl_of_views_with_formulas_of_their_own_is_not_judged(honest):
    one = pair(honest, kl=0.79, kl_noise=1e-4)
    assert judge_pair(one).text.startswith("KL of 0.79 nats at position ")
    assert judge_pair(change(one, f64_against_top1=one.prefill_top1)).status == "pass"  # RoPE by two lengths


def test_a_mismatch_makes_the_gate_fail(honest):
    wrong = pair(honest, match=False, near_tie=False, decode_top1=7)
    found = gate(replace(honest, prefill_decode=[wrong, *honest.prefill_decode[1:]]))
    assert (found.counts["fail"], found.exit_code) == (1, 1)
    assert "decode 7" in found.verdicts[0].text


def verdict(point, status="fail", kind="local", layer=1, phase="prefill", prompt="p0", step=0):
    return Verdict(status=status, kind=kind, prompt=prompt, phase=phase, step=step, layer=layer, point=point)


@pytest.mark.parametrize("cause", ["fail", "nonfinite", "missing"])
def test_a_failing_input_excuses_no_local_error(cause):
    """A local error is computed from recorded inputs: RoPE that is wrong does not make attention wrong."""
    given = [verdict("q", cause), verdict("attn_out"), verdict("resid_out"), verdict("final_norm", layer=None)]
    given += [verdict("k_cache", kind="state", phase="decode"), verdict("attn_out", phase="decode")]
    assert [v.status for v in inheriting(given)] == [cause, *["fail"] * 5]


@pytest.mark.parametrize("between", ["scores", "probs"])
def test_attention_that_closes_from_what_failed_on_the_way_is_suspect(between):
    closes = replace_record(verdict("attn_out"), inherits="probs")
    assert list(inheriting([verdict(between), closes]))[1].status == "input suspect"
    for elsewhere in (verdict("q"), verdict(between, layer=2), verdict(between, "unknown"), verdict(between, step=1)):
        assert list(inheriting([elsewhere, closes]))[1].status == "fail"
    assert list(inheriting([verdict(between), verdict("attn_out")]))[1].status == "fail"


def test_a_cause_that_is_only_unknown_flags_nothing():
    given = [verdict("q", "unknown"), verdict("attn_out")]
    assert list(inheriting(given)) == given


@pytest.mark.parametrize("status", ["missing", "stale", "unknown", "pass"])
def test_what_follows_a_failure_and_was_not_judged_is_not_suspect(status):
    """An input that fails excuses a failure after it, never the absence of a verdict."""
    later = Verdict(status=status, kind="forward", prompt="a", phase="prefill", layer=3, point="resid_out")
    first = Verdict(status="nonfinite", kind="local", prompt="a", phase="prefill", layer=1, point="v")
    assert [v.status for v in inheriting([first, later])] == ["nonfinite", status]


def test_nan_is_inherited_downstream_only():
    given = [verdict("q", "nonfinite", layer=2), verdict("attn_out", "nonfinite", layer=3)]
    given += [verdict("attn_out", "nonfinite", layer=1)]
    assert [v.status for v in inheriting(given)] == ["input suspect", "input suspect", "nonfinite"]
    assert exit_code(v.status for v in inheriting(given)) == 1


def test_forward_errors_after_a_fault_are_suspect():
    given = [verdict("q", layer=2), verdict("attn_out", kind="forward", layer=1)]
    given += [verdict("q", kind="forward", layer=2), verdict("logits", kind="forward", layer=None)]
    given += [verdict("q", kind="forward", layer=0, phase="decode"), verdict("logits", kind="rescore/decode")]
    found = [v.status for v in inheriting(given)]
    assert found[:4] == ["fail", "fail", "input suspect", "input suspect"]
    alone = [verdict("attn_out", kind="forward"), verdict("logits", kind="forward", layer=None)]
    assert list(inheriting(alone)) == alone  # a forward error explains none


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["pass"], 0),
        ([], 3),
        (["pass", "missing"], 3),
        (["pass", "stale"], 3),
        (["pass", "unknown"], 3),
        (["pass", "input suspect"], 3),
        (["missing", "stale", "unknown", "fail"], 1),
        (["pass", "missing", "nonfinite"], 1),
    ],
)
def test_exit_codes(statuses, code):
    given = [verdict("q", status) for status in statuses]
    assert exit_code(v.status for v in given) == code
    assert counts(given) == Counter(statuses)


def test_two_runs_beside_each_other_are_not_gated(honest):
    with pytest.raises(UserError, match="differences of two runs, which no limit is for: gate one of the runs"):
        gate(replace(honest, against=honest.run))


def test_run_and_file_agree_on_an_injected_fault(honest, lines):
    errors, write = lines
    i = next(i for i, e in enumerate(errors) if e.kind == "local" and e.point == "q" and e.layer == 2)
    errors = [*errors[:i], at(errors[i], ("unexplained", "excess"), 50.0), *errors[i + 1 :]]
    for found in (gate(write(errors)), gate(replace(honest, errors=errors))):
        (v,) = found.verdicts
        assert (v.status, v.layer, v.point, v.value, v.limit) == ("fail", 2, "q", 50.0, LIMITS.narrow.tensor.value)
        assert v.policy == "bf16"
        assert found.exit_code == 1


def test_what_the_gate_reads_is_what_compare_wrote(honest):
    assert recall(honest.folder).errors == read_lines(honest.folder / "errors.jsonl", ERROR_KINDS)
    pairs = read_lines(honest.folder / "prefill_decode.jsonl", PrefillDecodeRecord)
    assert pairs == honest.prefill_decode


def test_a_run_compared_elsewhere_is_judged(honest, monkeypatch):
    """Another processor's BLAS, or a later precaudit, computes no record again to judge it."""
    monkeypatch.setattr("precaudit.recording.runs.written.computed_by", lambda _: "0" * 64)
    assert gate(honest.folder).exit_code == 0


def test_gate_imports_no_decoder():
    code = (
        "import sys; import precaudit.judging.gate;"
        "never = 'numpy_decoder', 'jax_decoder', 'precaudit.models.checkpoints';"
        "print([m for m in sys.modules if m == 'jax' or any(x in m for x in never)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_gate_needs_no_numerics(honest, frozen, tmp_path):
    """A run, a file of its errors, a baseline, budgets and every report are judged and written without NumPy or JAX."""
    never = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'ml_dtypes', 'jax', 'pandas', 'transformers')))"
    run, reports = str(honest.folder), ["--junit", str(tmp_path / "g.xml"), "--markdown", str(tmp_path / "g.md")]
    budgets = str(ROOT / "budgets.toml")
    for arguments in ([run, *reports, "--github", "--baseline", str(frozen)], [str(honest.folder / "errors.jsonl")],
                      [run, "--budgets", budgets]):  # fmt: skip
        code = f"{never}; from precaudit.cli import run; sys.exit(run({['gate', *arguments]!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode in (0, 1, 3), done.stderr
        assert "verdicts: " in done.stdout, done.stdout


def test_a_baseline_of_before_the_embedding_s_factor_had_a_key(honest, frozen):
    """What was frozen without the key was exact, which in other families than Gemma is what runs now."""
    policy = honest.run.record.policy
    assert policy["embed_factor"] == "exact"
    before = read_run_baseline(rewritten(frozen, policy={k: v for k, v in policy.items() if k != "embed_factor"}))
    assert stale(before.record, provenance(honest.run)) == []
    changed = msgspec.structs.replace(honest.run.record, policy=policy | {"embed_factor": "published"})
    now = provenance(replace(honest.run, record=changed))
    assert stale(before.record, now) == ["policy: embed_factor exact, now published"]
