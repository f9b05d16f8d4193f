"""Our own decoder as a program: its segments in FP64 are the textbook's operations, and its verdicts the same."""

from functools import partial

import jax
import msgspec
import numpy as np
import pytest

import precaudit
from precaudit import gate
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.emulate import exactly
from precaudit.models.numpy_decoder.model import Model, all_probs, all_scores
from precaudit.models.numpy_decoder.operators import ACTIVATIONS, AttentionRule, gelu_tanh
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import rounder, widen
from precaudit.recording.programs.own import decode_of, prefill_call, served_of
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.program_places import judged_places
from precaudit.recording.tracing.shadowed import exact_tables
from precaudit.recording.tracing.subject import load
from precaudit.references.comparison.programs import compare_program
from precaudit.references.mutations.forms import Inputs, evaluate_form, usual_form
from precaudit.schema.graphs.decoder import POINTS, STREAM, inputs_of, parts_of, present
from precaudit.schema.records.base import value
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few

NAMES = sorted(p.name for p in FIXTURES.iterdir() if (p / "config.json").is_file())
FAMILIES = {name.rpartition("-")[0] if "moe" in name else name.split("-")[0]: name for name in NAMES}.values()
LENGTH = 24


def tokens(subject):
    return np.random.default_rng(7).integers(0, subject.config.vocab, LENGTH)


def as_written(config):
    """Return a configuration whose numbers, RoPE's aside, are what JAX writes into a float32 program."""
    own = {f: getattr(config, f) for f in config.__struct_fields__ if "rope" not in f}
    single = {f: float(np.float32(x)) for f, x in own.items() if isinstance(x, float)}
    return msgspec.structs.replace(config, **single | {"query_scale": float(np.float32(config.score_scale))})


def textbook(model, layer, point, read, ids):
    """Return a point [T, …] from the FP64 values of what it reads, as the NumPy decoder makes it."""
    row, rule, positions = POINTS[point], AttentionRule.of(model.config, layer), np.arange(LENGTH)
    if not row.inputs:
        return model.embed(ids) if layer == 0 else read(layer - 1, STREAM)
    last = model.config.layers - 1 if layer is None else layer
    values = tuple(
        read(last if POINTS[name].per_layer else None, name) for name in inputs_of(point, model.config.sparse)
    )
    if row.kind == "score":
        return all_scores(*values, rule, FP64)
    if row.kind == "softmax":
        return all_probs(values[0], positions, rule.window, FP64)
    return evaluate_form(usual_form, Inputs(model, layer, point, positions, values), FP64)


@pytest.mark.turn  # 10 s
@pytest.mark.parametrize("name", few(NAMES, "gemma2-caps"))
def test_segments_in_fp64_are_the_textbooks_operations(name, tmp_path, monkeypatch):
    """At every point of every layer, from the same recorded inputs: two programs that share no numerics.

    A program's constants are those of its formats (the scale of scores, epsilon, gelu's √(2/π) and 0.044715 in
    float32, 3e-8 off): the textbook is given the same.
    """
    monkeypatch.setitem(ACTIVATIONS, "gelu_tanh", partial(gelu_tanh, constants=rounder("float32")))
    subject = load(str(FIXTURES / name), device="cpu")
    ids = tokens(subject)
    program = prefill_call(subject, {"a": ids})
    opened = trace_program(program, tmp_path / "run")
    taps, call = opened.tensors("a", 0, "taps"), prepare_program(program).call
    parts = {part for point in POINTS for part in parts_of(point)}
    params = (subject.parameters, exact_tables(subject, LENGTH))  # the program is given them, rounded to float32
    with jax.enable_x64(True):
        of_whole, of_parts = (
            {k: np.asarray(x) for k, x in exactly(call)(
                {k: x for k, x in taps.items() if k not in left}, params, *program.cases["a"]).items()}
            for left in (parts, set())
        )  # fmt: skip
    shapes = {p.name: p for p in opened.record.points}
    known = {p for p in present(subject.config.sparse) if not POINTS[p].state}
    assert known <= set(shapes) <= known | parts

    def cut(x, layer, point):
        return x.reshape(-1, *shapes[point].shape)[layer or 0][0]

    model = Model(as_written(subject.config), subject.checkpoint.tensors.read_tensor)
    for p, layer in ((p, layer) for p, layer in judged_places(opened.record) if p.name in known):
        found = of_parts if p.name in parts else of_whole
        seen = cut(found[p.name], layer, p.name)
        want = textbook(model, layer, p.name, lambda at, point: widen(cut(taps[point], at, point)), ids)
        hidden = ~np.isfinite(seen) | (seen < -1e30) if POINTS[p.name].over_keys else np.zeros(seen.shape, bool)
        off, size = np.where(hidden, 0.0, seen - want), np.where(hidden, 0.0, want)
        assert np.linalg.norm(off) <= 1e-9 * np.linalg.norm(size), (p.name, layer)
        assert hidden.sum() <= hidden.size / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
@pytest.mark.parametrize("of", [prefill_call, decode_of])
def test_its_verdicts_are_those_of_the_decoders_own_audit(name, of, tmp_path):
    """All pass there (``make audit``); here every segment, forward error and output passes, too."""
    subject = load(name if name == "tiny" else str(FIXTURES / name), device="cpu")
    program = of(subject, {"a": tokens(subject)[: LENGTH if of is prefill_call else 8]})
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program)
    found = gate(opened.folder)
    assert set(found.counts) == {"pass"}
    assert found.exit_code == 0


@pytest.mark.slow  # 31 s
def test_the_decoder_is_a_program_that_passes(tmp_path):
    subject = load(str(FIXTURES / "llama-gqa"), device="cpu")
    for of, n in ((prefill_call, LENGTH), (decode_of, 4)):
        program = of(subject, {"a": tokens(subject)[:n]})
        opened = trace_program(program, tmp_path / of.__name__)
        assert all(d.bitwise for d in opened.record.neutrality)
        compare_program(opened, program)
        assert set(gate(opened.folder).counts) == {"pass"}


@pytest.mark.slow
def test_entry_points_of_ours_see_what_the_models_run_does(tmp_path):
    """Prefill, decode and rescore as a Program give the numbers of prefill_decode.jsonl of the model's run."""
    subject = load("tiny")
    run = precaudit.trace(
        subject, tmp_path / "model", prompts=["Hello there, this is one"], points="logits:all", decode_steps=2
    )
    ids = run.prompts["p0"].tokens
    expected = precaudit.compare(run, accum=()).prefill_decode
    program = served_of(subject, {"p0": ids}, 2)
    opened = trace_program(program, tmp_path / "program", ProgramSelection(points=["q", "logits"]))
    found = compare_program(opened, program).prefill_decode
    assert len(found) == len(expected) == 1 + 3
    for a, b in zip(found, expected, strict=True):
        same = ("against", "step", "position", "prefill_top1", "decode_top1", "f64_top1", "kl", "max_diff", "near_tie")
        assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]
        # JAX writes numbers of the configuration, such as epsilon, in float32
        assert value(a.f64_gap) == pytest.approx(value(b.f64_gap), rel=1e-5)
    assert gate(opened).exit_code == 0


@pytest.mark.turn  # 5 s
def test_a_model_that_is_loaded_is_a_program(tmp_path):
    """Prefill, decode and rescore of the shipped prompts, cut to one length; its weights are read when asked for."""
    model = load("tiny", device="cpu")
    assert isinstance(model, precaudit.Program)
    assert not {"parameters", "served"} & vars(model).keys()
    assert [model.entry, *model.then] == ["prefill", "decode", "rescore"]
    assert len({len(x[0]) for x in model.cases.values()}) == 1
    run = precaudit.trace(model.some(["s2_code"]), tmp_path / "run", positions="0", phases="prefill")
    assert {p.name for p in run.record.points} >= {"q", "scores", "attn_out"}


def test_what_is_neither_a_program_nor_named_is_refused(tmp_path):
    with pytest.raises(UserError, match="trace: a Program, a model's name or its path, and not int"):
        precaudit.trace(3, tmp_path / "run")
