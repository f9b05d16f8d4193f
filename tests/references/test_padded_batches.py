"""Batches with padding, prefilled and decoded, beside their textbook: honest ones pass, mistakes of padding do not."""

import json

import pytest

from examples import own_decoder as own
from precaudit import compare, diagnose, trace
from precaudit.errors import UserError
from precaudit.judging.gate import gate
from tests.helpers import padded_batches as padded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The parameters as a Llama's."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    config = json.loads((own.Path(own.__file__).with_suffix(".json")).read_text())
    folder.with_suffix(".json").write_text(json.dumps({**config, "num_hidden_layers": padded.LAYERS}))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(own, "params", padded.PARAMS)
        changed.setattr(own, "LAYERS", padded.LAYERS)
        own.write_checkpoint(folder)
    return folder


def judged(tmp_path, checkpoint, program):
    run = trace(program, tmp_path / "run")
    found = compare(run, program, model=str(checkpoint))
    return gate(run.folder), [e for e in found if e.kind == "formula"]


SLOW = pytest.mark.slow
HONEST = {
    "lengths": padded.right,
    "a padding token": lambda: padded.right(by_id=True),
    "rows before a sequence": padded.left,
    "rows before a sequence that positions count": lambda: padded.left(counted=True),
}


@pytest.mark.turn  # 25 s
@pytest.mark.parametrize(
    "name",
    ["lengths", pytest.param("a padding token", marks=SLOW), "rows before a sequence",
     pytest.param("rows before a sequence that positions count", marks=SLOW)],
)  # fmt: skip
def test_an_honest_padded_batch_passes_and_its_padding_is_counted(tmp_path, checkpoint, name):
    found, formula = judged(tmp_path, checkpoint, HONEST[name]())
    assert found.exit_code == 0
    assert {e.phase for e in formula} == {"prefill call", "decode call"}
    assert len({e.point for e in formula}) >= 10
    assert {"keys", "attended"} <= {e.point for e in formula}
    assert max(e.rel_l2 for e in formula) < 1e-9
    pads = padded.BATCH * padded.TOKENS - int(padded.LENGTHS.sum())
    assert any(f"{pads} padding rows are read by no other row" in n for n in found.notes)


WRONG = {
    "right: padding seen in decode": (lambda: padded.right("padding seen in decode"), {"decode call"}),
    "left: padding seen": (lambda: padded.left("padding seen"), {"prefill call"}),
    "left: padding seen in decode": (lambda: padded.left("padding seen in decode"), {"decode call"}),
    "left: one too far": (lambda: padded.left("one too far"), {"decode call"}),
    "counted: padding seen": (lambda: padded.left("padding seen", True), {"prefill call"}),
    "counted: padding seen in decode": (lambda: padded.left("padding seen in decode", True), {"decode call"}),
    "counted: one too far": (lambda: padded.left("one too far", True), {"decode call"}),
    "counted: absolute positions": (
        lambda: padded.left("absolute positions", True),
        {"prefill call", "decode call"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_of_padding_fails_in_the_phase_that_makes_it(tmp_path, checkpoint, name):
    make, phases = WRONG[name]
    found, _ = judged(tmp_path, checkpoint, make())
    assert found.exit_code == 1
    assert {v.phase for v in found.verdicts if v.status == "fail"} == phases


@pytest.mark.slow
def test_padding_that_a_prefill_reads_is_named(tmp_path, checkpoint):
    """Its positions count it, so that the decode alone says that it is padding."""
    program = padded.left("padding seen", counted=True)
    run = trace(program, tmp_path / "run")
    (found,) = diagnose(run, program, model=str(checkpoint)).findings
    assert (found.cause, found.phases, found.point, found.layers) == (
        "padding read", ("prefill call",), "attn_out", tuple(range(padded.LAYERS)),
    )  # fmt: skip


@pytest.mark.slow
def test_positions_are_held_to_the_tokens_that_are_no_padding(tmp_path):
    """Right padding with lengths said: decode goes on after the last token; one further, and nothing leads there."""
    said = {"tokens": 0, "lengths": 1}
    for mistake, code in (("", 0), ("one too far", 3)):
        run = trace(padded.right(mistake, **said), tmp_path / f"run{code}")
        compare(run, padded.right(mistake, **said))
        found = gate(run.folder)
        assert found.exit_code == code, mistake
    assert any("it begins at position 4, and 3 tokens came before" in v.text for v in found.verdicts)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"tokens": 7, "lengths": 1}, "tokens = 7: inputs of prefill are numbered 0 to 3"),
        ({"tokens": 0, "lengths": 9}, "lengths = 9: inputs of prefill are numbered 0 to 3"),
        ({"tokens": 0, "start": 2}, r"start = 2: that input of prefill holds bfloat16 .*, no integers"),
        (
            {"tokens": 0, "lengths": 2},
            r"lengths = 2: that input of prefill is \[2, 3, 12, 4, 16\], and its tokens \[3, 8\]",
        ),
    ],
)
def test_an_input_that_is_none_or_another_is_told_before_anything_runs(said, says):
    with pytest.raises(UserError, match=says):
        padded.right(**said)
