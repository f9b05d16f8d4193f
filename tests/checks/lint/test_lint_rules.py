"""Every rule of lint on programs it must fire at, by source line, and on programs near them that it must not."""

import inspect
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from precaudit.checks.lint.flow import is_cast_up
from precaudit.checks.lint.linting import Lowering, apply_rules, lint_model, lint_program
from precaudit.checks.lint.recorded import Extent, Extents
from precaudit.checks.lint.rules import every
from precaudit.checks.lint.view import CallView
from precaudit.errors import UserError
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.target import compile_for, mesh, parse_target
from precaudit.recording.programs.loading import load_program
from precaudit.schema.policies import load_policy
from tests.helpers.lint_programs import FIRES, SILENT, bf16, f32, i32
from tests.helpers.tpus import needs_libtpu

V5E = parse_target("v5e")
RULES = {r.id: r for r in every()}
BY_HAND = {"collectives", "elided-rounding"}  # tested below: on several chips, and on a text that is edited


def cases(where):
    for rule, programs in where.items():
        marks = [needs_libtpu] if RULES[rule].needs == "tpu" else []
        for small in programs:
            yield pytest.param(rule, small, id=f"{rule}-{small.call.__name__}", marks=marks)


def compiled(call, *given, donated=(), options=None, edit=lambda text: text, phase="call"):
    made = compile_for(V5E, call, given, donated, options)
    size = sum(given[i].size * given[i].dtype.itemsize for i in donated)
    return CallView(phase, "tpu", made.jaxpr, None, V5E, made, parse_module(edit(made.text)), size)


def views(small, needs):
    for i, given in enumerate(small.phases):
        if needs == "tpu":
            yield compiled(small.call, *given, donated=small.donated, options=small.options, phase=f"phase{i}")
        else:
            traced = jax.jit(small.call).trace(*given)
            extents = small.extents and {name: Extent(*x) for name, x in small.extents.items()}
            yield CallView(f"phase{i}", small.platform, traced.jaxpr, extents=extents)


def hits(rule, small):
    """Return what one rule says of a program; float64 is on where the rule is about it."""
    with jax.enable_x64(True) if rule == "left-f64" else nullcontext(), np.errstate(over="ignore"):
        return apply_rules(list(views(small, RULES[rule].needs)), [RULES[rule]]).findings


def marked(call):
    """Return FILE:LINE of the lines marked ``#!``."""
    lines, first = inspect.getsourcelines(call)
    return {f"{inspect.getsourcefile(call)}:{first + i}" for i, line in enumerate(lines) if line.endswith("#!\n")}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("rule", "small"), cases(FIRES))
def test_a_rule_fires_at_the_lines_marked(rule, small):
    said = hits(rule, small)
    assert {f.source for f in said} == (marked(small.call) or {""})
    assert {f.severity for f in said} == {small.severity or RULES[rule].severity}
    assert {f.phase for f in said} <= {"", *(f"phase{i}" for i in range(len(small.phases)))}
    assert all(f.says.endswith(".") for f in said)


@pytest.mark.parametrize(("rule", "small"), cases(SILENT))
def test_a_rule_is_silent_on_what_is_near(rule, small):
    assert hits(rule, small) == ()


def test_every_rule_has_two_programs_of_each_kind():
    for rule in RULES.keys() - BY_HAND:
        assert len(FIRES[rule]) >= 2, rule
        assert len(SILENT[rule]) >= 2, rule


# What no finding is


@needs_libtpu
@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda x: jnp.sum(x, -1), (bf16(256, 512),)),
        (lambda x: lax.reduce(x, jnp.bfloat16(0), lax.add, (1,)), (bf16(256, 512),)),
        (lambda x, y, z: jnp.tanh(x * y + z) * y, (bf16(256, 512),) * 3),
        (lambda x, w: jnp.tanh(x @ w) + x @ w, (bf16(256, 512), bf16(512, 512))),
    ],
    ids=["sum", "reduce", "inside a fusion", "around products"],
)
def test_sums_in_bfloat16_and_excess_precision_inside_a_fusion_are_no_findings(call, given):
    assert apply_rules([compiled(call, *given)]).findings == ()


# Roundings that a compiler leaves out: libtpu 0.0.42.1 was not seen to, so its text is edited as one that does.


def wide(text):
    """Return a text whose products give float32 and round nothing."""
    lines = []
    for line in text.splitlines(keepends=True):
        if " convolution(" in line:
            line = line.replace("= bf16[", "= f32[", 1)
        lines.append(line)
    return "".join(lines)


@needs_libtpu
@pytest.mark.parametrize(
    "call", [lambda x, w: jnp.tanh((x @ w).astype(jnp.float32)), lambda x, w: x + x @ w], ids=["cast up", "added"]
)
def test_an_elided_rounding_is_noted(call):
    given = bf16(256, 512), bf16(512, 512)
    here = f"{__file__}:{call.__code__.co_firstlineno}"
    (said,) = apply_rules([compiled(call, *given, edit=wide)], [RULES["elided-rounding"]]).findings
    assert (said.severity, said.source) == ("note", here)
    assert apply_rules([compiled(call, *given)], [RULES["elided-rounding"]]).findings == ()


@needs_libtpu
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32) * 2,
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16),
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16).astype(jnp.float32) * 2,
    ],
    ids=["meant", "rounded", "rounded and cast up"],
)
def test_no_rounding_is_left_out(call):
    assert apply_rules([compiled(call, bf16(256, 512), bf16(512, 512))], [RULES["elided-rounding"]]).findings == ()


# Collectives


def sharded(dims, *axes, dtype=jnp.bfloat16):
    """Return a shape cut over four chips."""
    over = NamedSharding(mesh(V5E, {"x": 4}), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=over)


def exchanged(call, *given, rule="collectives"):
    return [(f.severity, f.says) for f in apply_rules([compiled(call, *given)], [RULES[rule]]).findings]


def partial_sums(dtype=jnp.bfloat16):
    return sharded((256, 512), None, "x", dtype=dtype), sharded((512, 512), "x", None, dtype=dtype)


@needs_libtpu
def test_collectives_that_add_in_bfloat16_are_warned_of():
    (said,) = exchanged(lambda x, w: x @ w, *partial_sums())
    assert said[0] == "warning"
    assert said[1].startswith("all-reduce adds in bf16")

    def summed(x):
        return jax.shard_map(
            lambda x: lax.psum(x, "x"), mesh=mesh(V5E, {"x": 4}), in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
        )(x)

    (said,) = exchanged(summed, sharded((256, 512), "x"))
    assert said[0] == "warning"


@needs_libtpu
def test_collectives_are_listed_with_their_formats():
    def whole(x):
        return lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh(V5E, {"x": 4}), PartitionSpec()))

    def product(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    def turned(x):
        return jax.shard_map(
            lambda x: lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]),
            mesh=mesh(V5E, {"x": 4}), in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"),
        )(x)  # fmt: skip

    def swapped(x):
        return jax.shard_map(
            lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True),
            mesh=mesh(V5E, {"x": 4}), in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"),
        )(x)  # fmt: skip

    rows = sharded((256, 512), "x")
    assert exchanged(whole, rows) == [("note", "all-gather of bf16.")]
    assert exchanged(turned, rows) == [("note", "collective-permute of bf16.")]
    assert exchanged(swapped, rows) == [("note", "all-to-all of bf16.")]
    assert exchanged(product, *partial_sums()) == [("note", "all-reduce of f32.")]


@needs_libtpu
def test_a_sum_over_chips_that_keeps_a_part_is_named_so_with_its_line():
    """libtpu writes it as a fusion, and the sum inside says no line."""
    rows = NamedSharding(mesh(V5E, {"x": 4}), PartitionSpec("x"))

    def call(x, w):
        return lax.with_sharding_constraint(x @ w, rows)

    def scattered(x):
        return jax.shard_map(
            lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), mesh=mesh(V5E, {"x": 4}),
            in_specs=PartitionSpec("x"), out_specs=PartitionSpec(None, "x"),
        )(x)  # fmt: skip

    (said,) = apply_rules([compiled(call, *partial_sums())], [RULES["collectives"]]).findings
    assert (said.severity, said.says[:25]) == ("warning", "reduce-scatter adds in bf")
    assert said.source == f"{__file__}:{call.__code__.co_firstlineno + 1}"
    (said,) = apply_rules([compiled(scattered, sharded((256, 512), "x"))], [RULES["collectives"]]).findings
    assert (said.severity, said.source) == ("warning", f"{__file__}:{scattered.__code__.co_firstlineno + 2}")


@needs_libtpu
def test_a_sum_over_chips_may_be_read_added_and_stored_in_three_formats():
    """What is read in bfloat16 and added in float32 is no finding, what float32's sum is stored as may be."""

    def wide_sum(x):
        return jax.shard_map(
            lambda x: lax.psum(x.astype(jnp.float32), "x"),
            mesh=mesh(V5E, {"x": 4}), in_specs=PartitionSpec("x"), out_specs=PartitionSpec(),
        )(x)  # fmt: skip

    def rounded_after(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    def read_by_a_product(x, w, u):
        return (x @ w) @ u

    assert exchanged(wide_sum, sharded((256, 512), "x")) == [("note", "all-reduce of bf16, added in f32.")]
    stored = [("note", "all-reduce of f32, stored as bf16.")]
    assert exchanged(rounded_after, *partial_sums()) == stored
    assert exchanged(rounded_after, *partial_sums(), rule="elided-rounding") == []
    assert exchanged(rounded_after, *partial_sums(), rule="hidden-bf16") == []
    three = *partial_sums(jnp.float32), sharded((512, 512), None, "x", dtype=jnp.float32)
    assert exchanged(read_by_a_product, *three) == stored
    assert [severity for severity, _ in exchanged(read_by_a_product, *three, rule="hidden-bf16")] == ["warning"]


@needs_libtpu
def test_a_program_whose_chips_exchange_nothing_has_no_collectives():
    assert exchanged(lambda x, w: jnp.tanh(x @ w), sharded((256, 512), "x"), sharded((512, 512))) == []
    assert exchanged(lambda x, w: x @ w, bf16(256, 512), bf16(512, 512)) == []


@needs_libtpu
def test_a_mesh_has_no_more_chips_than_the_target():
    with pytest.raises(UserError, match="has 4 chips, not 8"):
        mesh(V5E, {"x": 8})


# What is shipped: every finding is true


def said_of(policy, target):
    linted = lint_model("tiny", load_policy(policy), Lowering(target))
    return {(f.severity, f.rule, f.phase, f.point) for f in linted.findings}


SCORES = {("warning", "rounded-scores", "prefill", "scores"), ("note", "there-and-back", "prefill", "scores")}
ROUNDED = {
    "bf16": SCORES | {(severity, rule, "decode", point) for severity, rule, _, point in SCORES},
    "bf16-fp32-scores": set(),
    "fp32": set(),
    "fp32-highest": set(),
    "fp32-cast-decode": SCORES | {("note", "there-and-back", "decode", "q")},
}


@pytest.mark.parametrize("policy", ROUNDED)
def test_shipped_policies_as_they_are_written(policy):
    assert said_of(policy, None) == ROUNDED[policy]


@needs_libtpu
@pytest.mark.parametrize("policy", sorted(ROUNDED.keys() - {"fp32"}))
def test_shipped_policies_as_they_are_compiled(policy):
    """The attention that fp32-cast-decode asks for in float32 rounds its probabilities: in one pass of the product."""
    more = {("error", "one-pass-product", "decode", "attn_out")} if policy == "fp32-cast-decode" else set()
    assert said_of(policy, V5E) == ROUNDED[policy] | more


@pytest.mark.parametrize("target", [None, pytest.param(V5E, marks=needs_libtpu)])
def test_examples(target):
    """In the training step the logits' cotangent is float32, and both products with it are one pass."""
    (gate,) = lint_program(load_program("examples/own_decoder.py:program"), Lowering(target)).findings
    assert (gate.rule, gate.severity, gate.says[:22]) == ("narrow-exp", "warning", "The result of logistic")
    step = lint_program(load_program("examples/training_step.py:program"), Lowering(target)).findings
    assert [(f.rule, f.count) for f in step] == ([("one-pass-product", 2)] if target else [])


def test_largest_magnitudes_of_a_run_are_given_to_the_rules():
    """Float32 and bfloat16 hold them."""
    run = Extents(Path("runs/x"), {"q": Extent(-1e6, 1e6)}, {})
    assert not [f for f in lint_model("tiny", load_policy("bf16"), run=run).findings if f.rule == "overflow"]


def test_lines_are_those_that_call_a_library_not_those_that_called_it_first():
    """JAX traces a function of its own once for all its callers."""

    def call(x):
        first = jax.nn.log_softmax(x)
        second = jax.nn.log_softmax(x)
        return first, second

    first = call.__code__.co_firstlineno
    traced = jax.jit(call).trace(bf16(4, 32))
    lines = {f.source for f in apply_rules([CallView("call", "cpu", traced.jaxpr)], [RULES["narrow-exp"]]).findings}
    assert lines == {f"{__file__}:{first + 1}", f"{__file__}:{first + 2}"}


def test_a_value_is_followed_through_calls_branches_and_loops():
    """What a product reads is cast up in another function, in both branches, and before a loop."""

    def call(x, w, flag):
        w = jax.lax.cond(flag, lambda: w.astype(jnp.float32), lambda: w.T.astype(jnp.float32))
        return lax.fori_loop(0, 3, lambda _i, y: jnp.einsum("ab,bc->ac", x.astype(jnp.float32), w) + y, f32_zeros())

    def f32_zeros():
        return jnp.zeros((64, 256))

    view = CallView("call", "cpu", jax.jit(call).trace(bf16(64, 256), bf16(256, 256), jnp.bool_(True)).jaxpr)
    (product,) = [e for e in view.equations if e.primitive == "dot_general"]
    assert is_cast_up(view.graph, product, 0)
    assert is_cast_up(view.graph, product, 1)
    view = CallView("call", "cpu", jax.jit(lambda x, w: x @ w).trace(f32(8, 8), f32(8, 8)).jaxpr)
    assert not is_cast_up(view.graph, view.equations[-1], 0)


@pytest.mark.parametrize(
    ("made", "severities"),
    [
        (lambda o: (o.adam(1e-3), jnp.float32), set()),
        (lambda o: (o.adam(1e-3, mu_dtype=jnp.bfloat16), jnp.float32), {"warning"}),
        (lambda o: (o.adamw(1e-3), jnp.bfloat16), {"warning", "error"}),
        (lambda o: (o.sgd(1e-3, 0.9, accumulator_dtype=jnp.bfloat16), jnp.float32), {"warning"}),
        (lambda o: (o.sgd(1e-3), jnp.bfloat16), set()),
    ],
    ids=["float32", "first moment", "both moments", "momentum", "no state"],
)
def test_an_optimizer_s_moments_in_bfloat16_are_named_at_the_line_that_updates_them(made, severities):
    """Of Adam on bfloat16 parameters the second moment never falls; what it forgets in a step is rounded away."""
    optimizer, dtype = made(pytest.importorskip("optax"))
    params = {"w": jax.ShapeDtypeStruct((8, 8), dtype), "b": jax.ShapeDtypeStruct((8,), dtype)}
    state = jax.eval_shape(optimizer.init, params)

    def call(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)), state

    with jax.numpy_dtype_promotion("standard"):
        view = CallView("call", "cpu", jax.jit(call).trace(params, state, params).jaxpr)
    said = apply_rules([view], [RULES["narrow-moments"]]).findings
    assert {f.severity for f in said} == severities
    assert {f.source for f in said} <= {f"{__file__}:{call.__code__.co_firstlineno + 1}"}
    assert all(f.count == 2 for f in said)


def test_what_rounding_costs_a_running_average_is_as_is_said():
    """A second moment in bfloat16 with decay 0.999 stays where it is; one with 0.9 is off by less than is said."""

    def after(decay, steps):
        moment = np.asarray(1.0, jnp.bfloat16)
        for _ in range(steps):
            moment = np.float32(np.float32(decay) * np.float32(moment)).astype(jnp.bfloat16)
        return float(moment)

    assert after(0.999, 1000) == 1.0
    draw, wide, narrow = np.random.default_rng(0), 0.0, np.asarray(0.0, jnp.bfloat16)
    for x in draw.standard_normal(500) ** 2:
        wide = 0.9 * wide + 0.1 * x
        narrow = np.float32(0.9 * float(narrow) + 0.1 * x).astype(jnp.bfloat16)
    assert 0 < abs(float(narrow) / wide - 1) < 2**-8 / (1 - 0.9)


@needs_libtpu
def test_a_product_makes_an_angle_in_one_pass_where_the_compiler_says_so():
    """A product that sums over three axes is one pass, one that sums nothing is no product of the matrix unit."""

    def three(positions, inverse):
        return jnp.cos(positions.astype(jnp.float32) @ inverse)

    def outer(positions, inverse):
        return jnp.cos(jnp.einsum("bt,f->btf", positions.astype(jnp.float32), inverse))

    def said(call, *given):
        return [
            (f.severity, f.source) for f in apply_rules([compiled(call, *given)], [RULES["narrow-angles"]]).findings
        ]

    here = f"{__file__}:{three.__code__.co_firstlineno + 1}"
    assert said(three, i32(2, 512, 3), f32(3, 64)) == [("error", here)]
    assert said(outer, i32(2, 512), f32(64)) == []


def test_an_angle_of_three_hundred_is_off_by_a_radian_in_bfloat16():
    angles = np.linspace(256, 300, 1000)
    assert 0.9 < np.abs(angles.astype(jnp.bfloat16).astype(np.float64) - angles).max() <= 1
