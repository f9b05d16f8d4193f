"""What one layer hands the next is judged bit for bit, and two faults at once are both found."""

from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.diagnosis.diagnose import diagnose
from precaudit.judging.gate import gate
from precaudit.models.jax_decoder import Parts
from precaudit.models.jax_decoder.decoder import Decoder
from precaudit.models.jax_decoder.parts import attend, rope
from precaudit.recording.tracing.programs import _compile
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few

pytestmark = pytest.mark.usefixtures("neutral", "own_programs")

TEXT = "def read(path):\n    return open(path).read()"
FAULTY = 2


def handed(change):
    """A decoder that changes the stream on its way into layer FAULTY."""
    original = Decoder._layer

    def layer(self, x, cache, w, index, step):
        return original(self, jnp.where(index == FAULTY, change(x).astype(x.dtype), x), cache, w, index, step)

    return mock.patch.object(Decoder, "_layer", layer)


def recorded(folder, subject="tiny", parts=None, points="all", layers=None, prompts=None, policy="bf16"):
    given = prompts or [Prompt(id="p0", prompt=TEXT)]
    select = Selection.parse(layers=layers, points=points, phases="prefill,decode")
    return trace(load(subject, policy, None, "cpu", parts), folder / "run", given, select, TraceOptions(1, force=True))


def verdicts(folder, run):
    return gate(compare(run, options=CompareOptions(accum=(), cache=folder / "refs"))).verdicts


def exchanged(x):
    order = np.arange(x.shape[1])
    order[[3, 5]] = order[[5, 3]] if x.shape[1] > 5 else order[[3, 5]]
    return x[:, order]


CHANGES = {
    "float8": lambda x: x.astype(jnp.float8_e4m3fn),
    "factor": lambda x: x.astype(jnp.float32) * 1.02,
    "one bit": lambda x: x.at[:, 1, 7].set(jnp.nextafter(x[:, 1, 7], jnp.asarray(jnp.inf, x.dtype))),
    "tokens exchanged": lambda x: x if x.shape[1] == 1 else exchanged(x),
}


@pytest.mark.parametrize("name", few(CHANGES, "one bit"))  # 10 s each
def test_a_stream_changed_between_two_layers_fails_there(tmp_path, name):
    with handed(CHANGES[name]):
        run = recorded(tmp_path)
    found = [v for v in verdicts(tmp_path, run) if v.status == "fail"]
    assert {(v.kind, v.layer, v.point) for v in found} == {("state", FAULTY, "resid_in")}
    assert "prefill" in {v.phase for v in found}


@pytest.mark.turn  # 3 s
def test_streams_of_two_prompts_exchanged_are_named_with_whose(tmp_path):
    """Two prompts of a batch trade their rows between two layers: state, and whose they are is said."""
    texts = [Prompt(id=name, prompt=text) for name, text in zip("ab", (TEXT, TEXT[::-1]), strict=True)]
    with handed(lambda x: x[::-1]):
        select = Selection.parse(points="resid_in", phases="prefill")
        run = trace(load("tiny", "bf16", None, "cpu"), tmp_path / "run", texts, select, TraceOptions(batch=2))
        found = diagnose(run, select, CompareOptions(accum=(), cache=tmp_path / "refs"))
    first = found.findings[0]
    mate = {"a": "b", "b": "a"}[first.prompts[0]]
    assert (first.kind, first.layer, first.point) == ("state", FAULTY, "resid_in")
    assert first.cause == f"row of prompt {mate}"
    assert f"hold the rows from 0 on of prompt {mate}, which ran in the same batch" in first.says


@pytest.mark.slow  # 6 s
def test_the_first_stream_is_the_embedding_times_the_factor(tmp_path):
    original = Decoder._layers
    changed = mock.patch.object(
        Decoder, "_layers",
        lambda self, params, *rest: original(self, params | {"embed": params["embed"][::-1]}, *rest),
    )  # fmt: skip
    tokens = [Prompt(id="p0", tokens=(3, 1, 4, 1, 5))]
    with changed:
        run = recorded(tmp_path, str(FIXTURES / "gemma2-gqa"), prompts=tokens)
    assert ("state", 0, "resid_in") in {(v.kind, v.layer, v.point) for v in verdicts(tmp_path, run)}
    _compile.cache_clear()
    for name in ("gemma2-gqa", "granite-gqa"):
        run = recorded(tmp_path, str(FIXTURES / name), prompts=tokens)
        assert not [v for v in verdicts(tmp_path, run) if v.kind == "state"], name


@pytest.mark.turn
def test_a_layer_without_its_predecessor_is_not_asked_for_one(tmp_path):
    run = recorded(tmp_path, layers="2", points="resid_in,attn_norm")
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert not [e for e in found.errors if e.kind == "state"]
    assert gate(found).exit_code == 0


@pytest.mark.turn  # 3 s
def test_resid_in_brings_what_it_is_held_against(tmp_path):
    run = recorded(tmp_path, layers="1,2", points="resid_in")
    assert run.record.requested.support == ("resid_out",)
    found = compare(run, options=CompareOptions(accum=(), cache=tmp_path / "refs"))
    assert {e.layer for e in found.errors if e.kind == "state" and e.mismatched == 0} == {2}
    lost = replace(found, errors=[e for e in found.errors if e.kind != "state"])
    assert "missing" in gate(lost).counts


@pytest.mark.turn  # 5 s
def test_a_cast_before_the_final_norm_fails_there(tmp_path):
    original = Decoder._logits

    def logits(self, params, x, rows):
        return original(self, params, x.astype(jnp.float8_e4m3fn).astype(x.dtype), rows)

    with mock.patch.object(Decoder, "_logits", logits):
        run = recorded(tmp_path)
    found = {(v.kind, v.point) for v in verdicts(tmp_path, run) if v.status == "fail"}
    assert ("local", "final_norm") in found
    assert not [point for kind, point in found if kind == "local" and point != "final_norm"]


def late(x, cos, sin, a):
    return rope(x, jnp.roll(cos, -1, 1), jnp.roll(sin, -1, 1), a)


@pytest.mark.turn  # 7 s
def test_two_faults_at_once_are_both_found(tmp_path):
    """RoPE at other positions does not excuse values that are scaled after they were recorded."""
    parts = replace(Parts(), rope=late, attend=lambda p, v, a: attend(p, (v * 1.1).astype(v.dtype), a))
    run = recorded(tmp_path, parts=parts, points="q,k,v,attn_out")
    standing = {v.point for v in verdicts(tmp_path, run) if v.kind == "local" and v.status == "fail"}
    assert standing == {"q", "k", "attn_out"}


@pytest.mark.turn  # 12 s
def test_scores_that_are_wrong_account_for_attention(tmp_path):
    honest = Parts().scores
    parts = replace(Parts(), scores=lambda q, k, scale, a: honest(q, k, scale * 1.2, a))
    found = verdicts(tmp_path, recorded(tmp_path, parts=parts))
    assert {v.point for v in found if v.kind == "local" and v.status == "fail"} == {"scores"}
    assert {v.point for v in found if v.kind == "local" and v.status == "input suspect"} == {"attn_out"}
    both = replace(parts, attend=lambda p, v, a: attend(p, (v * 1.1).astype(v.dtype), a))
    found = verdicts(tmp_path, recorded(tmp_path, parts=both))
    assert {v.point for v in found if v.kind == "local" and v.status == "fail"} == {"scores", "attn_out"}


@pytest.mark.slow
def test_diagnosis_places_a_handover(tmp_path):
    with handed(CHANGES["float8"]):
        run = recorded(tmp_path)
        found = diagnose(run, options=CompareOptions(accum=(), cache=tmp_path / "refs")).findings
    assert [(f.layer, f.point, f.kind) for f in found][:1] == [(FAULTY, "resid_in", "format")]
    assert "float8_e4m3fn" in found[0].cause
