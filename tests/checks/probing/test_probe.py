"""Products of scores in every way: their errors against FP64 made here, what they were made of, limits, bad input."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.checks.probing.emulations import emulations, name_emulation, named_integers
from precaudit.checks.probing.limits import parse_sentences
from precaudit.checks.probing.measuring import ENOUGH, measure_shape
from precaudit.checks.probing.shapes import FORMATS, ScoreShape, operands, parse_shape
from precaudit.checks.probing.timing import quartiles, time_in_rounds
from precaudit.checks.probing.ways import product_ways
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from precaudit.reports.probe import probe_report
from precaudit.schema.records.base import value
from precaudit.schema.records.lines import read_lines
from precaudit.schema.records.probe import ProbeRecord
from tests.helpers.hostile import Page, tables
from tests.helpers.tpus import needs_libtpu

DECODE = "1,1,1,128x512"


def exactly(q, k):
    """Scores in FP64, by NumPy's own widening."""
    return np.einsum("bhqd,bhsd->bhqs", np.asarray(q).astype(np.float64), np.asarray(k).astype(np.float64))


def cut(x, bits):
    """Return float64 values of float32 to so many significant bits, to nearest even: by scaling, not by bits."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(np.where(x == 0, 1.0, x)))) - bits + 1)
    return np.round(x / scale) * scale


def in_passes(q, k, count):
    """Scores of bfloat16 parts, as JAX's documentation has the products of one, three and six passes."""
    parts = []
    for x in (q.astype(np.float64), k.astype(np.float64)):
        high = cut(x, 8)
        middle = cut(x - high, 8)
        parts.append((high, middle, cut(x - high - middle, 8)))
    pairs = [(i, j) for i in range(3) for j in range(3) if i + j < {1: 1, 3: 2, 6: 3}[count]]
    return sum(exactly(parts[0][i], parts[1][j]) for i, j in pairs)


@pytest.fixture(scope="module")
def probed():
    return precaudit.probe([DECODE], timed=False, device="cpu")


def of(probed, form, way):
    return next(r for r in probed.records if (r.operands, r.way) == (form, way) and r.target is None)


# What a device makes


@pytest.mark.turn  # 5 s
def test_scores_in_bfloat16_lose_the_digits_that_scores_in_float32_keep(probed):
    narrow, wide = of(probed, "bfloat16", "@"), of(probed, "bfloat16", "preferred_element_type=float32")
    assert (narrow.dtype, wide.dtype) == ("bfloat16", "float32")
    assert 1e-3 < value(narrow.rel_l2) < 2.5e-3  # one rounding to 8 bits: 2^-8/√3 of a value at most
    assert value(wide.rel_l2) < 3e-7
    assert value(narrow.rel_l2) / value(wide.rel_l2) > 1e3
    assert value(narrow.max_diff) > 0.03  # half an ulp of scores near 20
    assert wide.honoured == "yes"


@pytest.mark.turn  # 15 s
def test_errors_are_against_fp64_of_the_operands_as_they_are(probed):
    for form in ("bfloat16", "float16", "float32"):
        q, k = operands(parse_shape(DECODE), form)
        true = exactly(q, k)
        found = np.asarray(jnp.asarray(q) @ jnp.swapaxes(jnp.asarray(k), -1, -2)).astype(np.float64)
        r = of(probed, form, "@")
        assert value(r.max_diff) == pytest.approx(np.abs(found - true).max(), rel=0.5)  # eager sums in another order
        assert value(r.rel_l2) == pytest.approx(np.linalg.norm(found - true) / np.linalg.norm(true), rel=0.5)
        assert r.worst is not None
        assert value(r.worst.reference) == pytest.approx(float(true[r.worst.index]), rel=1e-12)


@pytest.mark.turn  # 11 s
def test_a_cpu_takes_presets_and_replaces_them(probed):
    assert of(probed, "float32", "BF16_BF16_F32").honoured == "replaced"
    assert of(probed, "float32", "BF16_BF16_F32").made == ("float32",)
    assert of(probed, "float32", "highest").honoured == "yes"
    assert of(probed, "float32", "default").honoured is None  # left to the device
    refused = of(probed, "bfloat16", "TF32_TF32_F32")
    assert refused.unknown is not None
    assert refused.unknown.startswith("refused: ")
    assert refused.rel_l2 is None
    assert refused.honoured is None


def test_integers_are_cut_where_the_scores_are(probed):
    kept, cut8 = of(probed, "int8", "preferred_element_type=int32"), of(probed, "int8", "@")
    assert (kept.dtype, kept.rel_l2, kept.made) == ("int32", 0.0, ("int32",))
    assert (cut8.dtype, cut8.made) == ("int8", ("int32, cut to 8 bits",))
    assert value(cut8.rel_l2) > 0.5
    assert cut8.max_ulp is None


def test_every_setting_that_jax_has_is_a_way():
    for form in FORMATS:
        names = [w.name for w in product_ways(form)]
        assert names[0] == "@"
        assert set(names) >= {"default", "high", "highest", *jax.lax.DotAlgorithmPreset.__members__}
        assert len(set(names)) == len(names)


# What it was made of


def drawn(form="float32", queries=8, depth=96, keys=40):
    return operands(ScoreShape(1, 2, queries, depth, keys), form, seed=7)


def made(q, k, scores, asked=None):
    return name_emulation(scores, scores.dtype.name, emulations(q, k), asked)


@pytest.mark.parametrize(("count", "name"), [(1, "1 bfloat16 pass"), (3, "3 bfloat16 passes")])
def test_passes_are_told_apart(count, name):
    q, k = drawn()
    scores = in_passes(q, k, count).astype(np.float32)
    assert made(q, k, scores, name) == ((name,), "yes")
    assert made(q, k, scores, "float32") == ((name,), "replaced")
    assert made(q, k, scores) == ((name,), None)


def test_six_passes_and_float32_are_not_told_apart():
    q, k = drawn()
    both = ("float32", "6 bfloat16 passes")
    assert made(q, k, in_passes(q, k, 6).astype(np.float32), both[1]) == (both, "yes")
    assert made(q, k, exactly(q, k).astype(np.float32), "float64") == (("float64",), "yes")


def test_tf32_is_told_from_bfloat16_and_float32():
    q, k = drawn()
    scores = exactly(cut(q.astype(np.float64), 11), cut(k.astype(np.float64), 11)).astype(np.float32)
    assert made(q, k, scores, "1 bfloat16 pass") == (("1 TF32 pass",), "replaced")


@pytest.mark.parametrize("order", ["in turn", "pairs", "largest first"])
def test_float32_sums_in_any_order_are_float32(order):
    q, k = drawn(depth=256)
    terms = q[:, :, :, None, :] * k[:, :, None, :, :]
    if order == "largest first":
        terms = np.take_along_axis(terms, np.argsort(-np.abs(terms), -1), -1)
    if order == "pairs":
        while terms.shape[-1] > 1:
            terms = terms[..., ::2] + terms[..., 1::2]
        total = terms[..., 0]
    else:
        total = np.zeros(terms.shape[:-1], np.float32)
        for i in range(terms.shape[-1]):
            total = total + terms[..., i]
    assert total.dtype == np.float32
    assert made(q, k, total, "float32") == (("float32",), "yes")
    assert made(q, k, total, "float64") == (("float32",), "replaced")


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_narrow_sums_and_products_are_told_from_one_rounding(form):
    q, k = drawn(form)
    dtype = q.dtype
    terms = exactly_terms(q, k).astype(dtype)
    total = np.zeros(terms.shape[:-1], dtype)
    for i in range(terms.shape[-1]):
        total = (total.astype(np.float32) + terms[..., i].astype(np.float32)).astype(dtype)
    assert made(q, k, total, f"sums in {form}") == ((f"sums in {form}",), "yes")
    products = terms.astype(np.float64).sum(-1).astype(np.float32)
    assert made(q, k, products, "float32") == ((f"products in {form}",), "replaced")
    once = exactly(q, k).astype(dtype)
    assert made(q, k, once, f"sums in {form}") == (("float32",), "replaced")
    assert made(q, k, once, "float32") == (("float32",), "yes")


def exactly_terms(q, k):
    return q.astype(np.float64)[:, :, :, None, :] * k.astype(np.float64)[:, :, None, :, :]


def test_a_sum_of_one_product_is_a_narrow_sum_and_one_rounding():
    q, k = drawn("float16", depth=1)
    asked = "sums in float16"
    assert made(q, k, exactly(q, k).astype(np.float16), asked) == (("float32", asked), "yes")


def test_few_scores_do_not_tell_narrow_sums_from_others():
    """Of ten scores in bfloat16 float16 sums move none or one: nothing is said to be replaced."""
    q, k = operands(ScoreShape(1, 1, 1, 16, 10), "bfloat16", seed=3)
    scores, asked = exactly(q, k).astype(q.dtype), "sums in float16"
    assert made(q, k, scores, asked) == (("float32", asked), "yes")
    q, k = drawn("bfloat16", depth=16)
    assert made(q, k, exactly(q, k).astype(q.dtype), asked) == (("float32",), "replaced")


def test_what_nothing_makes_is_not_known():
    q, k = drawn()
    scores = (exactly(q, k) * 1.001).astype(np.float32)
    assert made(q, k, scores, "float32") == ((), "undecided")
    scores = exactly(q, k).astype(np.float32)
    scores[0, 0, 0, 0] = np.nan
    assert made(q, k, scores, "float32") == ((), "undecided")


def test_the_deviation_of_sums_is_that_of_sums_in_random_orders():
    """Float32 sums of 200 random orders, against FP64: a half to all of what is allowed."""
    q, k = drawn(queries=4, depth=200, keys=4)
    terms, random = exactly_terms(q, k), np.random.default_rng(1)
    off = []
    for _ in range(200):
        total = np.zeros(terms.shape[:-1], np.float32)
        for i in random.permutation(terms.shape[-1]):
            total = total + terms[..., i].astype(np.float32)
        off.append(total.astype(np.float64) - exactly(q, k))
    ratio = np.sqrt(np.mean(np.square(off))) / np.sqrt(np.mean(emulations(q, k)[0].noise ** 2))
    assert 0.5 < ratio < 1.0


def test_integers_are_named():
    exact = np.array([[5.0, 300.0, -130.0]])
    assert named_integers(np.array([[5, 300, -130]], np.int32), exact, "int32") == (("int32",), "yes")
    assert named_integers(np.array([[5, 44, 126]], np.int8), exact, None) == (("int32, cut to 8 bits",), None)
    assert named_integers(np.array([[5, 127, -128]], np.int8), exact, None) == (("int32, clamped",), None)
    assert named_integers(np.array([[5, 299, -130]], np.int32), exact, "int32") == ((), "undecided")


def test_of_many_scores_a_part_says_what_they_are_made_of():
    shape = ScoreShape(2, 3, 40, 8, 1024)
    assert ENOUGH < 2 * 3 * 40 * 1024

    its = measure_shape(shape, ("float32",), jax.devices("cpu")[0], None, False, lambda *_: None)
    assert {r.n for r in its if r.unknown is None} == {2 * 3 * 40 * 1024}
    assert next(r for r in its if r.way == "highest").made == ("float32",)


# Time


def test_every_round_times_every_way_and_none_is_always_first(monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr("precaudit.checks.probing.timing.time.perf_counter", lambda: clock[0])

    def call(name, seconds):
        def run():
            calls.append(name)
            clock[0] += seconds
            return np.zeros(())

        return run

    found = time_in_rounds([call("a", 4e-3), call("b", 8e-3), call("c", 1.5e-3)], rounds=6)
    assert found == pytest.approx(np.tile([4e-3, 8e-3, 1.5e-3], (6, 1)))
    assert "".join(calls) == "abc" + "abcc" + "bcca" + "ccab" + "abcc" + "bcca" + "ccab"
    assert quartiles(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == (2.0, 3.0, 4.0)


def test_times_are_of_the_first_way_in_the_same_round():
    its = precaudit.probe(["1,1,1,4x8"], "float32,int8", device="cpu").records
    taken = [r for r in its if r.unknown is None]
    assert taken[0].time == (1.0, 1.0, 1.0)
    assert {r.first for r in taken} == {"float32 @"}
    for r in taken:
        assert r.seconds is not None
        assert r.time is not None
        assert 0 < r.seconds[0] <= r.seconds[1] <= r.seconds[2]
        assert r.memory is not None
    assert {r.time for r in its if r.unknown is not None} == {None}


# Limits


def judged(*sentences, shapes=(DECODE,), **how):
    return precaudit.probe(shapes, timed=False, device="cpu", fail_on=sentences, **how)


@pytest.mark.turn  # 3 s
def test_sentences_are_judged_by_the_rules_of_gate():
    assert judged("float32 default worse than 1e-3", formats="float32").exit_code == 0
    found = judged("default worse than 1e-3", formats="bfloat16,float32")
    assert found.exit_code == 1
    assert [(v.status, v.phase, v.point, v.metric) for v in found.judgement.verdicts] == [
        ("fail", "bfloat16", "default", "rel_l2")
    ]
    assert probe_report(found).headline.text.startswith(f"✗ bfloat16 default ({DECODE}): rel_l2 is 0.0016")
    assert judged("default worse than 1e-3 max_diff", formats="float32").exit_code == 0
    assert judged("default worse than 1e-9 max_diff", formats="float32").exit_code == 1
    assert judged("float32 BF16_* replaced", formats="float32").exit_code == 1
    assert judged("highest replaced", formats="float32").exit_code == 0


def test_what_is_refused_is_unknown_where_it_is_named():
    assert judged("TF32_TF32_F32 worse than 1e-3", formats="float32").exit_code == 3
    assert judged("TF32_* worse than 1e-3", formats="float32").exit_code == 3  # none of them is taken
    assert judged("*_F32 worse than 1e-3", formats="float32").exit_code == 0
    assert judged("TF32_TF32_F32 replaced", formats="float32").exit_code == 3
    assert "refused" in probe_report(judged("TF32_TF32_F32 worse than 1", formats="float32")).headline.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default", "write"),
        ("default worse than much", "a number"),
        ("default worse than nan", "a number"),
        ("default worse than -1", "a number"),
        ("default worse than 1e-3 rel_l3", "did you mean 'rel_l2'"),
        ("defualt worse than 1e-3", "did you mean 'default'"),
        ("int8 default worse than 1e-3", "int8 is not probed"),
        ("default on v5e worse than 1e-3", "no way 'default on v5e:2x2'"),
        ("default on v9 worse than 1e-3", "unknown TPU"),
        ("default replaced", "names no arithmetic"),
    ],
)
def test_a_sentence_that_says_nothing_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        judged(text, formats="float32")


def test_a_sentence_holds_for_formats_and_metrics():
    (one,) = parse_sentences(["  fp16   @  worse than 0.5 max_diff"], {"float16": ["@"], "float32": ["@", "default"]})
    of, entry = one.budget.of, one.budget.entry
    assert (of.phases, of.points, entry.metric, entry.limit, one.exactly) == ({"float16"}, {"@"}, "max_diff", 0.5, True)


BUDGET = '[[budget]]\nkind = "product"\npoints = "{}"\nphases = ["{}"]\nmetric = "rel_l2"\nlimit = {}\nwhy = "stated"\n'


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe.jsonl"
    call = ["probe", "--shape", DECODE, "--formats", "bf16,f32", "--no-time", "--device", "cpu", "-o", str(path)]
    assert run(call) == 0
    return path


def budgeted(tmp_path, *entries):
    path = tmp_path / "budgets.toml"
    path.write_text("".join(entries))
    return path


def test_gate_judges_the_records_by_budgets(written, tmp_path):
    free = gate(written)
    assert free.exit_code == 3  # measured, with nothing to be held to
    assert "products are under no budget" in free.notes[0]
    assert gate(written, budgeted(tmp_path, BUDGET.format("default", "float32", 1e-6))).exit_code == 0
    found = gate(written, budgeted(tmp_path, BUDGET.format("d*", "bfloat16", 1e-6)))
    assert found.exit_code == 1
    assert found.counts == {"fail": 1}
    assert found.verdicts[0].why == "stated"
    assert gate(written, budgeted(tmp_path, BUDGET.format("TF32_*", "float32", 1e-6))).counts == {"unknown": 2}
    both = (BUDGET.format("*", "float32", 1), '[[budget]]\nkind = "product"\nunknown = "allow"\nwhy = "elsewhere"\n')
    assert gate(written, budgeted(tmp_path, *both)).exit_code == 0


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (BUDGET.format("defualt", "float32", 1), "names no point; did you mean 'default'"),
        (BUDGET.format("default", "float16", 1), "unknown phase 'float16'"),
        (BUDGET.format("default", "float32", 1).replace("product", "local"), "matches nothing recorded: product"),
    ],
)
def test_a_budget_that_matches_no_product_is_refused(written, tmp_path, entry, says):
    with pytest.raises(UserError, match=says):
        gate(written, budgeted(tmp_path, entry))


def test_a_file_of_an_earlier_probe_is_refused_with_what_to_do(written, tmp_path):
    earlier = tmp_path / "probe.jsonl"
    earlier.write_text(written.read_text().replace('"shape":', '"prompt":'))
    with pytest.raises(
        UserError, match=r"earlier version of precaudit probe wrote it; write it again: precaudit probe"
    ):
        gate(earlier)


# What is shown


def test_the_command_probes_every_format_and_fits_a_narrow_ascii_terminal():
    from precaudit.cli.probe import command

    assert next(p.default for p in command.params if p.name == "formats") == ",".join(FORMATS)
    call = [sys.executable, "-m", "precaudit", "probe", "--shape", "1,1,1,16x8", "--formats", "bf16", "--no-time"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(call, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.isascii()
    assert "preferred_element_type" in done.stdout
    assert not done.stderr


def test_records_are_of_the_schema_and_say_the_same_again(written, capsys):
    records = read_lines(written, ProbeRecord)
    assert len(records) == 2 * len(product_ways("float32"))
    again = ["probe", "--shape", DECODE, "--formats", "bf16,f32", "--no-time", "--device", "cpu", "--json"]
    assert run(again) == 0
    out = capsys.readouterr().out
    assert out == written.read_text()
    assert {json.loads(line)["kind"] for line in out.splitlines()} == {"product"}


def test_a_probe_is_written_as_markdown_and_as_a_page(tmp_path):
    markdown, page = tmp_path / "p.md", tmp_path / "p.html"
    call = ["probe", "--shape", "1,1,1,16x8", "--formats", "bf16", "--no-time", "--device", "cpu", "--json"]
    assert run([*call, "--markdown", str(markdown), "--html", str(page)]) == 0
    (rows,) = tables(markdown.read_text())
    assert rows[0][:3] == ["operands", "way", "result"]
    assert "| bfloat16 | preferred" in markdown.read_text()
    assert markdown.read_text().startswith("### precaudit probe: `attention scores on cpu`\n\n? measured, not judged")
    assert all(row[1] in Page(page.read_text()).said["text"] for row in rows[1:])


def test_a_frame_has_a_row_a_product(probed):
    found = probed.frame()
    assert len(found) == len(probed.records)
    assert {"shape", "operands", "way", "dtype", "rel_l2", "asked", "made", "honoured", "seconds", "time"} <= set(found)
    assert found.loc[(found.operands == "float32") & (found.way == "BF16_BF16_F32"), "made"].item() == "float32"
    assert found.seconds.isna().all()


def test_every_way_is_in_the_tables_or_refused_in_words(probed):
    for every in (False, True):
        shown = " ".join(" ".join(row) for t in probe_report(probed, every).sections[0].tables for row in t.rows)
        shown += " ".join(probe_report(probed).notes)
        assert {w.name for w in product_ways("float32")} <= set(shown.replace(",", "").replace(":", "").split())
    told = list(probe_report(probed).notes)
    assert len([x for x in told if x.startswith("refused on cpu")]) == 1
    assert "TF32_TF32_F32 (bfloat16" not in told[0]  # with others of the same formats
    assert probe_report(probed).headline.text.startswith(
        "? measured, not judged: bfloat16 @ (1,1,1,128x512) has an error of 0.0016"
    )
    assert "digits more" in probe_report(probed).headline.text
    assert "bfloat16" in repr(probed) or "Products" in repr(probed)


# A TPU that is not here


@needs_libtpu
def test_a_tpu_s_passes_units_and_errors_are_predicted():
    shape = ScoreShape(1, 2, 16, 96, 40)
    found = precaudit.probe([shape], "float32", tpu="v5e", device="cpu", timed=False)
    there = {r.way: r for r in found.records if r.target is not None}
    q, k = operands(shape, "float32")
    true = exactly(q, k)
    for way, count in (("default", 1), ("high", 3)):
        off = np.linalg.norm(in_passes(q, k, count) - true) / np.linalg.norm(true)
        assert (there[way].unit, there[way].passes) == ("matrix", count)
        assert value(there[way].rel_l2) == pytest.approx(off, rel=1e-2)
        assert there[way].made == ("1 bfloat16 pass" if count == 1 else "3 bfloat16 passes",)
    assert there["highest"].passes == 6
    assert there["F32_F32_F32"].unknown is not None
    assert there["F32_F32_F32"].point == "F32_F32_F32 on v5e:2x2"
    assert there["default"].candidate == "tpu-predicted:v5e:2x2"
    assert of(found, "float32", "default").rel_l2 != there["default"].rel_l2
    (table,) = probe_report(found).sections[0].tables
    assert "on v5e:2x2" in table.columns


@pytest.mark.turn  # 3 s
@needs_libtpu
def test_one_row_is_a_tpu_s_vector_unit_and_a_limit_holds_there():
    found = judged("default on v5e worse than 1e-3", formats="bf16,f32", tpu="v5e:2x2")
    units = {(r.operands, r.way): r.unit for r in found.records if r.target is not None}
    assert units["float32", "default"] == "vector"
    assert found.exit_code == 1
    assert {(v.phase, v.point) for v in found.judgement.verdicts} == {("bfloat16", "default on v5e:2x2")}


def test_without_libtpu_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("precaudit.checks.probing.probe.libtpu_version", lambda: None)
    with pytest.raises(UserError, match=r"pip install 'precaudit\[tpu\]'"):
        precaudit.probe([DECODE], tpu="v5e")
