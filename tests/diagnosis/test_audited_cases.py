"""Programs after public bug reports and after what people run (tests/helpers/cases): what each has to say."""

import re

import jax
import numpy as np
import pytest

from precaudit import Program
from precaudit.checks.gradients.check import gradcheck
from precaudit.checks.gradients.subjects import import_kernel
from precaudit.checks.lint.linting import lint_program
from precaudit.recording.programs.loading import load_attribute
from precaudit.reports.gradients import distance_table
from precaudit.reports.headline import headline
from precaudit.schema.records.base import value
from tests.helpers.audited_cases import CASES, audited, program
from tests.helpers.selected import few


@pytest.mark.turn  # 19 s
@pytest.mark.parametrize("name", ["late_query.py:bug"])
def test_a_query_turned_late_is_named(name, tmp_path):
    found = audited(tmp_path, name, mapped=True)
    assert found.judgement.exit_code == 1
    first = found.diagnosis.findings[0]
    assert (first.kind, first.point) == ("semantics", "q")
    assert "position" in first.says


@pytest.mark.turn  # 7 s
def test_a_decode_after_a_prefill_elsewhere_starts_where_its_cache_ends(tmp_path):
    """Past keys are those of the cache that the first call is given."""
    found = audited(tmp_path, "past_length.py:ok_after", mapped=True)
    assert (found.judgement.exit_code, found.diagnosis.findings) == (0, ())
    assert max(value(e.rel_l2) for e in found.records if e.kind == "formula") <= 1e-9


@pytest.mark.turn  # 6 s
def test_a_past_length_that_is_one_too_large_fails_at_the_first_call(tmp_path):
    found = audited(tmp_path, "past_length.py:bug_after", mapped=True)
    assert found.broken() >= {(0, 0, "q_rot")}
    turned, slot = found.diagnosis.findings
    assert (turned.cause, turned.point, turned.layers) == ("positions +1", "q", (0, 1, 2))
    assert (slot.kind, slot.cause, slot.point, slot.layers) == ("state", "slot never written", "attn_out", (0, 1, 2))
    assert "reads slot 4 of the cache, which nothing has written: 4 rows are stored" in slot.says


@pytest.mark.slow  # 17 s
def test_a_past_length_that_is_one_too_small_is_told(tmp_path):
    """A row that is written over may have been padding, so that this alone is no fault: it is said, and not silent."""
    found = audited(tmp_path, "past_length.py:small_after", mapped=True)
    told = [n for n in found.judgement.notes if "the past length is too small" in n]
    assert [n.partition(" of ")[0] for n in told] == ["slot 3"]
    right = audited(tmp_path / "right", "past_length.py:ok_after", mapped=True)
    assert not [n for n in right.judgement.notes if "too small" in n]


@pytest.mark.turn  # 7 s
def test_padding_is_counted_and_not_judged(tmp_path):
    """What a program makes at rows that no sequence has is nobody's; the lengths are one of its inputs."""
    found = audited(tmp_path, "row_mask.py:ok", mapped=True)
    assert (found.judgement.exit_code, found.diagnosis.findings) == (0, ())
    note = "5 padding rows are read by no other row: they are not compared with the reference implementation"
    assert note in found.judgement.notes
    rows = {e.excluded * 24 // (e.n + e.excluded) for e in found.records if e.kind == "formula"}
    assert rows == {5}


@pytest.mark.turn  # 23 s
def test_another_row_s_mask_is_named_with_row_and_position(tmp_path):
    found = audited(tmp_path, "row_mask.py:bug", mapped=True)
    assert found.broken() == {(0, 0, "attended")}
    assert "row 1, position 7" in next(v.text for v in found.judgement.verdicts if v.status == "fail")
    (one,) = found.diagnosis.findings
    assert (one.cause, one.point, one.layers) == ("another row's mask", "attn_out", (0, 1, 2))
    assert one.says.startswith(
        "rows 1 and 2 of the batch have the mask of another: row 0 has 5 keys; first at row 1, position 5: attn_out"
    )


@pytest.mark.slow  # 60 s: 12 calls
def test_a_page_read_with_another_scale_is_named_with_the_call_where_it_begins(tmp_path):
    found = audited(tmp_path, "page_scale.py:bug", mapped=True)
    assert found.broken() == {(call, 0, "attended") for call in range(8, 12)}
    assert headline(found.judgement, "run").sentence.startswith("attended of layer 0, case a, call 8: ")
    (one,) = found.diagnosis.findings
    assert (one.cause, one.point, one.layers) == ("another scale of slots", "attn_out", (0, 1, 2))
    assert one.says.startswith("keys and values are read times 1.25 from slot 8 on, page 2 of 4 slots each: ")
    assert one.says.endswith(", from call 8 on")


def line_of(file, text):
    """Return ``FILE:LINE`` of the first line of a case that holds a text."""
    lines = (CASES / file).read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def held_to_reference(kernel, given="inputs", **how):
    """Return what gradcheck finds of a case, the reference and inputs beside it or beside the file named first."""
    file = f"{CASES}/{how.pop('beside', kernel.partition(':')[0])}"
    it = import_kernel(f"{CASES}/{kernel}", f"{file}:reference", f"{file}:{given}", None)
    return gradcheck(it.kernel, it.reference, it.inputs, argnums=it.argnums, **({"hostile": False, "seeds": 1} | how))


@pytest.mark.parametrize("name", ["kernel", "wrapped"])
def test_a_rounding_in_a_backward_rule_is_told_by_its_own_line(name):
    found = held_to_reference(f"custom_vjp.py:{name}")
    assert found.exit_code == 1
    assert f"explains it: tests/helpers/cases/{line_of('custom_vjp.py', 'narrow = ')}:" in found.conclusions[0]


@pytest.mark.turn  # 7 s
def test_each_group_of_failing_inputs_is_explained_by_itself():
    it = import_kernel(f"{CASES}/two_faults.py:bad", None, None, None)

    def plain_and_tiny(seed):
        x, w = it.inputs(seed)
        return {"plain": (x, w), "tiny": (x * 2.0**-20, w)}

    found = gradcheck(it.kernel, it.reference, plain_and_tiny, argnums=(), seeds=1, hostile=False)
    assert found.exit_code == 1
    plain, tiny = (next(x for x in found.conclusions if f"out ({group}-seed0)" in x) for group in ("plain", "tiny"))
    assert "rounding explains it: tests/helpers/cases/two_faults.py:16:" in plain
    assert "rounding to the formats it declares does not explain it" in tiny
    factor = float(re.search(r"it is (\S+) × FP64", tiny)[1])
    assert factor == pytest.approx(10**-0.5, rel=2e-3)
    assert re.search(r"1.00136e-5 at \S+two_faults.py:16:\d+ \(bad\) stands for 1e-6 at \S+two_faults.py:11:", tiny)


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("file", few(("xent.py", "xent_pallas.py"), "xent.py"))
def test_a_rounding_that_xla_leaves_out_fails_strictly_at_its_line(file):
    line = line_of(file, "jnp.dot(h")
    h, w, y = load_attribute(f"{CASES}/xent.py:inputs")(0)
    given = h, w[:, :256], y % 256
    for name, fails in (("buggy", True), ("fixed", False)):
        it = import_kernel(f"{CASES}/{file}:{name}", f"{CASES}/xent.py:reference", f"{CASES}/xent.py:inputs", (0,))
        with jax.numpy_dtype_promotion("standard"):
            found = gradcheck(it.kernel, it.reference, given, argnums=(0,), hostile=False)
        assert found.exit_code == fails
        status = {side: {f.verdict.status for f in found.found if f.side == side} for side in ("kernel", "strict")}
        assert status == {"kernel": {"pass"}, "strict": {"fail"} if fails else set()}
        assert {r.candidate for r in found.records if r.point.startswith("strict.")} == ({"strict"} if fails else set())
        if fails:
            assert "the kernel without excess precision: out (given)" in found.conclusions[0]
            assert f"tests/helpers/cases/{line}:" in found.conclusions[0].partition("rounding explains it")[2]
            note = next(x for x in found.notes if "are skipped here" in x)
            assert f"declares at tests/helpers/cases/{line}:" in note
            assert "strict" in {row[1] for row in distance_table(found).rows}


@pytest.mark.slow  # 20 s
def test_two_faults_are_told_among_hostile_inputs():
    found = held_to_reference("two_faults.py:bad", hostile=True)
    groups = {cause: [x for x in found.conclusions if cause in x] for cause in ("rounding explains", "stands for 1e-6")}
    assert all(groups.values())


@pytest.mark.turn  # 7 s
def test_a_flipped_expert_is_told_by_the_line_of_its_choice():
    found = held_to_reference("router.py:kernel")
    assert found.exit_code == 1
    choice, rounding = (line_of("router.py", text) for text in ("jax.lax.top_k(p", "p = p.astype"))
    told = found.conclusions[0].partition("rounding explains it: ")[2]
    assert told.startswith(f"tests/helpers/cases/{choice}:")
    assert "top_k chooses 1 of 32 differently by the rounding at" in told
    assert f"tests/helpers/cases/{rounding}:" in told


NUMBERS = {"less": "3e-6", "least": "1e-6", "none": None}


@pytest.mark.turn
@pytest.mark.parametrize("name", few(NUMBERS, "least"))
def test_an_epsilon_is_told_by_its_number_beside_the_textbook(name, tmp_path):
    found = audited(tmp_path, f"epsilon.py:{name}", mapped=True)
    (one,) = (f for f in found.diagnosis.findings if f.kind == "semantics")
    says = "epsilon is omitted" if NUMBERS[name] is None else f"epsilon is {NUMBERS[name]}, the configuration says 1e-5"
    assert one.says.startswith(says)


@pytest.mark.turn
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("factor", "factor on the addend is 0.75, it should be 1, in the sum that adds mlp_out of layer 0 (down, "),
        ("near", "factor on the addend is 1.02344, it should be 1, in the sum that adds mlp_out of layer 0 (down, "),
        ("bent", "no known formula gives it from its own inputs: attn_norm of layer 1 (normed, "),
        ("subtracted", "the addend is subtracted, in the sum that adds attn_proj of layer 0 (mixed, "),
    ],
)
def test_a_sum_into_a_stream_that_no_point_shows_is_told_by_its_addend(name, says, tmp_path):
    """The norm after it is where it is seen first: its own formula is right."""
    found = audited(tmp_path, f"addends.py:{name}", mapped=True)
    told = [f.says for f in found.diagnosis.findings if f.kind == "semantics"]
    assert told[0].startswith(says)
    assert not any("nearest" in text for text in told)


def linted(program):
    """Return {(rule, file:line)} of what lint finds."""
    return {(f.rule, f.source.rpartition("/")[2]) for f in lint_program(program).findings}


@pytest.mark.parametrize("name", ["softp", "logp", "lsep", "lognarrowp"])
def test_a_bfloat16_product_into_any_softmax_or_loss_is_linted(name):
    found = linted(program(f"lint_losses.py:{name}"))
    assert ("rounded-scores", line_of("lint_losses.py", "return jnp.dot(h, p)")) in found
    assert {rule for rule, _ in found} <= {"rounded-scores", "narrow-exp"}


@pytest.mark.parametrize(
    ("file", "text"), [("xent.py", "return jnp.dot(h, w"), ("xent_pallas.py", "z = jnp.dot(h_ref")]
)
@pytest.mark.parametrize("made", ["loss", "gradient"])
def test_streaming_cross_entropy_of_bfloat16_logits_is_linted(file, text, made):
    """In a loop over tiles and in a kernel's grid; with float32 logits nothing is."""
    cases = {name: load_attribute(f"{CASES}/{file}:{name}") for name in ("buggy", "fixed")}
    h, w, y = load_attribute(f"{CASES}/xent.py:inputs")(0)
    found = {}
    for name, loss in cases.items():
        call = loss if made == "loss" else jax.grad(loss)
        with jax.numpy_dtype_promotion("standard"):
            found[name] = linted(Program(call, h, {"a": (w, y)}))
    assert found == {"buggy": {("rounded-scores", line_of(file, text))}, "fixed": set()}


def test_positions_in_bfloat16_are_linted():
    rules = {name: linted(program(f"positions.py:{name}")) for name in ("bug", "ok")}
    at = line_of("decoder.py", "jnp.cumsum(jnp.ones((b, t), BF16), axis=1)")
    assert rules["bug"] - rules["ok"] == {("narrow-integers", at), ("narrow-scan", at)}
    assert {rule for rule, _ in rules["ok"]} == {"narrow-exp"}


HONEST = [
    "positions.py:ok", "row_mask.py:ok", "past_length.py:ok_after", "page_scale.py:ok", "flushed.py:p0",
    "int_mask.py:program", "float_mask.py:program", "fp16.py:fixed", "fp16.py:gfixed", "closed_key.py:as_input",
    *(f"../../../examples/{name}_decoder.py:program" for name in ("equinox", "linen", "nnx", "own", "tapped")),
    "../../../examples/generation_loop.py:program", "../../../examples/training_step.py:program",
]  # fmt: skip


@pytest.mark.parametrize("name", few(HONEST, *HONEST[:2], "int_mask.py:program", *HONEST[-2:]))
def test_honest_programs_count_turn_and_average_in_formats_that_hold_it(name):
    with jax.numpy_dtype_promotion("standard"):
        rules = {rule for rule, _ in linted(program(name))}
    assert rules <= {"narrow-exp", "rounded-scores"}, "bfloat16 gates, and scores that these programs do round"


@pytest.mark.turn  # 11 s
@pytest.mark.parametrize(
    ("name", "point", "source"),
    [("overflow.py:buggy", "raw", "fp16.py:21"), ("fp16.py:gbuggy", "safe.grad", "fp16.py:55")],
)
def test_an_overflow_is_named_where_it_arises(name, point, source, tmp_path):
    found = audited(tmp_path, name)
    assert found.broken() == {(0, None, point)}  # what follows is input suspect
    said = headline(found.judgement, "run").sentence
    value = float(re.search(rf"^{point}, case a: overflow: (\S+) exceeds float16's 65504 at {source}; ", said)[1])
    assert value == pytest.approx(OVERFLOWS[name](), rel=0.05)  # two digits are told
    (told,) = found.diagnosis.findings
    assert (told.kind, told.cause) == ("format", "overflow")
    assert told.says in said


def attended():
    """Return the largest product q · k in FP64 of q and k in float16, as the program has them."""
    given = program("overflow.py:buggy")
    q, k = (
        np.einsum("td,dhk->thk", *(np.asarray(x, np.float64) for x in (given.cases["a"][0], given.params[name])))
        for name in ("wq", "wk")
    )
    return np.abs(np.einsum("thk,shk->hts", *(x.astype(np.float16).astype(np.float64) for x in (q, k)))).max()


def grown():
    """Return the largest exp(z) in FP64 of z in float16."""
    given = program("fp16.py:gbuggy")
    z = np.asarray(given.cases["a"][0], np.float64) @ np.asarray(given.params["w"], np.float64)
    return np.exp(z.astype(np.float16).astype(np.float64)).max()


OVERFLOWS = {"overflow.py:buggy": attended, "fp16.py:gbuggy": grown}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overflow.py:fixed", "fp16.py:gfixed"])
def test_without_the_overflow_nothing_is_found(name, tmp_path):
    found = audited(tmp_path, name)
    assert (found.judgement.exit_code, found.diagnosis.findings) == (0, ())


@pytest.mark.parametrize("name", few(["closed", "as_param", "as_input"], "closed"))
def test_a_typed_key_is_carried_as_it_is(name, tmp_path):
    found = audited(tmp_path, f"closed_key.py:{name}")
    assert found.judgement.exit_code == 0
    assert {e.point for e in found.records} == {"drop", "value", "outputs.out"}
    assert not found.diagnosis.findings
    assert not lint_program(program(f"closed_key.py:{name}")).findings
