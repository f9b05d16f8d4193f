"""Names of points: variables of the user's lines, modules of libraries, and no plumbing between them."""

import importlib.util
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precaudit import Program
from precaudit.recording.programs.planning import points

X = jnp.ones((1, 3, 8))
PLUMBING = """
import functools

def batched(fun):
    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        return fun(*args, **kwargs)
    return wrapped

def times(w, x):
    hidden = x @ w
    return hidden
"""


def named(call, params, *inputs):
    """Return {name: place} of a program's points."""
    with jax.numpy_dtype_promotion("standard"):
        return {p.name: p.source for p in points(Program(call, params, {"a": inputs}))}


def test_a_line_that_hands_a_call_on_is_no_place(tmp_path):
    """A decorator of another file calls the dot itself: the place is the line that calls it."""
    path = tmp_path / "plumbing.py"
    path.write_text(PLUMBING)
    spec = importlib.util.spec_from_file_location("plumbing", path)
    plumbing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plumbing)
    dot = plumbing.batched(jnp.dot)

    def call(w, x):
        z = dot(x, w)
        return plumbing.batched(plumbing.times)(w, z)

    line = call.__code__.co_firstlineno + 1
    found = named(call, jnp.ones((8, 8)), X)
    assert list(found.values()) == [f"test_point_labels.py:{line}", "plumbing.py:11"]
    assert list(found)[1] == "hidden"


def test_what_a_comprehension_makes_has_its_functions_name():
    def every_head(w, x):
        return [x @ w * n for n in (1.0, 2.0)], {str(n): jnp.tanh(x) @ w for n in (1, 2)}

    assert {re.split("[~#]", name)[0] for name in named(every_head, jnp.ones((8, 8)), X)} == {"every_head"}


@pytest.mark.turn  # 3 s
def test_modules_of_nnx_are_in_names():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
            self.down, self.attention = nnx.Linear(16, 8, rngs=rngs), nnx.MultiHeadAttention(2, 8, rngs=rngs)

        def __call__(self, x):
            mixed = self.attention(x, decode=False)
            return mixed + self.down(nnx.gelu(self.up(self.norm(x))))

    graph, state = nnx.split(Block(nnx.Rngs(0)))
    found = named(lambda state, x: nnx.merge(graph, state)(x), state, X)
    names = ["mixed", "mixed.query", "mixed.key", "mixed.value", "mixed.out", "norm", "up", "down"]
    assert set(names) <= set(found)
    first = inspect.getsourcelines(Block.__call__)[1]
    assert {found["up"], found["down"]} == {f"test_point_labels.py:{first + 2}"}


@pytest.mark.turn  # 4 s
def test_modules_of_linen_are_in_names():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8)(nn.Dense(16, name="up")(nn.RMSNorm()(x)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block(name="block")(nn.MultiHeadDotProductAttention(2, name="attention")(x))

    weights = Net().init(jax.random.key(0), X)
    found = named(Net().apply, weights, X)
    assert {"attention.query", "attention.key", "attention.value", "RMSNorm", "up", "Dense", "block"} <= set(found)


def test_layers_of_keras_are_in_names(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")

    class Block(keras.layers.Layer):
        def __init__(self, **how):
            super().__init__(**how)
            self._up_dense, self._attention = keras.layers.Dense(8), keras.layers.MultiHeadAttention(2, 4)

        def call(self, x):
            mixed = self._attention(x, x)
            scores = keras.ops.einsum("bij,bkj->bik", mixed, x)
            return keras.ops.matmul(scores, self._up_dense(x))

    given = keras.Input((3, 8))
    model = keras.Model(given, keras.layers.Dense(4, name="head")(Block(name="block")(given)))
    rest = [v.value for v in model.non_trainable_variables]
    weights = [v.value for v in model.trainable_variables]
    found = named(lambda w, x: model.stateless_call(w, rest, x)[0], weights, X)
    assert {"mixed.query_dense", "mixed.output_dense", "scores", "up_dense", "block", "head"} <= set(found)
    assert {place.partition(":")[0] for place in found.values()} == {"test_point_labels.py"}


def test_named_axes_of_penzai_are_no_places():
    pz = pytest.importorskip("penzai.pz")
    from penzai.models.transformer.variants import llamalike_common as llama

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=1, query_head_multiplier=2, embedding_dim=8, projection_dim=4, mlp_hidden_dim=16,
        num_decoder_blocks=1, vocab_size=32, mlp_variant="geglu_approx", tie_embedder_and_logits=True,
        rope_wavelength=1e4,
    )  # fmt: skip
    model = llama.build_llamalike_transformer(config, init_base_rng=jax.random.key(0), name="t")
    unbound, variables = pz.unbind_params(model)

    def call(held, tokens):
        wrapped = pz.nx.wrap(tokens).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(3)).tag("seq")
        logits = pz.bind_variables(unbound, held)(wrapped, token_positions=positions)
        return logits.unwrap("batch", "seq", "vocabulary")

    found = named(call, [v.freeze() for v in variables], jnp.asarray(np.zeros((1, 3), np.int32)))
    assert "named_axes.py" not in {place.partition(":")[0] for place in found.values()}
    assert {"input_to_query", "input_to_key", "attn_value_to_output"} <= {n.rpartition(".")[2] for n in found}


def test_what_a_library_makes_in_a_function_that_it_compiles_is_of_the_line_that_calls_it():
    def call(held, x):
        cache = lax.dynamic_update_index_in_dim(held + 0.0, x, 0, 0)
        return cache * 2

    line = call.__code__.co_firstlineno + 1
    found = named(call, jnp.ones((8, 8)), jnp.ones(8))
    assert found["cache"] == f"test_point_labels.py:{line}"
