"""An epsilon that is not the configuration's is told by its number, or by all that fit where a format hides it."""

import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from precaudit.diagnosis.diagnose import diagnose
from precaudit.models.jax_decoder.family import family_parts
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.mutations.epsilons import Span, _name_fit
from precaudit.references.mutations.variants import Variant
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few

TEXT = "def read(path):\n    with open(path) as f:\n        return [line"
TOKENS = tuple(b % 96 for b in b"The quick brown fox jumps over the lazy dog")
CASES = {
    "tiny, none": ("tiny", 0.0),
    "tiny, 1e-6": ("tiny", 1e-6),
    "tiny, 3e-6": ("tiny", 3e-6),
    "tiny, 1e-4": ("tiny", 1e-4),
    "qwen3, 1e-4": ("qwen3-gqa", 1e-4),
    "qwen3, 1e-3": ("qwen3-gqa", 1e-3),
    "gemma3, 1e-3": ("gemma3-gqa", 1e-3),
}

BARELY = {
    "qwen3, 1e-4"
}  # the best epsilon leaves two thirds of what the policy leaves, and more than half names nothing


def diagnosed(tmp_path, model, policy, norm):
    """Return the findings of a model whose norms are all made by ``norm(honest, x, w, eps, a)``."""
    where = model if model == "tiny" else str(FIXTURES / model)
    honest = family_parts(load(where, policy, None, "cpu").config)
    changed = replace(honest, norm=lambda x, w, eps, a: norm(honest.norm, x, w, eps, a))
    subject = load(where, policy, None, "cpu", changed)
    prompt = Prompt(id="a", prompt=TEXT) if model == "tiny" else Prompt(id="a", tokens=TOKENS)
    select = Selection.parse(points="all", phases="prefill")
    run = trace(subject, tmp_path / "run", [prompt], select, TraceOptions())
    how = CompareOptions(accum=(), cache=tmp_path / "refs")
    return subject.config.norm_eps, diagnose(run, select, how, subject=subject).findings


def told(finding):
    """Return (cause, least, most): the epsilons that a finding says may have been taken."""
    if found := re.search(r"([\d.e-]+) to ([\d.e-]+) fit", finding.says):
        return finding.cause, float(found[1]), float(found[2])
    if found := re.search(r"omitted, or at most ([^,]+),", finding.says):
        return finding.cause, 0.0, float(found[1])
    number = float(re.fullmatch(r"epsilon is (\S+), the configuration says \S+", finding.says)[1])
    return finding.cause, number, number


@pytest.mark.turn  # 4 s
@pytest.mark.parametrize("name", few(CASES, "tiny, 3e-6", "qwen3, 1e-3"))
def test_an_epsilon_in_bfloat16_is_never_told_by_another_number(name, tmp_path):
    model, made = CASES[name]
    _, findings = diagnosed(tmp_path, model, "bf16", lambda honest, x, w, _eps, a: honest(x, w, made, a))
    assert findings
    if name in BARELY:
        assert {f.cause for f in findings} == {"none reproduces it"}
        return
    for f in findings:
        cause, least, most = told(f)
        assert cause.startswith("epsilon"), (f.point, f.says)
        assert least <= made <= most, (f.point, f.says)


@pytest.mark.turn  # 6 s
def test_what_is_rounded_before_it_is_read_does_not_hide_an_epsilon(tmp_path):
    """XLA hands the second norm its input unrounded, which moves it by more than the epsilon does."""
    _, findings = diagnosed(tmp_path, "tiny", "bf16", lambda honest, x, w, _eps, a: honest(x, w, 3e-6, a))
    assert {(f.point, f.cause) for f in findings} == {("attn_norm", "epsilon 3e-6"), ("mlp_norm", "epsilon 3e-6")}


@pytest.mark.turn  # 8 s
def test_a_number_that_leaves_half_as_much_as_any_other_is_named(tmp_path):
    """1.2e-3 closes as well in bfloat16, and leaves more than twice as much."""
    _, findings = diagnosed(tmp_path, "qwen3-gqa", "bf16", lambda honest, x, w, _eps, a: honest(x, w, 1e-3, a))
    assert {f.cause for f in findings} == {"epsilon 0.001"}


@pytest.mark.parametrize(
    ("low", "high", "alone", "cause"),
    [
        (2.5e-6, 3.4e-6, True, "epsilon 3e-6"),
        (2.5e-6, 3.4e-6, False, "epsilon above the configuration's"),  # another number as short fits, too
        (1.2e-6, 4.8e-6, True, "epsilon above the configuration's"),
    ],
)
def test_where_several_epsilons_fit_the_name_holds_no_number(low, high, alone, cause):
    best = Variant("epsilon 3e-6", "semantics", "", lambda *_: [], fitted=True, number=3e-6)
    named = _name_fit(Span(low, high, 1e-6), best, alone, outside=False)
    assert named.name == cause
    assert ("fit" in named.says) == (high > 1.1 * low)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "fp32-highest"])
def test_an_epsilon_outside_the_root_is_told_for_what_it_is(policy, tmp_path):
    def outside(_honest, x, w, eps, a):
        y = x.astype(a.norm)
        y = y / (jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True)) + jnp.asarray(eps, a.norm))
        return (y.astype(w.dtype) * w).astype(a.activations)

    _, findings = diagnosed(tmp_path, "tiny", policy, outside)
    assert findings
    assert all("outside the root" in f.cause for f in findings), [f.says for f in findings]


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("policy", few(["bf16", "fp32-highest"], "bf16"))
def test_the_configurations_own_epsilon_is_no_finding(policy, tmp_path):
    eps, findings = diagnosed(tmp_path, "tiny", policy, lambda honest, x, w, eps, a: honest(x, w, eps, a))
    assert eps == 1e-5
    assert findings == ()
