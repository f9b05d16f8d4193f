"""What others reported of batches, prefills and layers: a mistake is found where it begins, and its fix passes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precaudit
from precaudit import Program
from tests.helpers.two_ways import edited_program

# a batch that is padded on the left: positions count the tokens that are kept, and `mask` hides the others
BATCH = (
    ("def forward(params, tokens):", "def forward(params, tokens, keep, mask):"),
    ("rows = jnp.arange(len(tokens))", "rows = jnp.arange(len(tokens)); places = jnp.cumsum(keep) - 1"),
    ("rows.astype(jnp.float32)) for y", "places.astype(jnp.float32)) for y"),
    (
        "jnp.where(rows[None] <= rows[:, None], scores, -jnp.inf)",
        "jnp.where((rows[None] <= rows[:, None]) & mask[None], scores, -1e30)",
    ),
    (
        'full = Program(forward, weights(), {"a": (tokens,)}, outputs="logits")',
        "batch = jnp.stack([tokens, tokens[::-1]])\n"
        "keep = jnp.arange(ROWS)[None] >= jnp.array([0, 3])[:, None]\n"
        "full = Program(jax.vmap(forward, (None, 0, 0, 0)), weights(), "
        '{"a": (batch, keep, keep)}, outputs="logits")\n'
        'alone = Program(forward, weights(), {"a": (batch[1, 3:], keep[0, 3:], keep[0, 3:])}, outputs="logits")',
    ),
)
ROW_0 = (
    '(None, 0, 0, 0)), weights(), {"a": (batch, keep, keep)}',
    '(None, 0, 0, None)), weights(), {"a": (batch, keep, keep[0])}',
)
ATTENDED = (") & mask[None]", ")")
# a prefill of four tokens, whose cache decode goes on with
SERVED = (
    ("from precaudit import Program", "from precaudit import Entry, Program"),
    ("return mlp(x + mixed, w), None", "return mlp(x + mixed, w), (key, value)"),
    ("x, _ = lax.scan(layer, params", "x, made = lax.scan(layer, params"),
    (
        '    return jnp.einsum("td,vd->tv", norm(x), params["embed"], preferred_element_type=jnp.float32)\n',
        '    return jnp.einsum("td,vd->tv", norm(x), params["embed"], preferred_element_type=jnp.float32), made\n\n\n'
        "def prefill(params, tokens):\n    logits, made = forward(params, tokens)\n"
        "    return logits, tuple(lax.dynamic_update_slice(x, y, (0, 0, 0, 0)) for x, y in zip(empty, made))\n",
    ),
    ("full = Program(forward, weights()", "full = Program(lambda p, t: forward(p, t)[0], weights()"),
    (
        '    one_token(0), weights(), {"a": (tokens, jnp.int32(0), empty)},\n'
        '    steps=ROWS - 1, advance=advance, outputs=("logits", "cache"),\n)',
        '    prefill, weights(), {"a": (tokens[:4],)}, outputs=("logits", "cache"), entry="prefill",\n'
        "    then={\n"
        '        "decode": Entry(\n'
        "            one_token(0), lambda _, out: (tokens, jnp.int32(4), out[1]), 3, advance,\n"
        '            ("logits", "cache"),\n        ),\n    },\n)',
    ),
)  # fmt: skip
PAST = (
    "tokens[position], position, cache, position + read",
    "tokens[position], position + 1, cache, position + 1 + read",
)
PREFIX = ("rows.astype(jnp.float32)) for y", "rows.astype(jnp.float32) / 2) for y")  # linear scaling by 2
# four layers, of which every third sees all keys, and the others three
LAYERS = 4
WINDOW = (
    (
        "VOCAB, LAYERS, ROWS, SLOTS = 64, 4, 16, 128, 256, 2, 8",
        f"VOCAB, LAYERS, ROWS, SLOTS = 64, 4, 16, 128, 256, {LAYERS}, 8",
    ),
    ("def layer(x, w):\n", "def layer(x, both):\n        w, i = both\n"),
    ('params["embed"][tokens], params["layers"])', 'params["embed"][tokens], (params["layers"], jnp.arange(LAYERS)))'),
    (
        "jnp.where(rows[None] <= rows[:, None], scores",
        "jnp.where((rows[None] <= rows[:, None]) & "
        "(rows[None] > rows[:, None] - jnp.where(i % 3 == 2, ROWS, 3)), scores",
    ),
    ("w, (keys, values) = both", "w, (keys, values), i = both"),
    (
        '(params["layers"], cache))\n    return jnp.einsum("d,',
        '(params["layers"], cache, jnp.arange(LAYERS)))\n    return jnp.einsum("d,',
    ),
    (
        "jnp.where(slots <= last, scores",
        "jnp.where((slots <= last) & (slots > last - jnp.where(i % 3 == 2, ROWS, 3)), scores",
    ),
)
SHIFTED = ("slots > last - jnp.where(i % 3 == 2", "slots > last - jnp.where(i % 3 == 1")
UNROLLED = (
    '    x, _ = lax.scan(layer, params["embed"][tokens], (params["layers"], jnp.arange(LAYERS)))',
    '    x = params["embed"][tokens]\n    for i in range(LAYERS):\n'
    '        x, _ = layer(x, (jax.tree.map(lambda w: w[i], params["layers"]), i))',
)
OTHERWISE = tuple(i for i in range(LAYERS) if (i % 3 == 2) != (i % 3 == 1))
GAIN = ("\n\ndef norm(x):", "\n\nGAIN = (jnp.arange(WIDTH) / WIDTH + 0.5).astype(jnp.bfloat16)\n\n\ndef norm(x):")
NORMED = "+ 1e-5)).astype(x.dtype)"


def compared(one, other, **how):
    (found,) = precaudit.same(one, other, **how).cases
    return found


@pytest.mark.slow
def test_a_mask_of_the_first_row_for_all_rows_is_found_in_the_second(tmp_path):
    right = edited_program(tmp_path / "right.py", BATCH, "full")
    wrong = edited_program(tmp_path / "wrong.py", [*BATCH, ROW_0], "full")
    found = compared(right, wrong)
    assert (found.answer, found.outputs[0].where) == ("other", tuple(range(8, 16)))
    for parting in found.partings:
        assert (parting.point, parting.call, parting.step) == ("probs", 0, (0,))
        assert parting.at.startswith("[1, "), parting
        assert parting.layers == (0, 1)
    assert found.partings[1].source.startswith("wrong.py:")


@pytest.mark.slow
def test_padding_that_a_prefill_attends_to_is_found_beside_the_prompt_alone(tmp_path):
    alone = edited_program(tmp_path / "right.py", BATCH, "alone")
    right = compared(alone, edited_program(tmp_path / "right.py", BATCH, "full"))
    assert (right.answer, right.outputs[0].first, right.outputs[0].rows) == ("same", (0, 11), 5)
    found = compared(alone, edited_program(tmp_path / "wrong.py", [*BATCH, ATTENDED], "full"), rows=11)
    assert found.answer == "other"
    assert [(p.point, p.call, p.step) for p in found.partings] == [("probs", 0, (0,))] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "point"), [(PAST, "query~1"), (PREFIX, "keys")])
def test_a_decode_after_a_prefill_goes_on_where_that_ended(mistake, point, tmp_path):
    """A length that is one too large, and a prefix that was turned by other angles."""
    full = edited_program(tmp_path / "full.py", SERVED, "full")
    edited_program(tmp_path / "right.py", SERVED, "cached")
    right = compared(full, f"{tmp_path / 'right.py'}:cached@decode")
    assert (right.answer, right.outputs[0].first, right.outputs[0].rows) == ("same", (4, 0), 4)
    edited_program(tmp_path / "wrong.py", [*SERVED, mistake], "cached")
    found = compared(full, f"{tmp_path / 'wrong.py'}:cached@decode")
    assert (found.answer, found.outputs[0].first) == ("other", (4, 0))
    parting = found.partings[1]
    assert (parting.point, parting.call, parting.step, parting.layers) == (point, 0, (0,), (0, 1))
    assert parting.source.startswith("wrong.py:")


@pytest.mark.slow
def test_a_pattern_of_windows_that_is_off_by_one_names_every_layer_that_it_changes(tmp_path):
    full = edited_program(tmp_path / "full.py", WINDOW, "full")
    assert compared(full, edited_program(tmp_path / "right.py", WINDOW, "cached")).answer == "same"
    found = compared(full, edited_program(tmp_path / "wrong.py", [*WINDOW, SHIFTED], "cached"))
    assert found.answer == "other"
    for parting, call in zip(found.partings, (0, 3), strict=True):  # row 3 is the first that a window keeps keys from
        assert (parting.point, parting.call, parting.step, parting.layers) == ("probs", call, (1,), OTHERWISE)
    assert found.partings[0].at == "[0, 3, :]"


@pytest.mark.slow
def test_layers_that_are_written_out_are_named_as_those_of_a_scan(tmp_path):
    unrolled = edited_program(tmp_path / "full.py", [*WINDOW, UNROLLED], "full")
    found = compared(unrolled, edited_program(tmp_path / "wrong.py", [*WINDOW, SHIFTED], "cached"))
    assert [(p.point, p.layers) for p in found.partings] == [("probs#1", OTHERWISE), ("probs", OTHERWISE)]


def layered(factors):
    """Return a program of layers in a scan, each of which multiplies by a factor of its own."""

    def call(params, x):
        def layer(x, both):
            w, factor = both
            product = x @ w
            scaled = jnp.tanh(product) * factor
            return x + scaled @ w, None

        return lax.scan(layer, x, (params, jnp.asarray(factors)))[0]

    w, x = (
        jax.random.normal(k, s) for k, s in zip(jax.random.split(jax.random.key(0)), [(5, 6, 6), (4, 6)], strict=True)
    )
    return Program(call, w, {"a": (x,)}, outputs="out")


@pytest.mark.parametrize(
    ("factors", "layers"), [((1, 2, 1, 3, 1), (1, 3)), ((1, 1, 1, 1, 2), (4,)), ((2,) * 5, range(5))]
)
def test_layers_are_named_that_make_another_value_of_the_others_own(factors, layers):
    found = compared(layered([1.0] * 5), layered([float(f) for f in factors]))
    for parting in found.partings:
        assert (parting.point, parting.step, parting.at) == ("scaled", (layers[0],), "[:, 0]")
        assert parting.layers == tuple(layers)


def test_norm_weights_before_or_after_the_cast_are_one_formula_and_it_is_said_which_is_nearer():
    x = jax.random.normal(jax.random.key(0), (16, 64)).astype(jnp.bfloat16)
    weight = (jnp.arange(64) / 64 + 0.5).astype(jnp.bfloat16)

    def scaled(x):
        wide = x.astype(jnp.float32)
        return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)

    def before(x, weight):
        return (scaled(x) * weight.astype(jnp.float32)).astype(x.dtype)

    def after(x, weight):
        return scaled(x).astype(x.dtype) * weight

    found = compared(before, after, inputs=(x, weight))
    assert (found.answer, found.outputs[0].apart) == ("same", 0.0)
    assert found.says.endswith(": before is nearer")  # rounded once, not twice


@pytest.mark.slow
def test_norm_weights_before_or_after_the_cast_are_one_formula_in_a_decoder(tmp_path):
    after = edited_program(tmp_path / "after.py", [GAIN, (NORMED, f"{NORMED} * GAIN")], "full")
    before = edited_program(
        tmp_path / "before.py", [GAIN, (NORMED, "+ 1e-5) * GAIN.astype(jnp.float32)).astype(x.dtype)")], "full"
    )
    found = compared(before, after)
    assert (found.answer, found.outputs[0].apart) == ("same", 0.0)


@pytest.mark.slow
def test_a_cache_in_a_narrow_format_is_one_formula_at_a_price(tmp_path):
    """Keys in 4 bits of significand: the cache is the line that rounds most."""
    held = "for held, y in ((keys, key), (values, value))"
    narrow = held.replace("(keys, key)", "(keys, key.astype(jnp.float8_e4m3fn).astype(key.dtype))")
    full = edited_program(tmp_path / "full.py", (), "full")
    found = compared(full, edited_program(tmp_path / "narrow.py", [(held, narrow)], "cached"))
    assert found.answer == "same"
    off = found.outputs[0].rounding
    assert off[1] > 1.5 * off[0]
    assert found.says.endswith(": full is nearer") or "the first is nearer" in found.says
    assert found.lines[1].startswith("keys of layer")
