"""Two programs of one formula, and of two: what others reported, as edits of an example, each beside its fix."""

import re
import shutil
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit import Program
from precaudit.cli import run as command
from precaudit.diagnosis.sameness.records import Sameness
from precaudit.errors import UserError
from precaudit.recording.programs.loading import load_program
from precaudit.references.alignment.vectors import Vectors
from tests.helpers.paths import EXAMPLES
from tests.helpers.two_ways import TWO_WAYS, edited_program

SCORES_ALL = 'jnp.einsum("thk,shk->hts", query, key, preferred_element_type=jnp.float32) * HEAD**-0.5'
SCORES_ONE = 'jnp.einsum("hk,shk->hs", query, keys, preferred_element_type=jnp.float32) * HEAD**-0.5'
KEYS = "lax.dynamic_update_index_in_dim(held, y, position, 0) for held, y in ((keys, key), (values, value))\n        )"
CAP = "20 * jnp.tanh(({}) / 20)"
SLOPES = "jnp.arange(1, HEADS + 1).astype(jnp.float32)[:, None{}] * 0.1"
WINDOW = 'w["down"]), {}'
# edits of both, right edits of the step, the mistake (what it writes instead), and where the step parts first:
# point, call, layer. In call 0 there is one key, which any query gives a probability of 1.
FLOAT = ".astype(jnp.float32)"
LATE = f"(rotate(query, 1 + position{FLOAT}), rotate(key, position{FLOAT}))"
PAGE = "keys = keys * jnp.where(slots >= 4, 1.25, 1.0).astype(keys.dtype)[:, None, None]"
BIAS = f"* (rows[:, None] - rows[None]){FLOAT}", f"* (position - slots){FLOAT}"
PAIRS = {
    "a slot too many": ((), (), ("slots <= last", "slots <= last + 1"), ("probs", 0, (0,))),
    "query rotated late": (
        (), (), (f"(rotate(y, position{FLOAT}) for y in (query, key))", LATE), ("query", 1, (0,)),
    ),
    "soft cap in one alone": (
        ((SCORES_ALL, CAP.format(SCORES_ALL)),), ((SCORES_ONE, CAP.format(SCORES_ONE)),), None, ("probs", 1, (0,)),
    ),
    "ALiBi of the query's length": (
        ((SCORES_ALL, f"{SCORES_ALL} - {SLOPES.format(', None')} {BIAS[0]}"),),
        ((SCORES_ONE, f"{SCORES_ONE} - {SLOPES.format('')} {BIAS[1]}"),),
        ("* (position - slots)", "* (0 * slots)"), ("probs", 1, (0,)),
    ),
    "a page of the cache by another scale": ((), (), (KEYS, f"{KEYS}\n        {PAGE}"), ("scores", 4, (0,))),
    "a prefix with another RoPE base": (
        (), (), ("angles = position * 10000.0 **", "angles = position * jnp.where(position < 4, 5000.0, 10000.0) **"),
        ("query", 1, (0,)),
    ),
    "epsilon": ((), (), ("keepdims=True) + 1e-5", "keepdims=True) + 1e-6"), ("normed", 0, (0,))),
    "heads exchanged": (
        (), (), ('"hs,shk->hk", probs, values)', '"hs,shk->hk", probs[::-1], values)'), ("mixed", 1, (0,)),
    ),
    "values a step old": (
        (), (), ('"hs,shk->hk", probs, values)', '"hs,shk->hk", probs, both[1][1])'), ("mixed", 0, (0,)),
    ),
}  # fmt: skip
QUICK = ("a page of the cache by another scale",)


def compared(tmp_path, both, step, **how):
    one = edited_program(tmp_path / "whole.py", both, "full")
    other = edited_program(tmp_path / "steps.py", step, "cached")
    (found,) = precaudit.same(one, other, **how).cases
    return found


@pytest.mark.turn  # 9 s
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PAIRS])
def test_a_mistake_in_one_of_two_is_found_where_it_begins_and_its_fix_is_one_formula(name, tmp_path):
    both, right, mistake, (point, call, step) = PAIRS[name]
    fixed = compared(tmp_path, both, right)
    assert (fixed.answer, fixed.partings) == ("same", ())
    assert fixed.outputs[0].apart < 1e-12
    wrong = [] if mistake is None else [*right, mistake]
    found = compared(tmp_path, both, wrong)
    assert (found.answer, found.exit_code) == ("other", 1)
    parting = found.partings[1]
    assert [re.split(r"[~#.]", p.point)[0] for p in found.partings] == [point, point]
    assert (parting.call, parting.step) == (call, step), parting
    assert "steps.py:" in parting.source


@pytest.mark.turn  # 18 s
def test_both_turned_by_one_position_more_is_one_formula(tmp_path):
    """Scores hold the difference of positions alone."""
    found = compared(tmp_path, (), [("rotate(y, position.astype", "rotate(y, 1 + position.astype")])
    assert found.answer == "same"


@pytest.mark.slow
def test_keys_that_one_of_them_rounds_are_rounding_with_its_price(tmp_path):
    """The whole keeps its keys in float32: FP64 knows no difference, and it is nearer."""
    unrounded = ("b * cos + a * sin], axis=-1).astype(x.dtype)", "b * cos + a * sin], axis=-1)")
    one = edited_program(tmp_path / "whole.py", [unrounded], "full")
    (found,) = precaudit.same(one, load_program(f"{TWO_WAYS}:cached")).cases
    assert found.answer == "same"
    off = found.outputs[0].rounding
    assert off[0] != off[1]


def decoder(rows, pads, mask):
    """Return a row's mean over all rows so far that are no padding, and a factor."""

    def call(params, x):
        n = jnp.arange(rows)
        seen = (n[None] <= n[:, None]) & (n[None] >= pads * mask)
        return jnp.where(seen, 1.0, 0.0) @ x / jnp.maximum(seen.sum(1, keepdims=True), 1).astype(jnp.float32) @ params

    w = jax.random.normal(jax.random.key(0), (6, 6))
    x = jax.random.normal(jax.random.key(1), (4, 6))
    return Program(call, w, {"a": (jnp.concatenate([jnp.ones((pads, 6)), x]),)}, outputs="out")


def test_rows_of_a_padded_batch_are_found_where_they_are_equal():
    alone, padded = decoder(4, 0, True), decoder(6, 2, True)
    every = precaudit.same(padded, alone)
    (found,) = every.cases
    assert (found.answer, found.outputs[0].first, found.outputs[0].rows) == ("same", (2, 0), 4)
    assert "are one formula" in repr(every).splitlines()[0]
    assert "exit code: 0" in repr(every)


def test_padding_that_is_attended_is_not_known_until_it_is_said_where_the_shorter_begins():
    alone, attended = decoder(4, 0, True), decoder(6, 2, False)
    (found,) = precaudit.same(attended, alone).cases
    assert found.answer == "unknown"
    assert found.says.startswith("cannot be compared: of 6 and 4 rows of out none is equal")
    found = precaudit.same(attended, alone, rows=2)
    assert (found.cases[0].answer, found.exit_code) == ("other", 1)
    assert found.cases[0].outputs[0].where == (0, 1, 2, 3)


def bucketed(width, kept, mistake=0):
    """Return a batch of two lengths in a bucket of some width, each row the mean over its sequence so far."""
    lengths = np.array([3, 5])[kept]
    ids = np.arange(1, 11).reshape(2, 5)[kept]
    tokens = np.where(np.arange(5) < lengths[:, None], ids, 0)

    def call(params, tokens, lengths):
        n = jnp.arange(width)
        seen = (n[None] <= n[:, None]) & (n < lengths[:, None, None] + mistake)
        share = jnp.where(seen, 1.0, 0.0) / jnp.maximum(seen.sum(-1, keepdims=True), 1).astype(jnp.float32)
        return share @ params[tokens]

    given = jnp.asarray(np.pad(tokens, ((0, 0), (0, width - 5))), jnp.int32), jnp.asarray(lengths, jnp.int32)
    w = jax.random.normal(jax.random.key(0), (11, 6))
    return Program(call, w, {"a": given}, outputs="out", tokens=0, lengths=1)


@pytest.mark.turn  # 4 s
def test_rows_that_a_program_says_to_be_padding_are_left_out():
    """A batch beside itself in another bucket, and beside one sequence alone; with padding seen nothing is its row."""
    every = [0, 1]
    for other, rows in ((bucketed(8, every), 8), (bucketed(7, [0]), 3), (bucketed(5, [1]), 5)):
        (found,) = precaudit.same(bucketed(5, every), other).cases
        assert (found.answer, found.outputs[0].rows) == ("same", rows)
    assert precaudit.same(bucketed(5, every), bucketed(8, every, mistake=-1)).exit_code == 1


def test_functions_are_compared_on_given_inputs():
    x = jnp.linspace(-3, 3, 24, dtype=jnp.bfloat16).reshape(4, 6)
    soft, stable = (
        jax.nn.softmax,
        lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
    )
    assert precaudit.same(soft, stable, (x,)).exit_code == 0
    (found,) = precaudit.same(soft, lambda x: jax.nn.softmax(1.01 * x), (x,)).cases
    assert found.answer == "other"
    assert "out is up to" in found.says


def test_constants_in_float32_are_told_and_are_no_other_formula():
    """A table of sines made by NumPy in float32, and one made by the program: 3e-8 apart in FP64."""
    angles = np.arange(40, dtype=np.float32).reshape(4, 10)
    table = jnp.asarray(np.sin(angles.astype(np.float64)).astype(np.float32))
    x = jnp.linspace(1, 2, 40, dtype=jnp.bfloat16).reshape(4, 10)
    (found,) = precaudit.same(
        lambda x, _: x * table.astype(x.dtype), lambda x, a: x * jnp.sin(a).astype(x.dtype), (x, angles)
    ).cases
    assert found.answer == "same"
    assert 1e-9 < found.outputs[0].apart < 1e-6
    assert "a difference that a constant in float32 may explain" in found.says


def test_what_cannot_be_compared_is_said():
    x = jnp.ones((2, 3))
    f = Program(lambda p, x: x @ p, jnp.ones((3, 3)), {"a": (x,)}, outputs="out")
    with pytest.raises(UserError, match="no case is of both programs: one has a, the other b"):
        precaudit.same(f, replace(f, cases={"b": (x,)}))
    with pytest.raises(UserError, match="name them"):
        precaudit.same(f, Program(lambda _, x: (x, x), jnp.ones(3), {"a": (x,)}))
    with pytest.raises(UserError, match="two functions and the inputs of both"):
        precaudit.same(f, lambda x: x)
    (found,) = precaudit.same(f, replace(f, outputs="logits")).cases
    assert (found.answer, found.says) == (
        "unknown",
        "cannot be compared: no output is of both: one names out, the other logits",
    )
    wide = Program(lambda p, x: x @ p, jnp.ones((3, 5)), {"a": (x,)}, outputs="out")
    assert (
        precaudit.same(f, wide).cases[0].says
        == "cannot be compared: out has rows of 3 elements in one and of 5 in the other"
    )
    with pytest.raises(UserError, match=r"cannot be traced: TypeError"):
        precaudit.same(lambda x: x + "a", lambda x: x, (x,))
    nan = replace(f, call=lambda p, x: x @ p / 0.0)
    assert precaudit.same(f, nan).cases[0].says == "cannot be compared: out is not finite in FP64"


def test_the_command_names_entry_points_and_says_which_there_are(capsys):
    assert command(["same", f"{EXAMPLES / 'served_decoder.py'}:program", f"{TWO_WAYS}:full"]) == 2
    assert "has entry points prefill, decode, rescore; say which" in capsys.readouterr().err
    served = f"{EXAMPLES / 'served_decoder.py'}:program"
    assert command(["same", f"{served}@prefil", f"{served}@rescore"]) == 2
    assert "no entry point 'prefil'; did you mean 'prefill'?" in capsys.readouterr().err


@pytest.mark.slow
def test_two_entry_points_of_one_program_are_held_against_each_other(capsys):
    served = f"{EXAMPLES / 'served_decoder.py'}:program"
    assert command(["same", f"{served}@rescore", f"{served}@decode", "--case", "a"]) == 0
    said = capsys.readouterr().out
    assert "✓ program@rescore and program@decode are one formula: logits (8 rows) agree in FP64" in said


def test_vectors_are_found_in_any_layout_and_not_where_they_differ_in_the_ninth_digit():
    x = np.random.default_rng(0).standard_normal((3, 5, 7))
    known = Vectors([x])
    assert known.share(x.transpose(2, 0, 1)) == 1
    assert known.share(x[1, 2]) == 1
    assert known.share(np.pad(x, [(0, 0), (0, 0), (0, 4)])) == 1  # a row with empty slots
    assert known.share(np.where(np.arange(9) < 7, np.pad(x, [(0, 0), (0, 0), (0, 2)]), -1e30)) == 1
    assert known.share(x * (1 + 1e-7)) == 0
    assert known.share(-x) == 0
    assert (known.share(np.zeros(4)), Vectors([np.zeros(2)]).share(np.zeros(4))) == (0, 1)


def test_a_record_says_its_exit_code():
    codes = [Sameness(programs=("f", "g"), case="a", answer=a, says="").exit_code for a in ("same", "other", "unknown")]
    assert codes == [0, 1, 3]


def scaled(scale, factor):
    """Return a program of two calls whose first product is scaled; its second call is off by a factor."""

    def call(params, x, i):
        first, second = params
        product = x @ first
        squashed = jnp.tanh(product.astype(jnp.float32) / scale) * jnp.where(i == 1, factor, 1.0)
        squashed = squashed.astype(x.dtype)
        return squashed @ second

    keys = jax.random.split(jax.random.key(3), 3)
    first, second, x = (jax.random.normal(k, (6, 6)).astype(jnp.bfloat16) for k in keys)
    inputs = (x, jnp.int32(0))
    return Program(
        call, (first * scale, second), {"a": inputs}, steps=1, advance=lambda given, _: (given[0], given[1] + 1),
        outputs="out",
    )  # fmt: skip


def test_what_is_written_otherwise_is_passed_over_where_an_earlier_call_shows_that_it_is_right():
    """A product that is twice as large is none of the other's in both calls; what is made of it is, in the first."""
    (found,) = precaudit.same(scaled(1.0, 1.0), scaled(2.0, 1.125)).cases
    assert found.answer == "other"
    assert (found.partings[1].point, found.partings[1].call) == ("squashed", 1)
    assert precaudit.same(scaled(1.0, 1.0), scaled(2.0, 1.0)).exit_code == 0


def test_programs_with_no_weight_and_no_input_in_common_are_not_known_to_be_two_formulas():
    def program(seed):
        w, x = (jax.random.normal(k, (5, 5)) for k in jax.random.split(jax.random.key(seed)))
        return Program(lambda w, x: jnp.tanh(x @ w), w, {"a": (x,)}, outputs="out")

    (found,) = precaudit.same(program(0), program(1)).cases
    assert (found.answer, found.exit_code) == ("unknown", 3)
    assert "no weight and no input of one is among the other's" in found.says


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The example's parameters as the Llama that they are, beside its program, which says where its tokens are."""
    module = sys.modules[load_program(str(EXAMPLES / "own_decoder.py:program")).call.__module__]
    folder = tmp_path_factory.mktemp("model") / "own_decoder"
    folder.mkdir()
    shutil.copy(EXAMPLES / "own_decoder.json", folder.with_suffix(".json"))
    module.write_checkpoint(folder)
    return folder, replace(module.program, tokens=0)


@pytest.mark.turn  # 12 s
def test_a_model_is_a_program_that_reads_the_other_ones_tokens(checkpoint):
    """Its prefill beside the example's decode, whose tokens it chooses; they part by float32 tables alone."""
    folder, program = checkpoint
    (found, other) = precaudit.same(program, folder).cases
    assert (found.answer, other.answer) == ("same", "same")
    assert {x.output: x.rows for x in found.outputs} == {"logits": 8}
    assert found.programs[1] == folder.name


@pytest.mark.turn
def test_a_program_that_is_another_formula_than_its_model_is_told_where(checkpoint):
    folder, program = checkpoint
    late = replace(
        program, call=lambda params, token, position, cache: program.call(params, token, position + 1, cache)
    )
    assert precaudit.same(folder, late).exit_code == 1


def test_a_model_beside_a_program_whose_tokens_are_not_said(checkpoint):
    folder, program = checkpoint
    with pytest.raises(UserError, match=r"which input .* Program\(..., tokens=0\)"):
        precaudit.same(replace(program, tokens=None), folder)


def backward(factor, tree=True):
    """Return a loss with its gradients, whose backward of tanh is off by a factor."""

    @jax.custom_vjp
    def act(x):
        return jnp.tanh(x)

    act.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (factor * g * (1 - jnp.tanh(x) ** 2),))

    def call(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(act(x @ w["a"]) @ w["b"]))(w)
        return (loss, grads) if tree else (loss, grads["a"])

    draw = np.random.default_rng(1).standard_normal
    w = {"a": jnp.asarray(draw((16, 32)), jnp.float32), "b": jnp.asarray(draw((32, 8)), jnp.float32)}
    return Program(call, w, {"a": (jnp.asarray(draw((4, 16)), jnp.float32),)}, outputs=("loss", "grads"))


@pytest.mark.parametrize("tree", [True, False], ids=["a tree", "an array"])
def test_gradients_are_compared(tree):
    (found,) = precaudit.same(backward(1.0, tree), backward(1.02, tree)).cases
    assert found.answer == "other"
    named = "grads.a" if tree else "grads"
    assert found.says == f"are not one formula: without any rounding, {named} is up to 0.02 apart in all 16 rows"
    (found,) = precaudit.same(backward(1.0, tree), backward(1.0, tree)).cases
    every = {x.output for x in found.outputs}
    assert (found.answer, every) == (
        "same",
        {"loss", *((named, "grads.b") if tree else [named])},
    )


def test_what_both_name_is_compared_by_its_key():
    """The other results of a dict, which one of them has alone, are not asked for."""
    given = ({"a": jnp.eye(4) / 3}, {"a": (jnp.arange(8.0).reshape(2, 4),)})
    first = precaudit.Program(lambda p, x: {"logits": x @ p["a"], "loss": x.sum()}, *given, outputs="logits")
    other = precaudit.Program(lambda p, x: {"z": x, "logits": x @ p["a"]}, *given, outputs="logits")
    (found,) = precaudit.same(first, other).cases
    assert (found.answer, [r.output for r in found.outputs]) == ("same", ["logits"])


def test_what_one_tree_lacks_is_said():
    def program(lacking):
        def call(w, x):
            y = x @ w
            return y, {"w": 2 * y} if lacking else {"w": 2 * y, "b": y[:, :1], "n": jnp.arange(3)}

        return Program(call, jnp.eye(4), {"a": (jnp.ones((2, 4)),)}, outputs=("y", "grads"))

    (found,) = precaudit.same(program(False), program(True)).cases
    assert found.answer == "same"
    assert found.says.endswith(". Not compared: grads.b, grads.n")


def test_a_program_of_trees_that_does_not_run_is_a_user_s_mistake():
    def call(w, x):
        raise RuntimeError(f"boom {w.shape} {x.shape}")

    broken = Program(call, jnp.eye(4), {"a": (jnp.ones((2, 4)),)}, outputs="y")
    with pytest.raises(UserError, match="boom"):
        precaudit.same(broken, broken)


def test_a_number_that_differs_is_placed():
    """A loss is one row, and the point that makes it has no axis."""

    def made(eps):
        def call(w, x):
            h = x @ w
            h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
            return jnp.mean(jnp.square(h))

        draw = np.random.default_rng(1).standard_normal
        w, x = (jnp.asarray(draw(shape), jnp.float32) for shape in ((16, 32), (4, 16)))
        return Program(call, w, {"a": (x,)}, outputs="loss")

    (found,) = precaudit.same(made(1e-6), made(1.0)).cases
    assert found.says.startswith("are not one formula: without any rounding, loss is up to ")
    assert found.says.endswith(" apart in its only row")
    assert [p.before.partition(" ")[0] for p in found.partings] == ["h", "h"]


def test_state_that_both_name_and_nothing_compares_is_said():
    def stepped(p, x, cache):
        return x @ p, {"k": x + cache["k"]}

    def program():
        x = jnp.ones((2, 4))
        return Program(
            stepped,
            jnp.eye(4),
            {"a": (x, {"k": x})},
            steps=1,
            advance=lambda i, o: (i[0], o[1]),
            outputs=("y", "cache"),
        )

    (found,) = precaudit.same(program(), program()).cases
    assert found.answer == "same"
    assert found.says.endswith(". Not compared: cache")
