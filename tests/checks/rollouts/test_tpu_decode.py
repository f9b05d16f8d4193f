"""The decode step and the generation loop that a TPU gets: the decoder as it is written, a CPU's detours not in it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from precaudit.checks.rollouts import generation
from precaudit.checks.rollouts.generation import DrawShape, Generator
from precaudit.checks.rollouts.sampling import Sampling
from precaudit.interpreters.jaxpr.narrow import moved_as_bits
from precaudit.interpreters.tpu.target import compile_for, parse_target
from precaudit.recording.tracing import programs
from precaudit.recording.tracing.subject import load
from tests.helpers.tpus import needs_libtpu

BATCH, SLOTS = 2, 64
DETOURS = ("scatter(", "reduce-precision(", "bitcast-convert(", "u16[", "u8[")


def shaped(tree):
    """Return a tree with shapes and formats in the place of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def given(subject):
    """Return what a decode step is given, as shapes."""
    row = jax.ShapeDtypeStruct((BATCH,), np.int32)
    cache = jax.eval_shape(lambda: subject.decoder.init_cache(BATCH, SLOTS))
    return (shaped(subject.parameters), shaped(subject.tables(SLOTS)), row, row, row, cache)


def text_of(function, arguments, donated=()):
    """Return the optimised HLO for one chip: names numbered as they come, sources left out."""
    text = compile_for(parse_target("v5e"), function, arguments, donated).text
    text = re.sub(r",? ?metadata=\{[^}]*\}", "", text[text.index("\n%") :])
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        return f"%{numbers.setdefault(found[0].lstrip('%'), len(numbers))}"

    return re.sub(r"%[\w.-]+|\bparam_[\w.]+", numbered, text)


def cache_writes(text, c):
    """Return how many updates in place of the whole bfloat16 cache a program holds."""
    cache = f"bf16[{c.layers},{BATCH},{SLOTS},{c.kv_heads},{c.head_dim}]"
    return len(re.findall(re.escape(cache) + r"\S* dynamic-update-slice\(", text))


@needs_libtpu
def test_a_tpu_decodes_with_the_program_as_written_and_no_detour_of_a_cpu_s():
    """Through what jits the shipped programs for a TPU, against plain ``decoder.decode``, and against a CPU's form."""
    subject = load("tiny", "bf16", device="cpu")
    step, arguments = subject.decoder.decode, given(subject)
    plain = text_of(step, arguments, (5,))
    for_tpu = programs.jit_program(step, "tpu", donate_argnums=(5,))
    assert text_of(for_tpu, arguments, (5,)) == plain
    assert cache_writes(plain, subject.config) == 2 * BATCH  # k and v, a row of each sequence
    assert not [word for word in DETOURS if word in plain]
    moved = text_of(moved_as_bits(step), arguments, (5,))
    assert moved != plain
    assert "u16[" in moved
    assert cache_writes(moved, subject.config) == 0


@needs_libtpu
@pytest.mark.parametrize("loop", generation.LOOPS)
def test_a_tpu_s_generation_writes_its_bfloat16_cache_in_place(loop):
    subject = load("tiny", "bf16", device="cpu")
    tpu = replace(subject, device=SimpleNamespace(platform="tpu"))
    assert tpu.platform == "tpu"
    made = generation._programs(tpu.decoder, "greedy", (), tpu.platform, None)[loop]
    bits = Generator(subject, DrawShape(BATCH, SLOTS, SLOTS, SLOTS), Sampling(0), ()).arguments()[loop]
    floats = (subject.parameters, *bits[1:])
    text = text_of(made, shaped(floats), (generation.STATE,))
    assert cache_writes(text, subject.config) == 2 * BATCH
    assert not [word for word in DETOURS[1:] if word in text]
