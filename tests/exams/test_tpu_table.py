"""What ``make tpu`` prints beside runs of models: a training step's gradient, every policy compiled, four chips."""

import numpy as np
import pytest

from exams.tpu import BOUNDS
from exams.tpu_compiled import collectives, policies
from exams.tpu_gradient import batch, error, example, measured
from precaudit.interpreters.tpu.target import parse_target
from precaudit.schema.policies import shipped_policies
from tests.helpers.tpus import needs_libtpu

V5E, V6E = parse_target("v5e"), parse_target("v6e")


@pytest.mark.turn  # 7 s
@needs_libtpu
def test_a_gradient_errs_as_its_products_do():
    found = {e.way: e for e in measured(V5E, draws=2)}
    assert found.keys() == BOUNDS.keys()
    for way, (low, high) in BOUNDS.items():
        assert low <= found[way].tpu / found[way].cpu <= high, found[way]
    assert found["fp32"].cpu < 1e-6
    assert found["bf16"].cpu > 1e-3


def test_an_error_is_pooled_over_tensors_and_batches():
    given = [batch(example(), "float32", seed) for seed in range(2)]
    exact = [{"a": np.array([3.0, 0.0]), "b": np.array(4.0)}, {"a": np.array([0.0, 12.0]), "b": np.array(0.0)}]
    assert error(lambda *_: {"a": np.array([3.0, 12.0]), "b": np.array(0.0)}, given, exact) == pytest.approx(
        np.sqrt((12**2 + 4**2 + 3**2) / 13**2)
    )
    assert error(lambda *_: exact[0], given[:1], exact[:1]) == 0


@pytest.mark.slow  # 29 s
@needs_libtpu
def test_every_shipped_policy_compiles_for_another_generation():
    """``test_lint_rules`` compiles them for v5e.

    Five layers unrolled make five times as many products; fused, a layer has three fewer.
    """
    found = dict(policies("tiny", [V6E]))
    assert [name.split()[0] for name in found] == list(shipped_policies())
    for name, told in found.items():
        policy = name.split()[0]
        passes = "6 passes" if policy == "fp32-highest" else "1 pass"
        prefill, units, vector = {"unrolled": (45, 10, 36), "fused": (6, 2, 5)}.get(policy, (9, 2, 8))
        assert (
            told
            == f"prefill: {prefill} × {passes}, 1 × vector unit; decode: {units} × {passes}, {vector} × vector unit"
        )


@needs_libtpu
def test_a_decoder_on_four_chips_adds_up_twice_a_layer():
    """Heads and the MLP's width are cut, so only what sums over them is added up: Megatron-LM (2019), section 3."""
    found = {(phase, says.split()[-1]): (says, n) for phase, says, n in collectives("tiny", "bf16", V5E)}
    added = {at: n for at, (says, n) in found.items() if says.startswith("all-reduce adds in bf16")}
    assert added == {(phase, point): 1 for phase in ("prefill", "decode") for point in ("attn_proj", "mlp_out")}
