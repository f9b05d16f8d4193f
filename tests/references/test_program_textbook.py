"""Programs beside a reference: their FP64 shadow is the textbook's or the user's, or what it is instead is named."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from exams.written import COMMON, FUSED, KEYS, LARGE, LARGEST, LOGITS, TURNED, VALUES, text
from precaudit import Program, gate
from precaudit.cli import run as command
from precaudit.diagnosis.beside import beside_textbook, combine
from precaudit.diagnosis.evidence.records import Finding
from precaudit.diagnosis.named import UNNAMED
from precaudit.diagnosis.naming import name_formula
from precaudit.diagnosis.programs import diagnose_program
from precaudit.errors import UserError
from precaudit.judging.verdicts import Verdict
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.programs import open_program_run
from precaudit.references.announced import announced_errors
from precaudit.references.comparison.programs import compare_program
from precaudit.references.formula import formula_numbers, read_shown, textbook_errors
from precaudit.references.mapped import textbook_of
from precaudit.references.mutations import declared as formats
from precaudit.references.mutations.bench import Tried
from precaudit.references.mutations.forms import usual_form
from precaudit.references.mutations.replay import Replay
from precaudit.references.mutations.variants import Variant
from precaudit.references.names_map import Names
from precaudit.references.traced.forward import Chains, recorded_calls
from precaudit.references.viewed import view_case
from precaudit.schema.filed import of_kinds
from precaudit.schema.places import Place
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import EmulatedError, ForwardError, LocalError
from precaudit.schema.records.lines import write_lines
from tests.helpers.paths import EXAMPLES
from tests.helpers.selected import few

OWN = EXAMPLES / "own_decoder.py"
MAP, CONFIG = EXAMPLES / "own_decoder.toml", EXAMPLES / "own_decoder.json"
RMS = "lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)"
GELU = "jax.nn.gelu(gate.astype(jnp.float32)).astype(x.dtype)"
# what is written in the decoder in place of what, what is named, and where it shows first
MISTAKES = {
    "RoPE base": ("10000.0 **", "31000.0 **", "RoPE base is 31000, the configuration says 10000", {"q"}),
    "positions": ("position.astype(jnp.float32) *", "(position + 1).astype(jnp.float32) *", "off by +1", {"q"}),
    "pairs": (
        "a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)",
        "a, b = x.astype(jnp.float32)[..., ::2], x.astype(jnp.float32)[..., 1::2]",
        "RoPE rotates pairs (2i, 2i + 1) and leaves", {"q"},
    ),
    "epsilon outside": (RMS, RMS.replace("lax.rsqrt(", "1 / (jnp.sqrt(").replace("True) + 1e-5)", "True)) + 1e-5)"),
                        "epsilon is added to the root", {"attn_norm"}),
    "epsilon": ("+ 1e-5)", "+ 3e-5)", "epsilon is 3e-5, the configuration says 1e-5", {"attn_norm"}),
    "sum for mean": ("jnp.mean(wide", "jnp.sum(wide", "is not divided by D", {"attn_norm"}),
    "scale": ("HEAD**-0.5", "HEAD**-0.5 * 1.02", "scale × √K is 1.02", {"attn_out"}),
    "scale omitted": (" * HEAD**-0.5", "", "the scale is omitted", {"attn_out"}),
    "activation": ("jax.nn.silu(gate)", GELU, "gelu with tanh in place of silu", {"mlp_act"}),
    "gate and up": ("jax.nn.silu(gate) * up", "jax.nn.silu(up) * gate", "gate and up are exchanged", {"mlp_act"}),
    "output": (" final, pref", " 0.5 * final, pref", "logit scale is 0.5", {"logits"}),
    "one channel": ("(wide * scale).astype", "(wide * scale).at[5].multiply(1.5).astype", "channel 5", {"attn_norm"}),
    "clipped": ("jax.nn.silu(gate) * up", "jnp.clip(jax.nn.silu(gate) * up, -0.5, 0.5)", "±0.5", {"mlp_act"}),
    "mask": ("jnp.arange(SLOTS) <= position", "jnp.arange(SLOTS) <= position + 1", "mask one ahead", {"attn_out"}),
    "one head": ("mixed = attended @", "mixed = attended.at[:16].set(0) @", "none reproduces it", {"attn_proj"}),
}  # fmt: skip


def written(folder, old, new):
    """Return the decoder with one thing written otherwise."""
    text = OWN.read_text()
    assert text.count(old) == 1
    folder.mkdir(exist_ok=True)
    file = folder / f"{abs(hash((old, new)))}.py"
    file.write_text(text.replace(old, new))
    return replace(load_program(f"{file}:program"), steps=3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    program = replace(load_program(f"{OWN}:program"), steps=3)
    return program, trace_program(program, tmp_path_factory.mktemp("own") / "run")


def beside(program, opened):
    """Return the textbook, one case of program and textbook in FP64, and the program's values."""
    chains = Chains(program, prepare_program(program))
    with jax.enable_x64(True):
        exact = [t.exact for t in chains.calls(recorded_calls(opened, "a"), drawn=0)]
    book = textbook_of(Names(MAP, CONFIG), program, opened)
    return book, read_shown(opened, book, "a", exact), exact


def test_an_honest_decoder_is_the_textbook(recorded):
    program, opened = recorded
    errors = compare_program(opened, program, Names(MAP, CONFIG))
    formula = [e for e in errors if e.kind == "formula"]
    assert len(formula) == 2 * 4 * (3 * 10 + 2)
    assert max(value(e.rel_l2) for e in formula) <= 1e-9
    assert {e.reference for e in formula} >= {"llama:0.q", "llama:2.mlp_out", "llama:.logits"}
    assert gate(opened.folder).exit_code == 0
    found = diagnose_program(opened, program)
    assert (found.findings, found.unknown, found.exit_code) == ((), (), 0)
    assert found.explained == len(errors)


QUICK = ("RoPE base", "epsilon outside", "one channel", "clipped", "mask", "one head")


@pytest.mark.turn  # 7 s
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MISTAKES])
def test_what_is_written_otherwise_is_named_where_it_is(name, tmp_path):
    old, new, says, points = MISTAKES[name]
    program = written(tmp_path / "code", old, new)
    opened = trace_program(program, tmp_path / "run")
    book, made, _ = beside(program, opened)
    first = {p.point: name_formula(book, made, p) for p in book.pairs if p.point in points and p.layer in (0, None)}
    for point in points:
        assert first[point] is not None
        assert says in f"{first[point].says} {first[point].cause}", first[point]
        assert first[point].cause == "none reproduces it" or first[point].left <= 1e-6
        if point == "attn_out":  # scores are not shown, and probabilities are
            assert first[point].pair.point == "probs"
    # what the program shows all inputs of is judged on them, wherever it lies
    alone = {p.point for p in made.seen if name_formula(book, made, p, suspect=True) is not None}
    assert alone <= points


@pytest.mark.turn  # 10 s
def test_a_finding_names_points_layers_lines_and_the_number(tmp_path):
    """The whole way: records, verdicts that inherit, one finding, exit codes."""
    program = written(tmp_path / "code", "10000.0 **", "500000.0 **")
    opened = trace_program(
        program,
        tmp_path / "run",
        options=ProgramTraceOptions(reference=f"{next((tmp_path / 'code').iterdir())}:program"),
    )
    compare_program(opened, program, Names(MAP, CONFIG))
    judged = gate(opened.folder)
    assert judged.exit_code == 1
    failed = {(v.point, v.layer, v.kind) for v in judged.verdicts if v.status == "fail"}
    assert failed == {("query~1", 0, "formula"), ("keys", 0, "formula")}  # both are turned
    assert judged.counts["input suspect"] > 20
    found = diagnose_program(opened, program)
    (one,) = found.findings
    assert one.kind == "semantics"
    assert one.layers == (0, 1, 2)
    assert one.prompts == ("a", "b")
    lines = ", ".join(p.source for p in opened.record.points if p.name in ("query~1", "keys"))
    says = f"RoPE base is 500000, the configuration says 10000: q and k of layers 0 to 2 (query~1, keys, {lines})"
    assert one.says == f"{says}, from call 1 on", "at position 0 nothing is turned"
    assert found.exit_code == 1


def test_caches_are_held_against_the_textbook_where_a_map_names_them(recorded):
    program, opened = recorded
    book, made, _ = beside(program, opened)
    assert {(p.point, p.layer) for p in made.caches} == {(n, i) for n in ("k_cache", "v_cache") for i in range(3)}
    found = [e for e in textbook_errors(opened, book, "a", made) if e.point in ("keys", "values")]
    assert len(found) == 2 * 3 * 4
    assert max(value(e.rel_l2) for e in found) <= 1e-9
    assert {e.n for e in found if e.step == 3} == {4 * 64}


def in_fp8(line, row):
    """Return a line that writes a row into a cache, and the same with the row in float8."""
    return line, line.replace(f"{row}[None]", f"{row}.astype(jnp.float8_e4m3fn).astype({row}.dtype)[None]")


# what is written in a format that nothing announces: what is told of it, and which caches hold other bits than the rows
NARROW = {
    "nothing": (("", ""), set(), set()),
    "keys": (in_fp8(KEYS, "key"), {("keys", "stored again in float8_e4m3fn")}, set()),  # no product shows k
    "values": (in_fp8(VALUES, "value"), set(), {"values"}),
    "tables": (TURNED, {("query~1", "RoPE tables in bfloat16"), ("keys", "RoPE tables in bfloat16")}, set()),
    "softmax": (*COMMON["softmax in bf16"], {("attended", FUSED["softmax in bf16"])}, set()),
    "logits": ((LOGITS, f"{LOGITS}\n    logits = lax.reduce_precision(logits, 8, 7)"),
               {("outputs.logits", "stored in bfloat16")}, set()),
}  # fmt: skip


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("name", few(NARROW, "nothing", "keys", "values", "logits"))  # 5 s each
def test_formats_are_seen_in_values_where_no_policy_is_announced(name, tmp_path):
    """By the rows that calls wrote into caches, by 16-bit results bit for bit, and by what a float32 result holds."""
    (old, new), told, other = NARROW[name]
    program = (
        replace(load_program(f"{OWN}:program"), steps=3) if name == "nothing" else written(tmp_path / "code", old, new)
    )
    with jax.numpy_dtype_promotion("standard"):  # as its author has it
        opened = trace_program(program.some(["a"]), tmp_path / "run")
    book = textbook_of(Names(MAP, CONFIG), program, opened)
    found = {(pair.shown.name, narrow.cause) for _, pair, narrow in formats.declared_formats(opened, book, "a", ())}
    assert found == told
    states = list(announced_errors(view_case(opened, book, "a"), book, "a", "call"))
    assert {e.point for e in states} == {"keys", "values"}
    assert {e.point for e in states if e.mismatched} == other


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("edits", [(), COMMON[LARGEST]], ids=["honest", "no maximum"])
def test_what_makes_infinity_is_named_beside_the_textbook(edits, tmp_path):
    """Large scores: the textbook's softmax holds them, exponentials without the maximum overflow in float32 alone."""
    (tmp_path / "large.py").write_text(text("own_decoder", (*LARGE, *edits)))
    program = replace(load_program(f"{tmp_path / 'large.py'}:program"), steps=4).some(["a"])
    opened = trace_program(program, tmp_path / "run")
    book = textbook_of(Names(MAP, CONFIG), program, opened)
    shown_by = [(p.step, p.shown.name) for p in book.pairs if p.point == "probs"]
    held = [opened.tensors("a", call, "taps")["probs"].astype(np.float32) for call in range(5)]
    broken = [
        Verdict.of(Place("a", "call", call, step, name).record(LocalError, "run", "fp64"), "nonfinite")
        for call, x in enumerate(held) for step, name in shown_by if edits == () or not np.isfinite(x[step]).all()
    ]  # fmt: skip
    found = beside_textbook(opened, book, broken)
    assert [(f.cause, f.point) for f in found] == [("maximum not subtracted", "attn_out")] * bool(edits)


def tapped(folder, old="", new=""):
    """Return a decoder of one layer with taps of its own, one thing written otherwise, and its textbook."""
    assert not old or TAPPED.count(old) == 1
    (folder / "mine.py").write_text(TAPPED.replace(old, new) if old else TAPPED)
    (folder / "names.toml").write_text(TAPPED_MAP)
    config = CONFIG.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1')
    (folder / "config.json").write_text(config.replace('embeddings": 16', 'embeddings": 128'))
    return load_program(f"{folder / 'mine.py'}:program"), Names(folder / "names.toml", folder / "config.json")


@pytest.mark.turn  # 14 s
@pytest.mark.parametrize(
    ("old", "new", "cause", "says"),
    [
        (
            'p["embed"][tokens]',
            '3 * p["embed"][tokens]',
            "embedding factor",
            "rows are times 3, the configuration says 1",
        ),
        pytest.param(
            'p["embed"][tokens]', 'p["embed"][tokens - 1]', "none reproduces it", "is not what", marks=pytest.mark.slow
        ),
    ],
)  # 10 s each
def test_what_enters_the_first_layer_is_told(old, new, cause, says, tmp_path):
    program, names = tapped(tmp_path, old, new)
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program, names)
    (one,) = diagnose_program(opened, program).findings
    assert (one.cause, one.point, one.layers) == (cause, "resid_in", (0,))
    assert says in one.says


@pytest.mark.slow  # 18 s
def test_what_fp64_reached_before_it_failed_is_diagnosed(tmp_path):
    """A loop whose ``advance`` takes no FP64: the first call is judged and named, the others are unknown."""
    program = written(tmp_path / "code", "+ 1e-5)", "+ 3e-5)")
    own = program.advance

    def advance(inputs, outputs):
        if any(x.dtype == jnp.float64 for x in jax.tree.leaves(outputs)):
            raise TypeError("no FP64 here")
        return own(inputs, outputs)

    program = replace(program, advance=advance)
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program, Names(MAP, CONFIG))
    assert {e.step for e in errors if e.kind == "formula" and e.unknown is None} == {0}
    found = diagnose_program(opened, program)
    assert "no FP64 here" in found.unknown[0]
    assert {f.cause for f in found.findings} == {"epsilon 3e-5"}


@pytest.mark.turn  # 10 s
def test_a_map_that_was_altered_since_is_no_reference(recorded, tmp_path):
    program, opened = recorded
    names = tmp_path / "names.toml"
    names.write_bytes(MAP.read_bytes())
    compare_program(opened, program, Names(names, CONFIG))
    assert diagnose_program(opened, program).exit_code == 0
    names.write_text(MAP.read_text() + "\n# another\n")
    with pytest.raises(UserError, match=r"names.toml is not what compare read"):
        diagnose_program(opened, program)


@pytest.mark.turn  # 12 s
def test_a_branch_that_was_not_taken_is_no_formula(tmp_path):
    """The same norm in two branches, of which the map names one: each case takes another."""
    new = (
        'lax.cond(tokens[0] > 5, lambda: tap(norm(x, p["mlp_norm"]), "second"), '
        'lambda: tap(norm(x, p["mlp_norm"]), "other"))'
    )
    program, names = tapped(tmp_path, 'tap(norm(x, p["mlp_norm"]), "second")', new)
    (first,) = program.cases["a"]
    program = replace(program, cases={"a": (first.at[0].set(9),), "b": (first.at[0].set(1),)})
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program, names)
    formula = {(e.prompt, e.point): e.skipped for e in errors if e.kind == "formula"}
    assert formula["a", "second"] is None
    assert formula["b", "second"] == "its branch was not taken"
    assert gate(opened.folder).exit_code == 0
    assert diagnose_program(opened, program).exit_code == 0


@pytest.mark.turn  # 9 s
def test_what_the_gate_fails_is_a_finding_or_more(recorded):
    """Forward errors alone: no segment says why, and it is no clean bill."""
    program, opened = recorded
    errors = [
        msgspec.structs.replace(e, ratio=100.0) if e.kind == "forward" and e.point == "final" else e
        for e in compare_program(opened, program)
    ]
    marks = msgspec.json.decode((opened.folder / "compared.json").read_bytes())
    write_lines(opened.folder / "errors.jsonl", errors)
    marks["errors"] = file_hash(opened.folder / "errors.jsonl")
    (opened.folder / "compared.json").write_bytes(msgspec.json.encode(marks))
    assert gate(opened.folder).exit_code == 1
    found = diagnose_program(opened, program)
    assert found.exit_code == 1
    assert "8 forward records fail" in found.findings[0].says


def test_values_that_are_nan_in_fp64_too_are_said_to_be(recorded):
    program, opened = recorded
    book, made, _ = beside(program, opened)
    pair = next(p for p in book.pairs if p.point == "mlp_act")
    made.seen[pair][0, 1] = np.nan
    assert "NaN" in name_formula(book, made, pair).says


def test_a_formula_that_makes_nan_is_named_by_the_rows_where_it_does_not(recorded):
    """1/√mean(x) of a row whose mean is below 0, and of others: NaN has to fall together."""
    program, opened = recorded
    book, made, _ = beside(program, opened)
    pair = next(p for p in book.pairs if p.point == "attn_norm")
    x = made.expected[0, "resid_in"]
    weight = made.seen[pair] * np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) / x
    x *= np.asarray([-1, 1, 1, 1])[:, None] * np.sign(x.mean(-1, keepdims=True))
    with np.errstate(invalid="ignore"):
        made.seen[pair] = x / np.sqrt(x.mean(-1, keepdims=True) + 1e-5) * weight
    assert np.isnan(made.seen[pair]).all(-1).tolist() == [[True, False, False, False]]
    assert name_formula(book, made, pair).cause == "mean for mean square"
    made.seen[pair][0, 0] = 1.0
    assert name_formula(book, made, pair).cause != "mean for mean square"


@pytest.mark.slow  # 6 s
def test_batches_of_sequences_are_held_against_the_textbook_one_by_one(tmp_path):
    """Two sequences of 96 tokens at once, and the row of the worst counted through both."""
    text = TAPPED.replace("def call(p, tokens):", "def one(p, tokens):").replace(
        "draw = np", "call = jax.vmap(one, (None, 0))\ndraw = np"
    )
    text = text.replace("draw.integers(0, V, T)", "draw.integers(0, V, (2, T))")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "names.toml").write_text(TAPPED_MAP)
    config = CONFIG.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1')
    (tmp_path / "config.json").write_text(config.replace('embeddings": 16', 'embeddings": 128'))
    program = load_program(f"{tmp_path / 'mine.py'}:program")
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program, Names(tmp_path / "names.toml", tmp_path / "config.json"))
    formula = [e for e in errors if e.kind == "formula"]
    assert len(formula) == 9
    assert max(value(e.rel_l2) for e in formula) <= 1e-9
    assert all(e.n % 192 == 0 for e in formula)


@pytest.mark.slow
def test_two_faults_are_two_findings(tmp_path):
    """The second reads what the first spoilt, and is judged on that."""
    file = tmp_path / "two.py"
    file.write_text(OWN.read_text().replace("10000.0 **", "70000.0 **").replace("jax.nn.silu(gate)", GELU))
    program = replace(load_program(f"{file}:program"), steps=1)
    opened = trace_program(program, tmp_path / "run")
    compare_program(opened, program, Names(MAP, CONFIG))
    causes = {f.cause for f in diagnose_program(opened, program).findings}
    assert causes == {"RoPE base 70000", "activation gelu with tanh"}


@pytest.mark.slow
def test_what_is_spoilt_and_not_shown_is_not_blamed(tmp_path):
    """Without attn_norm in the map, q of later layers reads what nobody knows."""
    program = written(tmp_path / "code", "jax.nn.silu(gate)", GELU)
    opened = trace_program(program, tmp_path / "run")
    names = tmp_path / "names.toml"
    names.write_text("\n".join(line for line in MAP.read_text().splitlines() if not line.startswith("attn_norm")))
    compare_program(opened, program, Names(names, CONFIG))
    assert {f.cause for f in diagnose_program(opened, program).findings} == {"activation gelu with tanh"}


@pytest.mark.slow  # 64 s
def test_an_operation_that_reads_one_input_unrounded_and_another_rounded_passes(tmp_path):
    """What XLA:CPU makes of this activation: the gate as the product made it, up as it was stored."""
    program = written(tmp_path / "code", "jax.nn.silu(gate)", GELU)
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    assert gate(tmp_path / "run").exit_code == 0
    partly = [e for e in of_kinds(errors, LocalError) if e.elided and "some inputs" in e.elided["policy:equations"]]
    assert {e.point for e in partly} == {"act"}
    assert max(value(e.unexplained.rel_l2) for e in partly) < 1e-6


@pytest.mark.turn  # 6 s
def test_constants_of_a_function_taken_in_bfloat16_are_named(tmp_path):
    """What jax.nn.gelu does with a bfloat16 argument."""
    program = written(tmp_path / "code", "jax.nn.silu(gate)", "jax.nn.gelu(gate)")
    opened = trace_program(program, tmp_path / "run")
    config = tmp_path / "config.json"
    config.write_text(CONFIG.read_text().replace("{", '{"hidden_act": "gelu_pytorch_tanh",', 1))
    book = textbook_of(Names(MAP, config), program, opened)
    made = read_shown(opened, book, "a", beside(program, opened)[2])
    named = {p.point: name_formula(book, made, p) for p in made.seen if p.layer == 0}
    assert {point for point, found in named.items() if found is not None} == {"mlp_act"}
    found = named["mlp_act"]
    assert (found.kind, found.cause) == ("format", "activation's constants in bfloat16")
    assert found.says == "the constants of gelu with tanh are stored in bfloat16"


def test_a_function_of_the_users_is_a_reference_too(tmp_path):
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.bfloat16)
    program = Program(lambda w, x: jnp.tanh(x @ w) @ w, weights, {"a": (jnp.ones((2, 8), jnp.bfloat16),)}, outputs="y")
    opened = trace_program(program, tmp_path / "run")

    def own(w, x, factor=1.0):
        w, x = (np.asarray(a, np.float64) for a in (w, x))
        return {"outputs.y": factor * np.tanh(x @ w) @ w}

    errors = compare_program(opened, program, own)
    (one,) = [e for e in errors if e.kind == "formula"]
    assert (one.point, one.reference) == ("outputs.y", "reference")
    assert value(one.rel_l2) <= 1e-12
    assert gate(opened.folder).exit_code == 0
    compare_program(opened, program, lambda w, x: own(w, x, 1 + 1e-5))
    assert gate(opened.folder).exit_code == 1
    (found,) = diagnose_program(opened, program).findings
    assert found.point == "outputs.y"
    assert value(found.rel_l2) == pytest.approx(1e-5, rel=1e-3)
    for wrong, words in (
        (lambda _w, x: {"nothing": x}, "'nothing'"), (lambda _w, x: {"outputs.y": x[:1]}, r"\[1, 8\]"),
        (lambda *_: {}, "must return"), (lambda *_: None, "must return"),
        (lambda *_: 1 / 0, r"raised ZeroDivisionError: division by zero \(.*test_program_textbook.py:"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            compare_program(opened, program, wrong)


def test_what_is_not_finite_is_no_formula():
    good = np.ones((1, 3, 4))
    bad = good.copy()
    bad[0, 1] = np.nan
    found = formula_numbers(bad, good)
    assert found["nonfinite"] == 4
    assert found["rel_l2"] == "nan"
    assert found["scopes"]["token"]["rel_l2"][1] == 1


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    """XLA takes the last row of the embedding for them, and so nothing else would say it."""
    own = load_program(f"{OWN}:program")
    program = replace(own, cases={"a": (jnp.int32(300), *own.cases["a"][1:])}, steps=0)
    with pytest.raises(UserError, match="outside the vocabulary"):
        compare_program(trace_program(program, tmp_path / "run"), program, Names(MAP, CONFIG))


WRONG = {
    "a tensor without an entry": ('"model.norm.weight" = { path = "norm" }\n', "", "model.norm.weight"),
    "a path that is not there": ('path = "layers/query"', 'path = "layers/quary"', "layers/query"),
    "axes that do not fit": ('axes = "l d q -> q d"', 'axes = "l d h q -> q d"', "do not fit"),
    "axes omitted": ('path = "layers/down", axes = "l f d -> d f"', 'path = "layers/down"', "comes out as"),
    "a point that is none": ('attn_norm = "normed"', 'attn_morm = "normed"', "attn_norm"),
    "a point of a cache": ('k_cache = { name = "keys"', 'k_cache = { name = "normed"', "k_cache"),
    "a point the program lacks": ('v = "value"', 'v = "valeu"', "value"),
    "a point of another size": ('v = "value"', 'v = "act"', "give its axes"),
    "tokens that are no integers": ("tokens = 0", "tokens = 2", "token ids"),
    "an input that is not there": ("tokens = 0", "tokens = 9", "is not there"),
    "no TOML": ("[points]", "[points", "names.toml"),
    "a field that is none": ("tokens = 0", "token = 0", "token"),
}  # fmt: skip


LONG = {"a point of another size", "tokens that are no integers", "an input that is not there"}  # 6 to 9 s each


@pytest.mark.parametrize("name", few(WRONG, *(WRONG.keys() - LONG)))
def test_a_wrong_map_is_refused_in_a_line(recorded, name, tmp_path, capsys):
    old, new, words = WRONG[name]
    text = MAP.read_text()
    assert old in text
    names = tmp_path / "names.toml"
    names.write_text(text.replace(old, new))
    folder = recorded[1].folder
    before = sorted(p.name for p in folder.iterdir())
    program = ["--program", f"{tmp_path / 'four.py'}:program"]
    (tmp_path / "four.py").write_text(OWN.read_text().replace("steps=7", "steps=3"))
    assert command(["compare", str(folder), *program, "--map", str(names), "--config", str(CONFIG)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert words in told[-1]
    assert len(told) <= 2
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", str(CONFIG)], "--map"),
        (["--map", str(MAP), "--reference", "x.py:y"], "not both"),
        (["--map", "nowhere.toml"], "nowhere.toml"),
        (["--map", str(MAP), "--config", "nowhere.json"], "nowhere.json"),
        (["--map", str(MAP), "--config", str(MAP)], "not JSON"),
        (["--map", str(MAP), "--family", "gemma2"], "--family is gemma2"),
        (["--map", str(MAP), "--family", "lama"], "llama"),
        (["--reference", "nowhere.py:own"], "nowhere.py"),
        (["--reference", f"{OWN}:LAYERS"], "is no function"),
    ],
)
def test_wrong_references_are_refused_in_a_line(recorded, options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.py").write_text(OWN.read_text().replace("steps=7", "steps=3"))
    assert command(["compare", str(recorded[1].folder), "--program", "four.py:program", *options]) == 2
    told = capsys.readouterr().err.splitlines()
    assert words in told[-1]


@pytest.mark.slow  # 34 s
def test_the_command_says_the_finding_and_its_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN.read_text().replace("10000.0 **", "500000.0 **").replace("steps=7", "steps=1"))
    assert command(["trace", "mine.py:program", "-o", "run"]) == 0
    assert command(["compare", "run", "--map", str(MAP), "--config", str(CONFIG)]) == 0
    capsys.readouterr()
    assert command(["diagnose", "run"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "✗ semantics: RoPE base is 500000, the configuration says 10000: q and k of layers 0 to 2" in out
    assert Path("run/findings.jsonl").read_text().count("\n") == 1
    assert command(["diagnose", "run", "--layers", "0"]) == 1
    assert command(["compare", "run"]) == 0  # without the map nothing is held against the textbook any more
    assert command(["diagnose", "run"]) == 0
    assert open_program_run("run").record.calls == 2


TAPPED = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from precaudit import Program

D, H, K, F, V, T = 64, 4, 16, 128, 256, 96
def norm(x, w):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * w
def rotate(x):
    speed = 10000.0 ** (-jnp.arange(K // 2, dtype=jnp.float32) / (K // 2))
    angle = jnp.arange(T, dtype=jnp.float32)[:, None] * speed
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
def call(p, tokens):
    x = tap(p["embed"][tokens], "stream")
    h = tap(norm(x, p["attn_norm"]), "normed")
    q, k = (tap(rotate((h @ p[n]).reshape(T, H, K)), n) for n in "qk")
    v = tap((h @ p["v"]).reshape(T, H, K), "v")
    s = jnp.einsum("thk,shk->hts", q, k) * jnp.bfloat16(0.25)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
    w = jax.nn.softmax(s.astype(jnp.float32), axis=-1).astype(x.dtype)
    y = tap(jnp.einsum("hts,shk->thk", w, v), "mixed")
    x = tap(x + tap(y.reshape(T, -1) @ p["o"], "added"), "middle")
    h = tap(norm(x, p["mlp_norm"]), "second")
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return norm(x, p["norm"]) @ p["embed"].T
draw = np.random.default_rng(3)
def drawn(*shape):
    return jnp.asarray(draw.standard_normal(shape) / np.sqrt(shape[0]), jnp.bfloat16)
params = {n: 1 + 0.1 * drawn(D) for n in ("attn_norm", "mlp_norm", "norm")} | {n: drawn(D, D) for n in "qkvo"}
params |= {"q": 3 * params["q"], "embed": 8 * drawn(V, D), "gate": drawn(D, F), "up": drawn(D, F), "down": drawn(F, D)}
program = Program(call, params, {"a": (jnp.asarray(draw.integers(0, V, T), jnp.int32),)}, outputs="logits")
"""
TAPPED_MAP = """
[tensors]
"model.embed_tokens.weight" = { path = "embed" }
"model.norm.weight" = { path = "norm" }
"model.layers.{i}.input_layernorm.weight" = { path = "attn_norm" }
"model.layers.{i}.post_attention_layernorm.weight" = { path = "mlp_norm" }
"model.layers.{i}.self_attn.q_proj.weight" = { path = "q", axes = "d q -> q d" }
"model.layers.{i}.self_attn.k_proj.weight" = { path = "k", axes = "d q -> q d" }
"model.layers.{i}.self_attn.v_proj.weight" = { path = "v", axes = "d q -> q d" }
"model.layers.{i}.self_attn.o_proj.weight" = { path = "o", axes = "q d -> d q" }
"model.layers.{i}.mlp.gate_proj.weight" = { path = "gate", axes = "d f -> f d" }
"model.layers.{i}.mlp.up_proj.weight" = { path = "up", axes = "d f -> f d" }
"model.layers.{i}.mlp.down_proj.weight" = { path = "down", axes = "f d -> d f" }
[points]
resid_in = "stream"
attn_norm = "normed"
q = "q"
k = "k"
v = "v"
attn_out = "mixed"
attn_proj = "added"
resid_mid = "middle"
mlp_norm = "second"
"""
DECLARED = {
    "nothing": ("", "", None, set(), False),
    "norm": (
        "wide = x.astype(jnp.float32)\n    return (wide *", "wide = x\n    return (wide *",
        "norm's statistics in bfloat16", {"normed", "second"}, False,
    ),
    "scores wider than the policy's": (
        'jnp.einsum("thk,shk->hts", q, k) * jnp.bfloat16(0.25)',
        'jnp.einsum("thk,shk->hts", 4 * q, k, preferred_element_type=jnp.float32) * 0.0625', None, set(), False,
    ),
    "angles": (
        "angle = jnp.arange(T, dtype=jnp.float32)[:, None] * speed",
        "angle = (jnp.arange(T).astype(jnp.bfloat16)[:, None] * speed.astype(jnp.bfloat16)).astype(jnp.float32)",
        "RoPE", {"q", "k"}, True,
    ),
    "tables": ("cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]",
               "cos, sin = (f(angle).astype(jnp.bfloat16).astype(jnp.float32)[:, None] for f in (jnp.cos, jnp.sin))",
               "RoPE tables in bfloat16", {"q", "k"}, False),
}  # fmt: skip


@pytest.mark.turn  # 6 s
@pytest.mark.parametrize("name", few(DECLARED, "norm", "angles"))  # 10 s each
def test_narrow_formats_that_a_program_declares_are_named_beside_the_textbook(name, tmp_path):
    """Up to twice the error that float32 inside leaves is a note with its price; beyond, gate and diagnose fail it."""
    old, new, cause, points, beyond = DECLARED[name]
    program, names = tapped(tmp_path, old, new)
    opened = trace_program(program, tmp_path / "run")
    errors = compare_program(opened, program, names)
    assert {e.point for e in of_kinds(errors, EmulatedError, ForwardError) if e.narrow is not None} == points
    assert all(cause in e.narrow.cause for e in of_kinds(errors, EmulatedError) if e.narrow is not None)
    judged, found = gate(opened.folder), diagnose_program(opened, program)
    assert (judged.exit_code, found.exit_code) == ((1, 1) if beyond else (0, 0))
    told = [f.says for f in found.findings] if beyond else list(found.notes)
    assert [f.kind for f in found.findings] == ["format"] * beyond
    assert len(told) == bool(cause)
    for says in told:
        assert all(point in says for point in points)
        off, wide = (float(x) for x in re.findall(r"([\d.]+) u", says)[-2:])
        assert (off > 2 * wide) is beyond


def test_a_format_that_leaves_as_much_as_float32_inside_is_not_told():
    """A form that closes one record by little, as one of many tried may: float32 inside leaves hardly more."""
    form = Variant("sums of 64 keys in bfloat16", "format", "sums of 64 keys are kept in bfloat16", usual_form)
    announced, near = (Tried(form, x, 0.9, 0.9) for x in (0.80, 0.90))
    exact = Tried(form, 0.96, 0.99, 0.9)  # and gives the bits, which float32 inside within its limits does not
    zero = np.zeros((1, 1, 1))
    told = [
        formats._is_told_apart(Replay((announced,), announced, x, zero, zero, zero, zero)) for x in (near, exact, None)
    ]
    assert told == [False, True, False]


def test_what_two_ways_name_alike_is_one_finding():
    """A formula's finding is of q and k together, and what is replayed of each alone."""

    def finding(point, cause, layers=()):
        fields = dict.fromkeys(Finding.__struct_fields__) | {"kind": "semantics", "cause": cause, "point": point}
        return Finding(
            **fields | {"layer": 0, "layers": layers, "says": cause, "phases": (), "prompts": (), "records": 1}
        )

    both, k, other = finding("q", "RoPE base 1e6", (0, 1)), finding("k", "RoPE base 1e6"), finding("v", "scale")
    assert combine([both], [k, other]) == [both, other]
    cache, values = finding("k_cache", "cache in int8"), finding("v_cache", "cache in int8")
    assert combine([cache], [values]) == [cache]  # the first point of one cause
    assert combine([values], [cache]) == [cache]
    assert combine([finding("q", UNNAMED)], [finding("k", UNNAMED)])[1:]
