"""Programs that move narrow floats as bits give what they gave, and XLA:CPU converts no whole array for them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from precaudit.interpreters.jaxpr import reap
from precaudit.interpreters.jaxpr.narrow import NarrowBits, hold_narrow, moved_as_bits
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.recording.tracing import programs
from precaudit.recording.tracing.programs import Capture
from precaudit.recording.tracing.subject import load
from tests.helpers.paths import FIXTURES
from tests.helpers.random_programs import EXACT, OPERATIONS, PAIRS, QUICK, X, program, trees
from tests.helpers.selected import few


@pytest.mark.turn  # 5 s
@pytest.mark.parametrize("dtype", few(["bfloat16", "float16", "float8_e4m3fn"], "bfloat16", "float16"))
@settings(max_examples=15, **QUICK)
@given(tree=trees(OPERATIONS, PAIRS, taps=True))
def test_random_programs_give_the_same_bits(dtype, tree):
    f = program(tree, EXACT)
    x = jnp.asarray(X, dtype)
    want, taps = jax.jit(reap(f))(x)
    got, moved = jax.jit(moved_as_bits(reap(f)))(hold_narrow(x))
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    assert {k: np.asarray(v).tobytes() for k, v in moved.items()} == {
        k: np.asarray(v).tobytes() for k, v in taps.items()
    }


def test_held_arrays_are_the_same_memory():
    x = jax.device_put(jnp.ones((64, 64), jnp.bfloat16))
    tree = hold_narrow({"w": x, "b": jnp.ones(3, jnp.float32), "n": None})
    assert isinstance(tree["w"], NarrowBits)
    assert tree["w"].bits.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert np.asarray(tree["w"]).dtype == jnp.bfloat16
    assert tree["b"].dtype == np.float32
    assert hold_narrow(tree)["w"] is tree["w"]
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:1]), ("d",))
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert isinstance(hold_narrow(placed), NarrowBits)  # a mesh of one device
    host = np.asarray(x)
    on_host = hold_narrow((host, np.ones(3)))
    assert np.shares_memory(on_host[0].bits, host)
    assert np.array_equal(np.asarray(on_host[0]), host)
    assert on_host[1].dtype == np.float64


def test_a_vmapped_loop_and_a_rematerialised_one():
    def halve(x):
        return lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 1, lambda v: v * 0.5, x)

    def f(x):
        return lax.scan(jax.checkpoint(lambda c, r: (c + r, c)), jax.vmap(halve)(x)[0], x)

    x = jnp.asarray([[1.0, -8.0, 3.0], [0.5, 0.0, 24.0]], jnp.bfloat16)
    for a, b in zip(jax.jit(f)(x), jax.jit(moved_as_bits(f))(hold_narrow(x)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("fill", [None, 7.0])
def test_rows_that_are_not_there_are_filled_as_with_floats(fill):
    def f(x):
        return x.at[jnp.asarray([0, 5])].get(mode="fill", fill_value=fill)

    x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]], jnp.bfloat16)
    got, want = jax.jit(moved_as_bits(f))(hold_narrow(x)), jax.jit(f)(x)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32))


def test_a_cpu_s_programs_run_on_bits_and_no_other_s():
    subject = load("tiny", "bf16", device="cpu")
    made = [programs.decode_program(subject, None), programs.prefill_program(subject, None)]
    assert all(isinstance(p, programs.OnBits) for p in made)
    tpu = replace(subject, device=SimpleNamespace(platform="tpu"))
    assert tpu.platform == "tpu"
    assert not isinstance(programs.decode_program(tpu, None), programs.OnBits)


CASES = (
    ("llama-gqa", "bf16", {}), ("qwen3-moe-gqa", "bf16", {"excess_precision": "off"}), ("gemma2-gqa", "bf16", {}),
    ("llama-gqa", "bf16", {"kv_cache": "float8_e4m3fn"}), ("llama-gqa", "fp32-cast-decode", {}),
    ("phi3-mha", "fp32-highest", {"kv_cache": "float16"}),
)  # fmt: skip


@pytest.mark.turn  # 13 s
@pytest.mark.parametrize("case", few(CASES, *CASES[2:4]), ids=str)  # 8 s each
def test_the_decoder_gives_the_same_bits(case):
    model, policy, changed = case
    """Prefill and two steps of two sequences, every layer's taps; no array of the cache's shape in float32."""
    subject = load(str(FIXTURES / model), policy, changed, "cpu")
    options = tuple(compiler_options(subject.policy).items())
    taps = Capture(frozenset({"q", "k_cache", "attn_out", "resid_out", "mlp_out"}), (0, 1))
    tokens = np.asarray([[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 0, 0, 0, 0]], np.int32)
    starts, ends = np.zeros(2, np.int32), np.asarray([6, 4], np.int32)

    def run(on_bits):
        given = (options, "cpu" if on_bits else "")
        prefill, decode = (programs._compile(subject.decoder, taps, p, *given) for p in ("prefill", "decode"))
        cache = subject.decoder.init_cache(2, 8)
        tables = subject.tables(8)
        found = []
        logits, cache, seen = prefill(subject.parameters, tables, tokens, starts, ends[:, None] - 1, cache, None)
        found += map(np.asarray, [logits, *seen.values()])
        for step in range(2):
            token = np.asarray([11, 12], np.int32)
            given = (subject.parameters, tables, token, starts, ends + step, cache, None)
            text = decode.lower(*given).compile().as_text() if on_bits and step == 1 else ""
            logits, cache, seen = decode(*given)
            found += [np.array(x) for x in (logits, *seen.values(), *cache.values())]
        return found, text

    (plain, _), (bits, text) = run(False), run(True)
    assert [x.dtype for x in plain] == [x.dtype for x in bits]
    assert [x.tobytes() for x in plain] == [x.tobytes() for x in bits]
    if subject.decoder.arithmetic.kv_cache.itemsize < 4:
        c = subject.config
        assert f"f32[{c.layers},2,8,{c.kv_heads},{c.head_dim}]" not in text
