"""Names of emulations: written and read in one place, also where a policy's own name holds a plus."""

import pytest

from precaudit.schema.emulations import Emulation, of_policy_alone


@pytest.mark.parametrize(
    ("emulation", "name"),
    [
        (Emulation("bf16"), "policy:bf16"),
        (Emulation(accumulation="float32/128"), "accum:float32/128"),
        (Emulation("bf16+scores=float16", "float16"), "policy:bf16+scores=float16+accum:float16"),
    ],
)
def test_a_name_says_what_was_emulated(emulation, name):
    assert emulation.name == name
    assert Emulation.of(name) == emulation


def test_what_is_no_emulation_s_is_none():
    assert Emulation.of("fp64") is None
    assert of_policy_alone({"fp64": 0, "accum:float16": 1, "policy:bf16+accum:float16": 2}) is None
    assert of_policy_alone({"policy:bf16+accum:float16": 2, "policy:bf16+mlp=float32": 3}) == (
        "policy:bf16+mlp=float32", 3,
    )  # fmt: skip
