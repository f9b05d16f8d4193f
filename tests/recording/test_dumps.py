"""Dumps of other frameworks: read, named by a map, held against runs of ours, and refused where they are wrong."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import precaudit
from precaudit import Selection, import_dump, open_run
from precaudit.cli import run as command
from precaudit.errors import UserError
from precaudit.recording.dumps.runs import open_imported
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.own import prefill_call
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.subject import load as load_subject
from precaudit.references.comparison.between import compare_runs
from precaudit.references.comparison.compare import compare
from precaudit.schema.digits import digits
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from tests.helpers.paths import EXAMPLES
from tests.helpers.runs import record

OWN = EXAMPLES / "own_decoder.py"
MAP = """
case = "p0"
tokens = "ids"
ignore = ["timing/"]
[points]
q = { name = "layers/{i}/query", axes = "1 t (h k) -> t h k", sizes = { h = 4 }, dtype = "bfloat16" }
k = { name = "rest/model.{i}.k", axes = "h t k -> t h k" }
attn_out = { name = "layers/{i}/attention/out", axes = "1 h t k -> t h k" }
logits = "head"
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours") / "run"
    return record(folder, select=Selection.parse(points="q,k,v,attn_out,logits:all"), decode_steps=2)


def tensors(run, phase="prefill", step=0):
    recorded = Recorded.of(run)
    return {(p.layer, p.point): run.tensor(r) for p, r in recorded.index.items() if (p.phase, p.step) == (phase, step)}


def dumped(folder, run, change=lambda _key, x: x):
    """Write what another framework might: .npy of bits, .npz in float32, .safetensors, other axes, things beside."""
    folder.mkdir()
    rest = {}
    for (layer, point), x in tensors(run).items():
        x = change((layer, point), x)
        here = folder / "layers" / str(layer)
        here.mkdir(parents=True, exist_ok=True)
        if point == "q":
            np.save(here / "query.npy", x.reshape(1, len(x), -1))
        elif point == "k":
            rest[f"model.{layer}.k"] = np.ascontiguousarray(x.transpose(1, 0, 2))
        elif point == "attn_out":
            np.savez(here / "attention.npz", out=x.astype(np.float32).transpose(1, 0, 2)[None])
        elif point == "logits":
            np.save(folder / "head.npy", x)
    save_file(rest, folder / "rest.safetensors")
    np.save(folder / "ids.npy", np.asarray(run.prompts["p0"].tokens)[None])
    (folder / "README.txt").write_text("what a dump says of itself")
    (folder / "timing").mkdir()
    np.save(folder / "timing" / "prefill.npy", np.ones(3))
    return folder


@pytest.fixture
def mapped(tmp_path):
    (tmp_path / "names.toml").write_text(MAP)
    return tmp_path / "names.toml"


def test_the_same_tensors_in_other_files_axes_and_formats_are_equal(ours, mapped, tmp_path):
    found = import_dump(dumped(tmp_path / "dump", ours), tmp_path / "theirs", mapped)
    assert found.record.left_out == ("README.txt",)
    assert len(found.record.tensors) == 3 * 5 + 1
    assert {t.dtype for t in found.record.tensors if t.point == "q"} == {"bfloat16"}
    for first, second in ((found.folder, ours.folder), (ours.folder, found.folder)):
        between = compare_runs(first, second)
        assert len(between.errors) == 16
        assert {(e.kind, e.max_diff, e.nonfinite, e.numberless) for e in between.errors} == {("pair", 0.0, 0, None)}
        told = [n for n in between.notes if "only" in n]
        assert f"only {ours.folder} has the points resid_in, attn_norm, v, final_norm" in told[0]
        assert f"only {ours.folder} has the calls decode 0, decode 1, decode 2, rescore 0" in told[1]
        assert not [n for n in between.notes if "token" in n]


def test_each_tensor_has_a_line_and_its_point_a_range(ours, mapped, tmp_path, capsys):
    """Also without a model to compare it with; with one the lines are of that comparison."""
    found = import_dump(dumped(tmp_path / "dump", ours), tmp_path / "theirs", mapped)
    lines = {(p.layer, p.point): p for p in found.points}
    assert lines.keys() == {(t.layer, t.point) for t in found.record.tensors}
    held = found.tensor(found.index()[Place("p0", "prefill", 0, 2, "attn_out")]).astype(np.float64)
    assert (lines[2, "attn_out"].axes, lines[2, "attn_out"].shape) == (("T", "H", "K"), held.shape)
    assert lines[2, "attn_out"].stats.max == held.max()
    for _ in range(2):
        assert command(["points", str(tmp_path / "theirs"), "--points", "attn_out"]) == 0
        row = capsys.readouterr().out.splitlines()[2]
        every = [found.tensor(t) for t in found.record.tensors if t.point == "attn_out"]
        assert f"  {digits(max(float(np.abs(x).max()) for x in every))}  " in row
        assert command(["compare", str(tmp_path / "theirs"), "--model", "tiny"]) == 0
        capsys.readouterr()
    (tmp_path / "theirs" / "points.jsonl").unlink()
    assert command(["points", str(tmp_path / "theirs")]) == 2
    assert "points.jsonl is missing: import the dump again" in capsys.readouterr().err


def test_what_differs_is_placed(ours, mapped, tmp_path):
    """One head of one layer × 1.01: by hand, 1 % there and nothing elsewhere."""

    def change(key, x):
        if key == (3, "attn_out"):
            x = x.astype(np.float32)
            x[:, 2] *= 1.01
        return x

    found = import_dump(dumped(tmp_path / "dump", ours, change), tmp_path / "theirs", mapped)
    errors = compare_runs(found.folder, ours.folder).errors
    off = [e for e in errors if e.max_diff]
    assert [(e.layer, e.point) for e in off] == [(3, "attn_out")]
    held, index = off[0].scopes["head"]["rel_l2"]
    assert (value(held), index) == (pytest.approx(0.01, rel=1e-5), 2)
    assert precaudit.compare(found, ours.folder).errors[0].kind == "pair"


def test_filters_of_a_dump_are_those_of_any_run(ours, mapped, tmp_path, capsys):
    dump = import_dump(dumped(tmp_path / "dump", ours), tmp_path / "theirs", mapped)
    found = precaudit.compare(dump, ours.folder, layers="1:3", points="q,k")
    assert isinstance(found, precaudit.Comparison)
    assert {(e.layer, e.point) for e in found} == {(i, p) for i in (1, 2) for p in "qk"}
    assert {e.layer for e in precaudit.compare(dump, ours.folder, positions="last:1").errors} == {0, 1, 2, 3, 4, None}
    for filters, says in (
        ({"points": "quark"}, "the run holds no point 'quark'"),
        ({"layers": "9"}, "layer 9 is out of range"),
        ({"phases": "decode"}, "the run holds no phase 'decode'"),
        ({"prompt": "p7"}, "the run holds no prompt 'p7'"),
        ({"positions": "999"}, "999"),
    ):
        with pytest.raises(UserError, match=says):
            precaudit.compare(dump, ours.folder, **filters)
    capsys.readouterr()
    assert command(["compare", str(dump.folder), str(ours.folder), "--layers", "2", "--points", "q", "--json"]) == 0
    assert [(e["layer"], e["point"]) for e in map(json.loads, capsys.readouterr().out.splitlines())] == [(2, "q")]


def test_what_is_not_finite_is_shown_and_never_equal(ours, mapped, tmp_path, capsys):
    """It is in no size: without a column of its own a row of NaN would read as one of zeros."""

    def change(key, x):
        return x * np.nan if key == (1, "attn_out") else x

    found = import_dump(dumped(tmp_path / "dump", ours, change), tmp_path / "theirs", mapped)
    (one,) = (e for e in compare_runs(found.folder, ours.folder).errors if e.nonfinite)
    assert (one.layer, one.point, one.nonfinite) == (1, "attn_out", one.n)
    capsys.readouterr()
    assert command(["compare", str(found.folder), str(ours.folder)]) == 0
    out = capsys.readouterr().out
    assert "1 of 16 tensors have NaN or infinity, first layer 1 attn_out" in out
    assert out.startswith(f"✗ attn_out of layer 1, prefill of {one.prompt}: {one.n:,} elements NaN or infinite")
    assert command(["compare", str(found.folder), str(ours.folder), "-v"]) == 0
    (row,) = (x for x in capsys.readouterr().out.splitlines() if x.split()[:2] == ["1", "attn_out"])
    assert f"{one.n:,}" in row.split()


def test_other_tokens_are_said_and_not_compared(ours, mapped, tmp_path):
    dump = dumped(tmp_path / "dump", ours)
    ids = np.load(dump / "ids.npy")
    ids[0, 4] += 1
    np.save(dump / "ids.npy", ids)
    found = compare_runs(import_dump(dump, tmp_path / "theirs", mapped).folder, ours.folder)
    assert "token ids agree up to position 3 and differ" in next(n for n in found.notes if "token" in n)
    n = tensors(ours)[0, "q"].shape
    assert {e.n for e in found.errors if e.point == "q"} == {4 * n[1] * n[2]}


def test_what_is_missing_is_named_and_never_passed_over(ours, mapped, tmp_path):
    dump = dumped(tmp_path / "dump", ours)
    (dump / "layers" / "2" / "query.npy").unlink()
    (dump / "ids.npy").unlink()
    np.save(dump / "extra.npy", np.ones(3))
    found = import_dump(dump, tmp_path / "theirs", mapped)
    assert set(found.record.left_out) == {"README.txt", "extra"}
    between = compare_runs(found.folder, ours.folder)
    assert [(e.layer, e.missing) for e in between.errors if e.missing] == [(2, "in the reference run, not in this one")]
    assert any("does not say which tokens it was fed" in n for n in between.notes)


def test_calls_are_prefill_and_steps_and_jsonl_needs_no_map(ours, tmp_path):
    """Lists of numbers by prompt, step and layer, with the audit's own statistics beside them."""
    decoded = tensors(ours, "decode", 1)
    lines = []
    for layer in range(5):
        x = decoded[layer, "attn_out"].astype(np.float64)
        lines.append({"prompt": "p0", "step": 1, "layer": layer, "attn_out": x.tolist(), "attn_ref_mae": 0.042})
    lines.append({"prompt": "p0", "prefill_last_top1": 127158, "gap": 0.958, "text": "left alone", "more": {"a": 1}})
    file = tmp_path / "audit.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = import_dump(file, tmp_path / "theirs")
    assert {(t.phase, t.step, t.dtype) for t in found.record.tensors} == {("decode", 1, "float64")}
    assert found.record.left_out == ("audit.jsonl: more",)
    compared = compare(ours.folder)
    between = compare_runs(found.folder, ours.folder)
    assert [(e.layer, e.max_diff) for e in between.errors] == [(i, 0.0) for i in range(5)]
    beside = {(b.reported.name, b.reported.layer): b.here for b in between.beside}
    mine = {e.layer: e.mae for e in compared.errors if Place.of(e)[:3] == ("p0", "decode", 1) and
            (e.kind, e.point) == ("local", "attn_out")}  # fmt: skip
    assert [beside["attn_ref_mae", i] for i in range(5)] == [mine[i] for i in range(5)]
    assert beside["prefill_last_top1", None] == compared.prefill_decode[0].prefill_top1
    assert beside["gap", None] is None


def test_steps_are_at_the_positions_after_the_prompt(ours, tmp_path):
    """A dump of prefill and of the step that was fed the first generated token, all tokens given."""
    dump = tmp_path / "dump"
    for call, held in enumerate((tensors(ours), tensors(ours, "decode", 1))):
        (dump / str(call)).mkdir(parents=True)
        np.save(dump / str(call) / "attn.npy", held[0, "attn_out"].astype(np.float32))
    fed = Recorded.of(ours).fed_tokens("p0")
    np.save(dump / "ids.npy", np.asarray(fed))
    entry = 'attn_out = { name = "{call}/attn", layer = 0 }'
    (tmp_path / "names.toml").write_text(f'case = "p0"\ntokens = "ids"\n[points]\n{entry}')
    found = compare_runs(import_dump(dump, tmp_path / "theirs", tmp_path / "names.toml").folder, ours.folder)
    assert [(e.phase, e.step, e.max_diff) for e in found.errors] == [("prefill", 0, 0.0), ("decode", 1, 0.0)]
    np.save(dump / "ids.npy", np.asarray([*fed[:-2], fed[-2] + 1]))
    again = import_dump(dump, tmp_path / "theirs", tmp_path / "names.toml", force=True)
    prefill, step = compare_runs(again.folder, ours.folder).errors
    assert prefill.max_diff == 0.0
    assert step.unknown == "the tokens of the two runs differ before this, or end"


def test_a_program_is_held_against_a_models_run(ours, tmp_path):
    """Our own decoder as a program, a batch of one: its first call is prefill, and bit for bit the same."""
    program = prefill_call(load_subject("tiny", device="cpu"), {"p0": ours.prompts["p0"].tokens})
    found = compare_runs(trace_program(program, tmp_path / "run").folder, ours.folder)
    known = [e for e in found.errors if e.numberless is None]
    assert {(e.phase, e.step) for e in known} == {("call", 0)}
    assert {e.point for e in known} >= {"q", "k", "v", "attn_out"}
    assert max(value(e.rel_l2) for e in known) < 0.05  # another length, another honest rounding


def test_a_placeholder_that_stands_twice_is_the_same_both_times(tmp_path):
    dump = tmp_path / "dump" / "layers"
    for here, name in ((0, 0), (1, 1), (1, 0)):
        (dump / f"{here}").mkdir(parents=True, exist_ok=True)
        np.save(dump / f"{here}" / f"q{name}.npy", np.full((2, 4, 8), here, np.float32))
    (tmp_path / "names.toml").write_text('points = { q = "layers/{i}/q{i}" }')
    found = import_dump(tmp_path / "dump", tmp_path / "theirs", tmp_path / "names.toml").record
    assert [(t.layer, t.source) for t in found.tensors] == [(0, "layers/0/q0"), (1, "layers/1/q1")]
    assert found.left_out == ("layers/1/q0",)


def test_numbers_alone_are_a_run_too(ours, tmp_path, capsys):
    file = tmp_path / "audit.jsonl"
    file.write_text('{"prompt": "p0", "step": 1, "layer": 2, "attn_ref_mae": 0.042, "attn_ref_max_diff": 0.286}\n')
    assert command(["import", str(file), "-o", str(tmp_path / "theirs")]) == 0
    compare(ours.folder)
    assert command(["compare", str(tmp_path / "theirs"), str(ours.folder)]) == 0
    out = capsys.readouterr().out
    assert "2 reported numbers" in out
    assert "attn_ref_max_diff" in out
    assert "2.9e-1" in out


def test_a_program_is_held_against_a_dump_and_against_itself(tmp_path):
    """Unrolled calls, steps of a scan, an output; another parameter shows where it is."""
    program = load_program(f"{OWN}:program")
    mine = trace_program(program, tmp_path / "mine")
    again = precaudit.compare(tmp_path / "mine", trace_program(program, tmp_path / "again").folder)
    assert {(e.kind, e.max_diff) for e in again.errors} == {("pair", 0.0)}
    assert len(again.errors) == 2 * 8 * (3 * sum(bool(p.stacked) for p in mine.record.points) + sum(
        not p.stacked for p in (*mine.record.points, *mine.record.outputs)))  # fmt: skip
    taps = mine.tensors("b", 2, "taps")
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "b.2.key.npy", taps["query~1"][1].astype(np.float32))
    (tmp_path / "names.toml").write_text('[points]\n"query~1" = { name = "{case}.{call}.key", layer = 1 }')
    found = import_dump(tmp_path / "dump", tmp_path / "theirs", tmp_path / "names.toml")
    assert [(t.phase, t.step, t.layer) for t in found.record.tensors] == [("decode", 2, 1)]
    between = compare_runs(found.folder, mine.folder)
    (one,) = (e for e in between.errors if e.numberless is None)
    assert (one.prompt, one.phase, one.step, one.layer, one.point, one.max_diff) == ("b", "call", 2, 1, "query~1", 0.0)


WRONG = {
    "no array is q": (lambda d: shutil.rmtree(d / "layers"), "", "no array is q"),
    "axes": (None, MAP.replace("1 t (h k) -> t h k", "t (h k) -> t h k"), "do not fit"),
    "sizes": (None, MAP.replace("h = 4", "h = 5"), "do not fit"),
    "rank": (None, MAP.replace('axes = "h t k -> t h k"', 'axes = "h t k -> t (h k)"'), "is not ['T', 'G', 'K']"),
    "format unknown": (None, MAP.replace(', dtype = "bfloat16"', ""), "its format is unknown"),
    "no such format": (None, MAP.replace("bfloat16", "bf17"), "dtype = 'bf17'"),
    "not held": (lambda d: np.save(d / "head.npy", np.full((3, 3), 1 + 2.0**-20)),
                 MAP.replace('"head"', '{ name = "head", dtype = "bfloat16" }'), "bfloat16 does not hold"),
    "a placeholder": (None, MAP.replace('"head"', '"head{layer}"'), "{layer} is none of"),
    "a field": (None, MAP.replace("sizes =", "size ="), "size"),
    "no TOML": (None, "[points", "names.toml"),
    "no points": (None, "[points]\n", "[points] is empty"),
    "twice": (lambda d: np.save(d / "head2.npy", np.ones((3, 3))), MAP.replace('"head"', '"head{call}"').replace(
        "[points]", 'calls = ["prefill"]\n[points]'), "names 1"),
    "objects": (lambda d: np.save(d / "head.npy", np.array([{}], object)), "", "head.npy"),
    "cut off": (lambda d: (d / "head.npy").write_bytes((d / "head.npy").read_bytes()[:200]), "", "head.npy"),
    "no zip": (lambda d: (d / "layers" / "1" / "attention.npz").write_bytes(b"PK"), "", "attention.npz"),
    "bad safetensors": (lambda d: (d / "rest.safetensors").write_bytes(b"x" * 40), "", "rest.safetensors"),
    "bad JSONL": (lambda d: (d / "a.jsonl").write_text("{\n"), "", "a.jsonl:1: not JSON"),
    "ragged": (lambda d: (d / "a.jsonl").write_text('{"layer": 1, "q": [[1], [1, 2]]}\n'), "", "a.jsonl:1: q"),
    "words": (lambda d: (d / "a.jsonl").write_text('{"layer": 1, "q": ["a"]}\n'), "", "not numbers"),
    "tokens": (lambda d: np.save(d / "ids.npy", np.ones((2, 5))), "", "token ids are integers"),
    "nothing": (lambda d: [shutil.rmtree(d), d.mkdir()], "", "no arrays here"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_dumps_and_maps_are_refused_in_a_line(ours, name, tmp_path, capsys):
    change, text, words = WRONG[name]
    dump = dumped(tmp_path / "dump", ours)
    (tmp_path / "names.toml").write_text(text or MAP)
    if change is not None:
        change(dump)
    given = [str(dump), "--map", str(tmp_path / "names.toml"), "-o", str(tmp_path / "theirs")]
    assert command(["import", *given]) == 2
    told = capsys.readouterr().err.splitlines()
    assert words in " ".join(told)
    assert len(told) == 1
    assert not (tmp_path / "theirs").exists()
    assert not list(tmp_path.glob(".*"))


def test_links_out_of_a_dump_are_not_followed(ours, mapped, tmp_path):
    dump = dumped(tmp_path / "dump", ours)
    np.save(tmp_path / "secret.npy", np.ones((3, 3)))
    (dump / "head.npy").unlink()
    (dump / "head.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(UserError, match="no array is logits"):
        import_dump(dump, tmp_path / "theirs", mapped)


def test_an_imported_run_is_whole_checked_and_taken_by_compare_alone(ours, mapped, tmp_path, capsys):
    found = import_dump(dumped(tmp_path / "dump", ours), tmp_path / "theirs", mapped)
    for verb in ("compare", "gate", "diagnose", "report"):
        assert command([verb, str(found.folder)]) == 2
        assert f"precaudit compare {found.folder} RUN" in capsys.readouterr().err
    again = ["import", str(tmp_path / "dump"), "--map", str(mapped), "-o", str(found.folder)]
    assert command(again) == 2
    assert "holds an imported run already" in capsys.readouterr().err
    assert command([*again, "--force"]) == 0
    assert not list(tmp_path.glob(".*"))
    file = found.folder / "tensors" / "0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="was altered since it was imported"):
        compare_runs(found.folder, ours.folder)
    manifest = found.folder / "run.json"
    manifest.write_text(manifest.read_text().replace("tensors/0", "../../etc/0"))
    with pytest.raises(UserError, match="outside the run"):
        open_imported(found.folder)


def test_formats_that_numpy_has_no_name_for_keep_their_bits(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    np.save(tmp_path / "resid_in.npy", x.view(np.uint8))
    entry = '{ name = "resid_in", dtype = "float8_e4m3fn", layer = 7 }'
    (tmp_path / "names.toml").write_text(f"[points]\nresid_in = {entry}")
    found = import_dump(tmp_path / "resid_in.npy", tmp_path / "run", tmp_path / "names.toml")
    (one,) = found.record.tensors
    assert (one.prompt, one.layer, one.dtype) == ("resid_in", 7, "float8_e4m3fn")
    assert found.tensor(one).tobytes() == x.tobytes()


def test_a_model_without_common_cases_or_points_is_refused(ours, tmp_path):
    np.save(tmp_path / "q.npy", np.ones((3, 4, 32), np.float32))
    (tmp_path / "names.toml").write_text('case = "other"\n[points]\nq = { name = "q", layer = 0 }')
    found = import_dump(tmp_path / "q.npy", tmp_path / "run", tmp_path / "names.toml")
    with pytest.raises(UserError) as refused:
        compare_runs(found.folder, ours.folder)
    assert str(refused.value) == (
        f"{found.folder} and {ours.folder} have no case in common: {found.folder} has other; {ours.folder} has p0. "
        "Name them alike: id in trace --prompts FILE, case in a dump's map, or cases of a Program"
    )
    (tmp_path / "names.toml").write_text('case = "p0"\n[points]\nq = "q"')
    found = import_dump(tmp_path / "q.npy", tmp_path / "again", tmp_path / "names.toml")
    (one,) = compare_runs(found.folder, ours.folder).errors
    assert one.missing == "not in the reference run"
    assert open_run(ours.folder).record.id
