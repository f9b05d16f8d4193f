"""Compared runs that several files of reports read; none writes into them."""

import jax
import jax.numpy as jnp
import pytest

from precaudit.recording.programs.program import Program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.programs import compare_program
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.hostile import BAD


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """Return a compared run of tiny, its last two layers and all points, not diagnosed."""
    folder = tmp_path_factory.mktemp("html")
    select = Selection.parse(layers="3:5", points="all", phases="prefill,decode")
    prompts = [Prompt(id="a", prompt="x = 1"), Prompt(id=BAD, prompt=f"y {BAD[:40]}")]
    made = trace(load("tiny", "bf16", None, "cpu"), folder / "run", prompts, select, TraceOptions(2))
    compare(made, options=CompareOptions(accum=(), cache=folder / "refs"))
    return folder / "run"


@pytest.fixture(scope="session")
def program_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "run"

    def call(params, x):
        def layer(x, w):
            return x + jnp.tanh(x) @ w, None

        x, _ = jax.lax.scan(layer, x, params["mlp"])
        return x @ params["mlp"][0]

    weights = {"mlp": jax.random.normal(jax.random.key(0), (3, 8, 8), jnp.bfloat16)}
    program = Program(call, weights, {BAD: (jnp.ones((4, 8), jnp.bfloat16),)}, outputs="y")
    compare_program(trace_program(program, folder), program)
    return folder
