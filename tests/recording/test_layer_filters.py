"""A program's run of some layers: the same numbers as those layers have in a run of all, and nothing inherited."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from precaudit import Program, gate
from precaudit.cli import run as command
from precaudit.diagnosis.programs import diagnose_program
from precaudit.errors import UserError
from precaudit.judging.programs import layers_of
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.planning import ProgramSelection
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.comparison.between import compare_runs
from precaudit.references.comparison.programs import compare_program
from tests.helpers.paths import EXAMPLES

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The example's first two calls: all layers, and layers 0 and 2, compared."""
    program = replace(load_program(OWN), steps=1, cases={"a": load_program(OWN).cases["a"]})
    folder = tmp_path_factory.mktemp("layers")
    whole, some = (
        trace_program(program, folder / "whole"),
        trace_program(program, folder / "some", ProgramSelection(layers=(2, 0))),
    )
    return program, (whole, compare_program(whole, program)), (some, compare_program(some, program))


def nested():
    """Return a program of two layers in each of four outer steps."""

    def inner(x, w):
        act = jnp.tanh(x)
        mixed = act @ w
        return x + mixed, None

    def outer(x, ws):
        return jax.lax.scan(inner, x, ws)[0], None

    draw = np.random.default_rng(2)
    weights = jnp.asarray(draw.standard_normal((4, 2, 8, 8)) / 3, jnp.bfloat16)
    x = jnp.asarray(draw.standard_normal((3, 8)), jnp.bfloat16)
    return Program(lambda w, x: jax.lax.scan(outer, x, w)[0], weights, {"a": (x,)})


def keyed(errors):
    return {(e.kind, e.step, e.layer, e.point): e for e in errors}


@pytest.mark.turn  # 25 s
def test_layers_that_are_chosen_have_the_numbers_they_have_in_a_run_of_all(runs):
    _, (whole, every), (some, few) = runs
    assert some.record.layers == (0, 2)
    assert layers_of(some) == layers_of(whole) == 3  # that a budget may name
    for call in range(2):
        a, b = whole.tensors("a", call, "taps"), some.tensors("a", call, "taps")
        for p in whole.record.points:
            cut = a[p.name][[0, 2]] if p.stacked else a[p.name]
            assert cut.tobytes() == b[p.name].tobytes(), p.name
    known, found = keyed(every), keyed(few)
    shared = found.keys() & known.keys()
    assert {layer for _, _, layer, _ in shared} == {0, 2, None}
    stream = {"normed", "second", "final"}  # read the recorded state, where without it they read the sums before it
    same = [k for k in shared if k[0] == "forward" or k[3] not in stream]
    assert len(same) > 100
    assert all(float(found[k].rel_l2) == pytest.approx(float(known[k].rel_l2), rel=1e-6) for k in same)
    assert {point for _, _, _, point in found.keys() - known.keys()} == {"cache.in", "cache.out", "cache.end"}
    assert gate(some.folder).counts == {"pass": len(few)}


@pytest.mark.turn  # 40 s
def test_what_a_layer_is_handed_is_recorded_and_not_judged_as_an_operation(runs):
    """Layer 2 reads what layer 1 left, which no recorded point of layer 1 explains."""
    _, _, (some, few) = runs
    kinds = {(e.kind, e.point) for e in few}
    assert ("forward", "cache.in") in kinds
    assert not {("local", "cache.in"), ("local", "cache.end")} & kinds
    assert ("local", "cache.out") in kinds
    handed = some.tensors("a", 0, "taps")["cache.in"]
    assert handed.shape[0] == 2


@pytest.mark.turn  # 7 s
def test_a_fault_in_a_layer_that_was_chosen_is_flagged_there(tmp_path):
    """There and at its two readers: the next layer's ``act``, and the sum that ends outer step 3 (layers 6 and 7)."""
    opened = trace_program(nested(), tmp_path / "run", ProgramSelection(layers=(1, 3)))
    name = file_name(opened.record, "a", 0, "taps")
    tensors = load_file(opened.folder / name)
    tensors["mixed"][1, 0] = (tensors["mixed"][1, 0].astype(np.float32) * 1.02).astype(tensors["mixed"].dtype)
    save_file(tensors, opened.folder / name)
    hashes = {**opened.record.hashes, name: file_hash(opened.folder / name)}
    write_manifest(opened.folder, msgspec.structs.replace(opened.record, hashes=hashes))
    compare_program(open_program_run(opened.folder), nested())
    failed = {(v.layer, v.point) for v in gate(opened.folder).verdicts if v.status == "fail" and v.kind == "local"}
    assert failed == {(6, "mixed"), (7, "act"), (3, "value.out")}


def test_a_run_of_some_layers_stands_beside_one_of_all(runs):
    _, (whole, _), (some, _) = runs
    beside = compare_runs(some.folder, whole.folder)
    assert {e.layer for e in beside.errors} == {0, 2, None}
    assert {e.rel_l2 for e in beside.errors if e.kind == "pair"} == {0.0}


@pytest.mark.turn  # 10 s
def test_what_needs_every_layer_says_so(runs):
    program, _, (some, _) = runs
    with pytest.raises(UserError, match="holds layers 0, 2 alone; a reference needs all of them"):
        compare_program(some, program, lambda _params, *_: {})
    (one,) = diagnose_program(some, program, objective="margin").effects.shares
    assert one.unknown == "some layers were not recorded; trace without --layers"


def test_layers_inside_nested_loops_go_by_the_outermost(tmp_path):
    program = nested()
    opened = trace_program(program, tmp_path / "run", ProgramSelection(layers=(1, 3)))
    errors = compare_program(opened, program)
    assert {e.layer for e in errors if e.point == "mixed"} == {2, 3, 6, 7}
    states = sorted(p.name.rpartition(".")[2] for p in opened.record.points if "." in p.name)
    assert states == ["end", "in", "out"]  # of the outer loop alone
    assert gate(opened.folder).counts == {"pass": len(errors)}


@pytest.mark.slow  # 7 s
def test_layers_of_a_program_with_taps_of_its_own(tmp_path):
    program = load_program(f"{EXAMPLES / 'tapped_decoder.py'}:program")
    opened = trace_program(program, tmp_path / "run", ProgramSelection(layers=(1,)))
    errors = compare_program(opened, program)
    assert {e.layer for e in errors if e.point in ("stream", "attended")} == {1}
    assert {p.name.partition(".")[2] for p in opened.record.points} == {"", "in", "out", "end"}
    assert not opened.record.automatic
    assert gate(opened.folder).counts == {"pass": len(errors)}


def test_a_program_without_loops_has_no_layers_to_choose(tmp_path):
    program = Program(lambda w, x: x @ w, jnp.eye(4), {"a": (jnp.ones((2, 4)),)})
    with pytest.raises(UserError, match="scans over nothing"):
        trace_program(program, tmp_path / "run", ProgramSelection(layers=(0,)))


@pytest.mark.parametrize(
    ("program", "layers", "says"),
    [
        ("own_decoder", "7", "layer 7 is out of range"),
        ("own_decoder", "x", "is not a number or a slice"),
    ],
)
def test_layers_that_cannot_be_chosen_are_refused(program, layers, says, tmp_path, capsys):
    name = f"{EXAMPLES / program}.py:program"
    assert command(["trace", name, "--layers", layers, "-o", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
