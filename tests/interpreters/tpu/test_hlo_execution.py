"""HLO run on a CPU with a TPU's roundings: against NumPy in FP64, and what the format's definition says."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr import shadow
from precaudit.interpreters.tpu import execute
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.opcodes import OPCODES
from precaudit.interpreters.tpu.operations import RULES
from precaudit.interpreters.tpu.products import Window, declared_product, product_in_passes, relation
from precaudit.interpreters.tpu.sorting import in_order
from precaudit.recording.tracing.subject import load
from tests.helpers.selected import few
from tests.helpers.tpus import needs_libtpu, text_for

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(11)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def bf16(x):
    """Round to bfloat16, in FP64."""
    return np.asarray(x).astype(np.float32).astype(BF16).astype(np.float64)


def relative(a, b):
    a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    assert a.shape == b.shape
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def module(entry, before=""):
    """Return a module of an entry computation's lines."""
    return parse_module(f"HloModule m\n{before}\nENTRY %main {{\n{entry}\n}}\n")


def run(entry, *args, before="", **how):
    return execute.function(module(entry, before), **how)(*args)


ADD = """%add.{0} (a: {0}[], b: {0}[]) -> {0}[] {{
  %a = {0}[] parameter(0)
  %b = {0}[] parameter(1)
  ROOT %c = {0}[] add(%a, %b)
}}
"""
SUM_OF_EXPONENTIALS = ADD.format("bf16") + """
%fused (p: f32[64,128]) -> bf16[64] {
  %p = f32[64,128] parameter(0)
  %e = f32[64,128] exponential(%p)
  %c = bf16[64,128] convert(%e)
  %z = bf16[] constant(0)
  ROOT %r = bf16[64] reduce(%c, %z), dimensions={1}, to_apply=%add.bf16
}
"""  # fmt: skip
FUSED = "%x = f32[64,128] parameter(0)\nROOT %f = bf16[64] fusion(%x), kind=kLoop, calls=%fused"


def test_roundings_inside_a_fusion_are_a_choice():
    """Sums are float32's and rounded once, either way; NumPy adds in FP64."""
    x = normal(64, 128)
    exact = np.exp(x.astype(np.float64))
    rounded, wide = bf16(bf16(exact).sum(1)), bf16(exact.sum(1))
    assert (rounded != wide).any()
    for inside, expected in ((True, rounded), (False, wide)):
        found = run(FUSED, x, before=SUM_OF_EXPONENTIALS, rounded_inside=inside)
        assert found.dtype == BF16
        assert (np.asarray(found).astype(np.float64) == expected).all()


def test_narrow_arithmetic_is_rounded_where_it_is_stored():
    """A sum of three in bfloat16: each step is rounded, as is each step of one fusion if that is so."""
    x, y, z = (normal(500, dtype=BF16) for _ in range(3))
    lines = "\n".join(f"%{n} = bf16[500] parameter({i})" for i, n in enumerate("xyz"))
    body = f"{lines}\n%s = bf16[500] add(%x, %y)\nROOT %t = bf16[500] add(%s, %z)"
    wide = [v.astype(np.float64) for v in (x, y, z)]
    twice, once = bf16(bf16(wide[0] + wide[1]) + wide[2]), bf16(wide[0] + wide[1] + wide[2])
    assert (np.asarray(run(body, x, y, z)).astype(np.float64) == twice).all()
    fusion = f"{lines}\nROOT %f = bf16[500] fusion(%x, %y, %z), kind=kLoop, calls=%fused"
    for inside, expected in ((True, twice), (False, once)):
        found = run(fusion, x, y, z, before=f"%fused {{\n{body}\n}}", rounded_inside=inside)
        assert (np.asarray(found).astype(np.float64) == expected).all()


def test_products_of_one_three_and_six_passes():
    x, y = normal(32, 64), normal(64, 24)
    wide = [v.astype(np.float64) for v in (x, y)]
    heads = [bf16(v) for v in wide]
    rests = [bf16(v - h) for v, h in zip(wide, heads, strict=True)]
    expected = {
        1: heads[0] @ heads[1],
        3: heads[0] @ heads[1] + rests[0] @ heads[1] + heads[0] @ rests[1],
        6: wide[0] @ wide[1],
    }
    for count, exact in expected.items():
        found = product_in_passes(
            count, lambda a, b: jnp.dot(a, b, precision="highest"), jnp.asarray(x), jnp.asarray(y)
        )
        assert relative(found, exact) < 3e-7
    assert relative(expected[1], expected[6]) > 1e-3
    assert 1e-6 < relative(expected[3], expected[6]) < 2e-5


def test_the_precision_of_a_product_is_read_from_the_text():
    x, y = normal(8, 64), normal(64, 8)
    exact = x.astype(np.float64) @ y.astype(np.float64)
    entry = """%x = f32[8,64] parameter(0)
      %y = f32[64,8] parameter(1)
      ROOT %d = f32[8,8] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
    errors = [relative(run(entry + how, x, y), exact) for how in (
        "", ", operand_precision={default,high}", ", operand_precision={highest,highest}",
        ", algorithm=dot_bf16_bf16_f32_x3")]  # fmt: skip
    assert errors[0] > 1e-3 > 1e-4 > errors[1] > 1e-6 > errors[2]
    assert errors[3] == errors[1]
    with pytest.raises(execute.Unknown, match=r"line 6: d \(dot\) .* algorithm dot_tf32_tf32_f32"):
        run(entry + ", algorithm=dot_tf32_tf32_f32", x, y)


def convolved(x, y, view):
    """Return a convolution [n…, b, f] · [w…, i, o] → [m…, b, o] by its definition."""
    spatial = len(view.size)
    rest = [x.shape[spatial], y.shape[-1]]
    reach = [
        (x.shape[i] - 1) * view.lhs_dilate[i] + sum(view.pad[i]) - (view.size[i] - 1) * view.rhs_dilate[i]
        for i in range(spatial)
    ]
    out = np.zeros([r // s + 1 for r, s in zip(reach, view.stride, strict=True)] + rest)
    for at in itertools.product(*map(range, out.shape[:spatial])):
        for k in itertools.product(*map(range, view.size)):
            place = [at[i] * view.stride[i] + k[i] * view.rhs_dilate[i] - view.pad[i][0] for i in range(spatial)]
            if any(p % d or not 0 <= p // d < n for p, d, n in zip(place, view.lhs_dilate, x.shape, strict=False)):
                continue
            left = x[tuple(p // d for p, d in zip(place, view.lhs_dilate, strict=True))]
            turned = tuple(w - 1 - j if r else j for j, w, r in zip(k, view.size, view.rhs_reversal, strict=True))
            out[at] += left @ y[turned]
    return out


@pytest.mark.parametrize(
    ("n", "window", "kind"),
    [
        (4, "size=4 stride=3 lhs_dilate=4", "batch"),
        (4, "size=4 pad=3_3 rhs_reversal=1", None),  # all against all
        (1, "size=4 pad=3_3 rhs_reversal=1", "right"),
        (1, "size=4 pad=3_3", "-right"),
        (6, "size=1", "left"),
        (5, "size=5", "contracted"),
        (5, "size=5 rhs_reversal=1", "-contracted"),
        (5, "size=3 pad=1_1", None),
        (5, "size=3 stride=2 pad=1_0 rhs_dilate=2", None),
        (4, "size=2 pad=0_-1 lhs_dilate=2", None),
        (1, "size=1", "batch"),
        (3, "size=3 pad=2_2 lhs_dilate=3 stride=2", None),
        (2, "size=2 pad=1_1 lhs_dilate=2 rhs_reversal=1 stride=2", None),
    ],
)
def test_what_a_convolution_s_dimension_is(n, window, kind):
    """Any of them, beside a dimension of another kind, is what the definition gives."""
    x, y = normal(n, 3, 5, 2), normal(int(window.split()[0][5:]), 1, 2, 4)
    sizes = dict(part.split("=") for part in window.split())
    written = " ".join(f"{key}={value}x{1 if key != 'pad' else '0_0'}" for key, value in sizes.items())
    written = written.replace("rhs_reversal=1x1", "rhs_reversal=1x0")
    entry = f"""%x = f32[{",".join(map(str, x.shape))}] parameter(0)
      %y = f32[{",".join(map(str, y.shape))}] parameter(1)
      ROOT %c = f32[] convolution(%x, %y), window={{{written}}}, dim_labels=01bf_01io->01bo"""
    instruction = module(entry.replace("->01bo", "->01bf")).computations["main"].root
    view = Window(*(tuple(v) for v in _window(sizes)))
    whole = Window(*((a, ((0, 0) if i == 2 else 0 if i == 5 else 1)) for i, (a,) in enumerate(view)))
    exact = convolved(x.astype(np.float64), y.astype(np.float64), whole)
    highest = replace(instruction, attributes={**instruction.attributes, "operand_precision": "{highest,highest}"})
    assert relative(declared_product(highest, jnp.asarray(x), jnp.asarray(y)), exact) < 1e-6
    assert relation(view, 0, n, y.shape[0]) == kind


def _window(sizes):
    low, high = map(int, sizes.get("pad", "0_0").split("_"))
    yield (int(sizes["size"]),)
    yield (int(sizes.get("stride", 1)),)
    yield ((low, high),)
    for key, default in (("lhs_dilate", 1), ("rhs_dilate", 1), ("rhs_reversal", 0)):
        yield (int(sizes.get(key, default)),)


def test_bitcasts_read_bytes_in_the_order_of_layouts():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    entry = "%x = f32[2,3,4]{{0,2,1}} parameter(0)\nROOT %b = {} bitcast(%x)"
    # stored with the first dimension fastest, then the last: [3, 4, 2] in rows
    physical = x.transpose(1, 2, 0)
    assert (run(entry.format("f32[24]{0}"), x) == physical.ravel()).all()
    assert (run(entry.format("f32[4,6]{0,1}"), x) == physical.reshape(6, 4).T).all()
    assert (run(entry.format("s32[12,2]{1,0}"), x) == physical.reshape(12, 2).view(np.int32)).all()
    with pytest.raises(execute.Unknown, match=r"line 5: b \(bitcast\) .* of another width"):
        run(entry.format("bf16[48]{0}"), x)
    with pytest.raises(execute.Unknown, match=r"line 5: b \(bitcast\)"):
        run(entry.format("f32[25]{0}"), x)


def test_a_bitcast_of_fewer_elements_reads_the_corner_of_their_tiles():
    x = normal(4, 128)
    entry = "%x = f32[4,128]{1,0:T(8,128)} parameter(0)\nROOT %b = f32[4,5]{1,0:T(8,128)} bitcast(%x)"
    assert (run(entry, x) == x[:, :5]).all()
    with pytest.raises(execute.Unknown, match=r"line 5: b \(bitcast\)"):
        run(entry.replace("f32[4,5]{1,0:T(8,128)}", "f32[4,5]{1,0:T(4,128)}"), x)


def test_a_bitcast_of_other_sizes_reads_tiles_with_their_padding():
    x = normal(1, 12, 2, 16)  # rows 0 to 7 of a head are a tile, 8 to 11 begin the next
    tiles = "bf16[4,8,16]{2,1,0:T(8,128)(2,1)}"
    heads = "bf16[1,12,2,16]{3,1,2,0:T(8,128)(2,1)}"
    there = run(f"%x = {heads} parameter(0)\nROOT %b = {tiles} bitcast(%x)", x := x.astype(jnp.bfloat16))
    stored = np.zeros((2, 16, 16), x.dtype)
    stored[:, :12] = x[0].transpose(1, 0, 2)
    assert (there == stored.reshape(4, 8, 16)).all()
    assert (run(f"%x = {tiles} parameter(0)\nROOT %b = {heads} bitcast(%x)", there) == x).all()
    with pytest.raises(execute.Unknown, match=r"line 5: b \(bitcast\)"):  # five tiles are not four
        run(f"%x = {heads} parameter(0)\nROOT %b = {tiles.replace('4,8', '5,8')} bitcast(%x)", x)


def test_a_bitcast_reads_tiles_one_after_another():
    x = normal(12, 200)
    stored = np.zeros((16, 256), x.dtype)
    stored[:12, :200] = x
    tiles = [stored[i : i + 8, k : k + 128] for i in (0, 8) for k in (0, 128)]
    entry = "%x = f32[12,200]{1,0:T(8,128)} parameter(0)\nROOT %b = f32[4,8,128]{2,1,0:T(8,128)} bitcast(%x)"
    there = run(entry, x)
    assert (there == np.stack(tiles)).all()
    back = "%x = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)\nROOT %b = f32[12,200]{1,0:T(8,128)} bitcast(%x)"
    assert (run(back, there) == x).all()


def test_broadcasts_turn_dimensions():
    x = normal(2, 3)
    entry = "%x = f32[2,3] parameter(0)\nROOT %b = f32[3,4,2] broadcast(%x), dimensions={2,0}"
    assert (run(entry, x) == np.broadcast_to(x.T[:, None], (3, 4, 2))).all()


@pytest.mark.parametrize(("index", "start"), [(-3, 0), (1, 1), (9, 3)])
def test_slices_that_reach_outside_are_moved_in(index, start):
    x = normal(5, 4)
    entry = """%x = f32[5,4] parameter(0)
      %i = s32[] parameter(1)
      %z = s32[] constant(0)
      %u = f32[2,4] broadcast(%zero), dimensions={}
      %s = f32[2,4] dynamic-slice(%x, %i, %z), dynamic_slice_sizes={2,4}
      %d = f32[5,4] dynamic-update-slice(%x, %u, %i, %z)
      ROOT %t = (f32[2,4], f32[5,4]) tuple(%s, %d)"""
    entry = entry.replace("%u =", "%zero = f32[] constant(0)\n%u =")
    piece, changed = run(entry, x, np.int32(index))
    expected = x.copy()
    expected[start : start + 2] = 0
    assert (piece == x[start : start + 2]).all()
    assert (changed == expected).all()


def test_gathers_clamp_and_scatters_drop():
    x, rows = normal(6, 4), np.array([[2], [-1], [7]], np.int32)
    entry = """%x = f32[6,4] parameter(0)
      %i = s32[3,1] parameter(1)
      %u = f32[3,4] parameter(2)
      %g = f32[3,4] gather(%x, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},
        index_vector_dim=1, slice_sizes={1,4}
      %s = f32[6,4] scatter(%x, %i, %u), update_window_dims={1}, inserted_window_dims={0},
        scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add.f32
      ROOT %t = (f32[3,4], f32[6,4]) tuple(%g, %s)"""
    update = normal(3, 4)
    rows_read, added = run(entry, x, rows, update, before=ADD.format("f32"))
    assert (rows_read == x[[2, 0, 5]]).all()
    expected = x.copy()
    expected[2] += update[0]
    assert (added == expected).all()


@pytest.mark.parametrize(("index", "factor"), [(0, 2), (1, 3), (2, 5), (7, 5), (-1, 5)])
def test_a_branch_that_is_not_there_is_the_last(index, factor):
    branch = """%b{0} {{
      %p = f32[] parameter(0)
      %k = f32[] constant({0})
      ROOT %m = f32[] multiply(%p, %k)
    }}
    """
    entry = """%i = s32[] parameter(0)
      %x = f32[] parameter(1)
      ROOT %c = f32[] conditional(%i, %x, %x, %x), branch_computations={%b2, %b3, %b5}"""
    before = "".join(branch.format(k) for k in (2, 3, 5))
    assert run(entry, np.int32(index), np.float32(1.5), before=before) == 1.5 * factor


@pytest.mark.parametrize("taken", [True, False])
def test_either_branch_has_its_own_argument(taken):
    before = """%yes {
      ROOT %p = f32[2] parameter(0)
    }
    %no {
      %q = f32[] parameter(0)
      ROOT %b = f32[2] broadcast(%q), dimensions={}
    }"""
    entry = """%i = pred[] parameter(0)
      %x = f32[2] parameter(1)
      %y = f32[] parameter(2)
      ROOT %c = f32[2] conditional(%i, %x, %y), true_computation=%yes, false_computation=%no"""
    found = run(entry, np.bool_(taken), np.float32([1, 2]), np.float32(3), before=before)
    assert found.tolist() == ([1, 2] if taken else [3, 3])


def test_a_loop_and_asynchronous_copies():
    before = """%condition {
      %s = (s32[], f32[4]) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      %n = s32[] constant(7)
      ROOT %l = pred[] compare(%i, %n), direction=LT
    }
    %body {
      %s = (s32[], f32[4]) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      %x = f32[4] get-tuple-element(%s), index=1
      %one = s32[] constant(1)
      %j = s32[] add(%i, %one)
      %y = f32[4] add(%x, %x)
      ROOT %t = (s32[], f32[4]) tuple(%j, %y)
    }"""
    entry = """%x = f32[4] parameter(0)
      %start = (f32[4], f32[4], u32[]) copy-start(%x)
      %done = f32[4] copy-done(%start)
      %piece = ((f32[4]), f32[2], s32[]) slice-start(%done), slice={[1:3]}
      %here = f32[2] slice-done(%piece)
      %zero = s32[] constant(0)
      %t = (s32[], f32[4]) tuple(%zero, %done)
      %w = (s32[], f32[4]) while(%t), condition=%condition, body=%body
      %y = f32[4] get-tuple-element(%w), index=1
      ROOT %r = (f32[4], f32[2]) tuple(%y, %here)"""
    x = normal(4)
    whole, piece = run(entry, x, before=before)
    assert (whole == x * 128).all()
    assert (piece == x[1:3]).all()


def test_literals():
    entry = "ROOT %c = {} constant({})"
    found = run(entry.format("f32[2,3]", "{ { 1, -inf, nan }, { 2.5e-3, -nan(0x7f), inf } }"))
    np.testing.assert_array_equal(found, np.float32([[1, -np.inf, np.nan], [2.5e-3, np.nan, np.inf]]))
    assert run(entry.format("pred[2]", "{true, false}")).tolist() == [True, False]
    assert run(entry.format("pred[2]", "{0, 1}")).tolist() == [False, True]
    assert run(entry.format("bf16[]", "0.3008")) == BF16(0.30078125)
    assert run(entry.format("u32[]", "4294967295")) == np.uint32(2**32 - 1)
    assert run(entry.format("s32[0]", "{}")).shape == (0,)
    with pytest.raises(execute.Unknown, match=r"line 4: c \(constant\) .* leaves its values out"):
        run(entry.format("f32[20]", "{...}"))


def test_comparisons_in_the_total_order():
    x = np.float32([-np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf, np.nan])
    entry = """%x = f32[8] parameter(0)
      %y = f32[8] reverse(%x), dimensions={0}
      ROOT %c = pred[8] compare(%x, %y), direction=LT, type=TOTALORDER"""
    assert run(entry, x).tolist() == [True] * 4 + [False] * 4
    assert run(entry.replace(", type=TOTALORDER", ""), x).tolist() == [False, True, True] + [False] * 5


@pytest.mark.parametrize("n", [1, 2, 5, 64, 100])
def test_sorts_keep_the_order_of_what_is_equal(n):
    keys, other = RNG.integers(0, 9, (3, n)).astype(np.int32), normal(3, n)
    found = jax.jit(lambda *x: in_order(x, 1, lambda a0, b0, *_: a0 > b0))(keys, other)
    order = np.argsort(-keys, axis=1, kind="stable")
    for x, y in zip(found, (keys, other), strict=True):
        assert (x == np.take_along_axis(y, order, 1)).all()
    (first,) = jax.jit(lambda x: in_order((x,), 0, lambda a, b: a < b))(keys)
    assert (first == np.sort(keys, 0)).all()


def test_what_was_declared_is_asserted():
    with pytest.raises(execute.Unknown, match=r"line 5: y \(negate\) .*float32\[3\] was made, float32\[4\] declared"):
        run("%x = f32[3] parameter(0)\nROOT %y = f32[4] negate(%x)", normal(3))
    with pytest.raises(execute.Unknown, match=r"line 5: y \(negate\) .*float32\[3\] was made, int32\[3\] declared"):
        run("%x = f32[3] parameter(0)\nROOT %y = s32[3] negate(%x)", normal(3))
    with pytest.raises(execute.Unknown, match=r"line 4: x \(parameter\) .*float32\[2\] was made"):
        run("ROOT %x = f32[3] parameter(0)", normal(2))
    with pytest.raises(execute.Unknown, match="no rule for the format c64"):
        run("ROOT %x = c64[3] parameter(0)", normal(3))
    with pytest.raises(UserError, match="2 arguments; main has 1 parameters"):
        run("ROOT %x = f32[3] parameter(0)", normal(3), normal(3))


def test_what_has_no_rule_is_unknown_before_it_runs():
    with pytest.raises(execute.Unknown, match="line 5: no rule says how to run 'fft'"):
        execute.function(module("%x = f32[3] parameter(0)\nROOT %y = f32[3] fft(%x)"))
    entry = '%x = f32[3] parameter(0)\nROOT %y = f32[3] custom-call(%x), custom_call_target="Twice"'
    with pytest.raises(execute.Unknown, match="line 5: what the custom call 'Twice' computes is not known"):
        execute.function(module(entry))
    x = normal(3)
    assert (run(entry, x, custom={"Twice": lambda call: 2 * call.inputs[0]}) == 2 * x).all()
    with pytest.raises(execute.Unknown, match=r"float32\[6\] was made"):
        run(entry, x, custom={"Twice": lambda call: jnp.tile(call.inputs[0], 2)})


PARTS = """%x = f32[5,2] parameter(0)
%s0 = ((f32[5,2]), f32[2,2], s32[]) slice-start(%x), slice={{{0}, [0:2]}}
%s1 = ((f32[5,2]), f32[3,2], s32[]) slice-start(%x), slice={{{1}, [0:2]}}
%d0 = f32[2,2] slice-done(%s0)
%d1 = f32[3,2] slice-done(%s1)
ROOT %j = f32[5,2] custom-call({2}), custom_call_target="ConcatBitcast"
"""


@pytest.mark.parametrize(("cuts", "order"), [(("[0:2]", "[2:5]"), "%d0, %d1"), (("[3:5]", "[0:3]"), "%d0, %d1")])
def test_parts_that_were_copied_lie_where_they_were_cut_from(cuts, order):
    """The operands of the call that joins them come in any order."""
    x = normal(5, 2)
    np.testing.assert_array_equal(run(PARTS.format(*cuts, order), x), x)


def test_parts_of_no_known_place_are_not_joined():
    text = """%x = f32[2,2] parameter(0)
%y = f32[3,2] parameter(1)
ROOT %j = f32[5,2] custom-call(%x, %y), custom_call_target="ConcatBitcast"
"""
    with pytest.raises(execute.Unknown, match="where x lies"):
        run(text, normal(2, 2), normal(3, 2))


def test_every_rule_is_of_an_opcode():
    assert {*RULES, *execute.FLOW} <= OPCODES


def _fp64(x):
    return np.asarray(x).astype(np.float64)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _mlp(w, x):
    return jnp.sum(jnp.tanh(x @ w[0]) @ w[1])


def _mlp_gradient(w0, w1, x):
    """Each product's operands rounded once, as one pass does."""
    h = np.tanh(bf16(x) @ bf16(w0))
    ones = np.ones((len(x), w1.shape[1]))
    inner = bf16(ones) @ bf16(w1).T * (1 - h**2)
    return bf16(x).T @ bf16(inner), bf16(h).T @ bf16(ones)


def _scanned(x, w):
    return lax.scan(lambda c, m: (jnp.tanh(c @ m), c[0]), x, w)


def _scan(x, w):
    rows = []
    for m in w:
        rows.append(x[0])
        x = np.tanh(bf16(x) @ bf16(m))
    return x, np.stack(rows)


def _until(x):
    return lax.while_loop(lambda s: s[1].max() < 100, lambda s: (s[0] + 1, s[1] * 1.5), (0, x))


def _steps(x):
    n = 0
    while x.max() < 100:
        n, x = n + 1, x * 1.5
    return np.int32(n), x


ROWS = RNG.integers(0, 64, 24).astype(np.int32)
PROGRAMS = {  # what is compiled, its arguments, the same in FP64, the largest relative error
    "default": (jnp.dot, (normal(64, 128), normal(128, 96)), lambda x, y: bf16(x) @ bf16(y), 3e-7),
    "batch of one": (jnp.dot, (normal(1, 128), normal(128, 96)), lambda x, y: x @ y, 3e-7),
    "batch of two": (jnp.dot, (normal(2, 128), normal(128, 96)), lambda x, y: bf16(x) @ bf16(y), 3e-7),
    "highest": (lambda x, y: jnp.dot(x, y, precision="highest"), (normal(64, 128), normal(128, 96)), np.matmul, 3e-7),
    "high": (lambda x, y: jnp.dot(x, y, precision="high"), (normal(64, 128), normal(128, 96)), np.matmul, 1e-5),
    "six": (lambda x, y: jnp.dot(x, y, precision="BF16_BF16_F32_X6"), (normal(8, 64), normal(64, 9)), np.matmul, 3e-7),
    "bf16": (jnp.dot, (normal(64, 128, dtype=BF16), normal(128, 96, dtype=BF16)), lambda x, y: bf16(x @ y), 1e-4),
    "int8": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        (RNG.integers(-99, 99, (64, 128), np.int8), RNG.integers(-99, 99, (128, 96), np.int8)), np.matmul, 0,
    ),
    "scores": (
        lambda q, k: jnp.einsum("btgrk,bsgk->bgrts", q, k), (normal(2, 16, 2, 3, 32), normal(2, 24, 2, 32)),
        lambda q, k: np.einsum("btgrk,bsgk->bgrts", bf16(q), bf16(k)), 3e-7,
    ),
    "attend": (
        lambda p, v: jnp.einsum("bgrts,bsgk->btgrk", p, v), (normal(2, 2, 3, 16, 24), normal(2, 24, 2, 32)),
        lambda p, v: np.einsum("bgrts,bsgk->btgrk", bf16(p), bf16(v)), 3e-7,
    ),
    "project": (
        lambda x, w: jnp.einsum("bthk,hkd->btd", x, w), (normal(2, 16, 4, 32), normal(4, 32, 64)),
        lambda x, w: np.einsum("bthk,hkd->btd", bf16(x), bf16(w)), 3e-7,
    ),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC")),
        (normal(2, 32, 8), normal(4, 8, 16)),
        lambda x, k: sum(np.pad(bf16(x), ((0, 0), (3, 0), (0, 0)))[:, i : i + 32] @ bf16(k)[i] for i in range(4)), 3e-7,
    ),
    "softmax": (jax.nn.softmax, (normal(64, 128),), _softmax, 1e-6),
    "gradient": (
        lambda a, b, x: jax.grad(_mlp)((a, b), x), (normal(64, 128) / 8, normal(128, 32) / 8, normal(16, 64)),
        _mlp_gradient, 5e-4,  # what is rounded may round the other way
    ),
    "scan": (_scanned, (normal(16, 64), normal(5, 64, 64) / 8), _scan, 2e-3),
    "while": (_until, (np.abs(normal(8, 128)),), _steps, 1e-6),
    "slice": (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 128)), (normal(64, 128), np.int32(70)), lambda x, _i: x[60:], 0,
    ),
    "gather": (lambda x, i: x[i], (normal(64, 128), ROWS), lambda x, i: x[i.astype(int)], 0),
    "along": (
        lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (normal(24, 128), ROWS),
        lambda x, i: np.take_along_axis(x, i[:, None].astype(int), 1), 0,
    ),
    "embedding": (
        jax.grad(lambda e, i: jnp.sum(jnp.sin(e[i]))), (normal(64, 128), ROWS),
        lambda e, i: np.bincount(i.astype(int), minlength=64)[:, None] * np.cos(e), 1e-6,
    ),
    "set": (lambda x, u: x.at[ROWS[:9]].max(u), (normal(64, 128), normal(9, 128)), None, 0),
    "sort": (lambda x: jnp.sort(x, descending=True), (normal(8, 100),), lambda x: -np.sort(-x), 0),
    "order": (jnp.argsort, (normal(8, 100),), lambda x: np.argsort(x), 0),
    "top": (lambda x: lax.top_k(x, 5)[1], (normal(8, 100),), lambda x: np.argsort(-x)[:, :5], 0),
    "top of many": (lambda x: lax.top_k(x, 9)[0], (normal(2, 20000),), lambda x: -np.sort(-x)[:, :9], 0),
    "cumulative": (lambda x: jnp.cumsum(x, 1), (normal(8, 128),), lambda x: np.cumsum(x, 1), 2e-6),
    "constant": (lambda x: x + np.arange(99, dtype=np.float32), (normal(99),), lambda x: x + np.arange(99), 1e-7),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (normal(8, 128),), None, 0),
    "narrow": (
        lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (normal(8, 128),),
        lambda x: x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn), 0,
    ),
    "largest": (lambda x: jnp.argmax(x, 1), (normal(8, 128),), lambda x: np.argmax(x, 1), 0),
}  # fmt: skip


def _set(x, u):
    x = x.copy()
    np.maximum.at(x, ROWS[:9], u)
    return x


EXACT = {"set": _set, "bits": lambda x: x.astype(np.float32).view(np.int32)}


@needs_libtpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compiled_for_a_tpu(name):
    program, args, exact, largest = PROGRAMS[name]
    found = jax.tree.leaves(execute.function(parse_module(text_for(program, *args)))(*args))
    expected = jax.tree.leaves((exact or EXACT[name])(*map(_fp64, args)))
    shapes = jax.tree.leaves(jax.eval_shape(program, *args))
    for x, y, shape in zip(found, expected, shapes, strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert relative(x, y) <= largest
        if largest == 3e-7 and name in ("default", "batch of two"):
            assert relative(x, _fp64(args[0]) @ _fp64(args[1])) > 1e-3


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_what_a_tpu_rounds_no_more_than_a_cpu_agrees(topology):
    """A norm, a rotation and a masked softmax: no product, nothing narrow."""

    def program(x, scale, cos, sin):
        y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale
        a, b = jnp.split(y, 2, -1)
        z = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        seen = jnp.arange(z.shape[-1]) <= jnp.arange(z.shape[0])[:, None]
        return jax.nn.softmax(jnp.where(seen, z, -jnp.inf), -1)

    angles = normal(64, 64)
    args = (normal(64, 128), normal(128), np.cos(angles), np.sin(angles))
    found = execute.function(parse_module(text_for(program, *args, topology=topology)))(*args)
    assert relative(found, jax.jit(program)(*args)) < 1e-6


def _shipped(phase, policy, length=48, slots=64):
    """Return the shipped decoder's function of a phase, its arguments and four choices of the tokens among them."""
    subject = load("tiny", policy, device="cpu")
    ids = np.frombuffer(b"The quick brown fox jumps over the lazy dog, then sleeps.", np.uint8)[: length + 1]
    tokens = jnp.asarray(ids.astype(np.int32))[None]
    zero, decoder = jnp.zeros(1, jnp.int32), subject.decoder
    args = (
        subject.parameters,
        subject.tables(slots),
        tokens[:, :length],
        zero,
        jnp.full((1, 1), length - 1, jnp.int32),
    )
    args += (decoder.init_cache(1, slots),)
    if phase == "prefill":
        return decoder.prefill, args, [tokens[:, :length] + i for i in range(4)]
    cache = jax.jit(decoder.prefill)(*args)[1]
    args = (*args[:2], tokens[:, length], zero, jnp.full(1, length, jnp.int32), cache)
    return decoder.decode, args, [tokens[:, length] + i for i in range(4)]


@pytest.mark.turn  # 4 s
@needs_libtpu
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("policy", few(["fp32", "fp32-highest", "bf16"], "fp32", "bf16"))
def test_the_shipped_programs(phase, policy):
    """Errors of four rows of logits: those of one are uncertain by a factor of 2, by the order of sums alone."""
    program, args, tokens = _shipped(phase, policy)
    module = parse_module(text_for(program, *args, donated=(5,)))
    with jax.enable_x64(True):
        exact = _rows(shadow(program), args, tokens)
    on_cpu = relative(_rows(jax.jit(program), args, tokens), exact)
    rows = _rows(_flat(execute.function(module)), args, tokens)
    found = relative(rows, exact)
    if policy == "fp32":
        assert 1000 * on_cpu < found < 1e-2
    elif policy == "fp32-highest":
        assert on_cpu / 2 < found < 2 * on_cpu
    else:
        assert on_cpu / 4 < found < 4 * on_cpu
        wide = _rows(_flat(execute.function(module, rounded_inside=False)), args, tokens)
        assert 1e-4 < relative(wide, rows) < 2 * found


def _flat(run):
    return lambda *args: run(*jax.tree.leaves(args))


def _rows(run, args, tokens):
    return np.stack([np.asarray(run(*args[:2], x, *args[3:])[0]) for x in tokens])
