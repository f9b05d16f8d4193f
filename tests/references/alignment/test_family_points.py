"""Points of every family's decoder found by values alone: all that it shows, and none that it does not."""

from math import prod

import msgspec
import numpy as np
import pytest

from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.checkpoints.names import parse_map
from precaudit.models.configs import model_tensors
from precaudit.recording.programs.own import decode_of, prefill_call
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.tracing.subject import load
from precaudit.references.alignment.align import align_sides
from precaudit.references.alignment.names import names_text
from precaudit.references.alignment.program_points import run_points
from precaudit.references.alignment.sides import side_of
from precaudit.references.alignment.vectors import Vectors
from precaudit.references.comparison.exact import exact_calls
from precaudit.references.comparison.program_pieces import traced_entries
from precaudit.references.mapped_tensors import mapped_tensors, parameter_leaves
from precaudit.references.names_map import ProgramNames
from precaudit.schema.graphs.decoder import POINTS, present
from tests.helpers.fixture_runs import FAMILIES_ONCE, TOKENS
from tests.helpers.paths import FIXTURES

PHASES = {"prefill": (prefill_call, 16), "decode": (decode_of, 8)}
CASES = [(f, p, t) for t in ("own", "automatic") for p in PHASES for f in FAMILIES_ONCE]
QUICK = ("llama-gqa", "prefill", "own")


def exact(opened, program):
    """Return the last call's FP64 values [layers, …] of every point of a run, by name."""
    entries = traced_entries(opened, program)
    ((*_, last),) = exact_calls(entries, program, "a")
    points = (*opened.record.points, *opened.record.outputs)
    return {p.name: np.reshape(last.exact[p.name], (prod(p.stacked), *p.shape)) for p in points}


def shows(x, y):
    """Whether a value is another in every layer, in some order of its axes."""
    return (
        x.shape[0] == y.shape[0]
        and x.size == y.size
        and all(Vectors([b]).share(a) == 1 for a, b in zip(x, y, strict=True))
    )


@pytest.mark.turn  # 3 s
@pytest.mark.parametrize(
    ("family", "phase", "taps"), [pytest.param(*c, marks=() if c == QUICK else pytest.mark.slow) for c in CASES]
)
def test_every_point_that_a_decoder_shows_is_found_and_none_wrongly(family, phase, taps, tmp_path):
    """The decoder's own taps have the points' names: their values say which automatic point is which.

    A value that is two points, as OLMo 2's attn_norm is its resid_in, is found as one of them.
    """
    make, length = PHASES[phase]
    subject = load(str(FIXTURES / family), "bf16", device="cpu")
    program = make(subject, {"a": np.asarray(TOKENS[:length])})
    named = trace_program(program, tmp_path / "own", ProgramSelection(taps="own"))
    right = {n.removeprefix("outputs."): x for n, x in exact(named, program).items()}
    right = {n: right[n] for n in present(subject.config.sparse) if n in right}
    opened = (
        named if taps == "own" else trace_program(program, tmp_path / "automatic", ProgramSelection(taps="automatic"))
    )
    values = exact(opened, program)
    checkpoint = open_checkpoint(str(FIXTURES / family))
    (one,) = run_points(opened, program, checkpoint.config, checkpoint.tensors.read_tensor)
    found = {p.point: p for p in one.points}
    wrong = [n for n, p in found.items() if n not in right or not shows(values[p.series.name], right[n])]
    shown = [n for n, y in right.items() if any(shows(x, y) for x in values.values())]
    lost = [n for n in shown if n not in found and not any(shows(right[n], right[o]) for o in found)]
    counts = f"{len(shown)} both have, {len(found)} found, {len(wrong)} wrong"
    print(f"{family} {phase} {taps}: {counts}; lost {lost}, wrong {wrong}")
    assert (lost, wrong) == ([], [])
    assert set(shown) <= set(POINTS)
    assert all(p.equal == len(p.series.members) for p in found.values())


@pytest.mark.turn  # 4 s
def test_a_product_before_a_norm_is_no_result_of_the_norm_where_an_activation_is_another(tmp_path):
    """What the norm gives is not shown; the next norm is the textbook's of the program's own values, so it is right."""
    subject = load(str(FIXTURES / "gemma3-gqa"), "bf16", device="cpu")
    program = prefill_call(subject, {"a": np.asarray(TOKENS[:16])})
    opened = trace_program(program, tmp_path / "run", ProgramSelection(taps="automatic"))
    checkpoint = open_checkpoint(str(FIXTURES / "gemma3-gqa"))
    other = msgspec.structs.replace(checkpoint.config, activation="silu")
    (one,) = run_points(opened, program, other, checkpoint.tensors.read_tensor)
    values = exact(opened, program)
    named = trace_program(program, tmp_path / "own", ProgramSelection(taps="own"))
    right = {n.removeprefix("outputs."): x for n, x in exact(named, program).items()}
    wrong = [p.point for p in one.points if not shows(values[p.series.name], right[p.point])]
    assert wrong == []
    assert "mlp_act" in {p.point for p in one.points}


@pytest.mark.parametrize("family", FAMILIES_ONCE)
def test_the_map_of_a_decoder_whose_parameters_are_in_a_tuple_gives_its_tensors(family, tmp_path):
    """Its RoPE tables are no tensors of the model."""
    subject = load(str(FIXTURES / family), "bf16", device="cpu")
    program = prefill_call(subject, {"a": np.asarray(TOKENS[:16])})
    model = str(FIXTURES / family)
    found = names_text(align_sides(side_of(program, "program"), side_of(model, model)), ())
    assert not found.unsaid
    path = tmp_path / "names.toml"
    path.write_text(found.text)
    given = parse_map(path, path.read_bytes(), ProgramNames)
    shapes = model_tensors(subject.config)
    read = mapped_tensors(parameter_leaves(program.params), given, shapes, str(path))
    weights = open_checkpoint(model).under(subject.policy).tensors
    for name in shapes:
        np.testing.assert_array_equal(read(name), weights.read_tensor(name))
