"""Points of a program found by values: the map that somebody wrote by hand, and nothing else, whatever is wrong."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from exams.exam_written import names_of, program_of, rows
from exams.written import EXAMPLES
from precaudit.models.checkpoints.names import parse_map
from precaudit.models.checkpoints.opening import json_table
from precaudit.models.configs import from_config_json, model_tensors
from precaudit.recording.programs.loading import load_program
from precaudit.references.alignment.axes import Wanted, fit
from precaudit.references.alignment.points_text import points_lines
from precaudit.references.alignment.program_points import program_points
from precaudit.references.mapped_tensors import mapped_tensors, parameter_leaves
from precaudit.references.names_map import Names, ProgramNames
from precaudit.schema.toml import toml_bytes

# where values say otherwise than the author of a map: they are right before they are altered, or shifted alike
OTHERWISE = (
    "RoPE off by three", "RoPE off by one in decode", "stale KV entry", "stale KV entry in steps 1 to 4",
    "head 3 is zero", "prompts' rows exchanged", "prompts' caches exchanged", "values × 1.02 in batches",
)  # fmt: skip
# where points after a mistake are lost, or the nearest is another
LOST = (
    "own_decoder: mean for mean square", "own_decoder: heads interleaved",
    "nnx_decoder: mean for mean square", "nnx_decoder: epsilon 3e-6", "nnx_decoder: RoPE base 500000",
    "nnx_decoder: weights swapped", "nnx_decoder: a token's MLP is zero",
)  # fmt: skip


def marks(decoder, name):
    lost = [pytest.mark.xfail(strict=True)] if f"{decoder}: {name}" in LOST else []
    return lost if (decoder, name) in MISTAKES else [*lost, pytest.mark.slow]


def entries(program, names: Names):
    """Return what is found of a program, its tensors by a map."""
    raw = json_table(names.config, "")
    config = from_config_json(raw, str(names.config))
    given = parse_map(names.map, toml_bytes(names.map), ProgramNames)
    shapes = model_tensors(config)
    tensors = mapped_tensors(parameter_leaves(program.params), given, shapes, str(names.map))
    with jax.numpy_dtype_promotion("standard"):
        return program_points(replace(program, tokens=None), config, tensors), given.points


def seen(points):
    return {p: getattr(e, "name", e).replace("outputs.", "") for p, e in points.items()}


def by_hand(name, folder=EXAMPLES):
    return Names(folder / f"{name}.toml", folder / f"{name}.json")


def test_all_points_of_a_decoder_are_those_of_its_map():
    program = load_program(f"{EXAMPLES / 'own_decoder.py'}:program")
    (found,), points = entries(replace(program, steps=2), by_hand("own_decoder"))
    assert found.tokens == 0
    assert {p.point: p.series.name for p in found.points} == seen(points)
    assert all(p.equal == len(p.series.members) for p in found.points)
    assert max(p.off for p in found.points) < 1e-9


@pytest.mark.slow
def test_every_entry_point_has_points_of_its_own():
    program = load_program(f"{EXAMPLES / 'served_decoder.py'}:program")
    served = by_hand("own_decoder")
    found, _ = entries(program, Names(served.map, served.config))
    assert [one.entry for one in found] == ["prefill", "decode", "rescore"]
    assert all(p.equal == len(p.series.members) for one in found for p in one.points)
    lines = points_lines(found)
    assert "[entries.decode]" in lines
    assert 'points.attn_out = "attended"' in lines
    assert 'attn_out = { name = "attended", axes = "g k t -> t g k" }' in lines


MISTAKES = [
    ("own_decoder", "scale 1/√(d+1)"), ("own_decoder", "epsilon outside"), ("own_decoder", "KV cache in int8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("decoder", "name"),
    [pytest.param(d, w.name, marks=marks(d, w.name)) for d, w in rows() if w.name not in OTHERWISE],
)
def test_a_mistake_leaves_points_where_they_are(decoder, name, tmp_path):
    """Of each mistake written into an example: every point of its author's map, and none that is not in it."""
    (w,) = (w for d, w in rows() if (d, w.name) == (decoder, name))
    with jax.numpy_dtype_promotion("standard"):
        program = program_of(tmp_path, decoder, w, (*w.honest, *w.edits))
    names, _ = names_of(tmp_path, decoder, w, True)
    found, points = entries(program, names)
    wanted = seen(points)
    got = {p.point: p.series.name for p in found[0].points}
    assert {p: n for p, n in got.items() if p in wanted and p != "logits"} == {
        p: n for p, n in wanted.items() if p != "logits"
    }
    assert not [p for p in found[0].points if p.point not in wanted and not p.equal]


def test_what_follows_a_mistake_is_what_the_textbook_makes_of_the_programs_own_values(tmp_path):
    """Values that wobble in the cache are no textbook's; what is made of them is equal again, through all layers."""
    (w,) = (w for d, w in rows() if (d, w.name) == ("own_decoder", "values wobble"))
    program = program_of(tmp_path, "own_decoder", w, w.edits)
    (found,), _ = entries(program, names_of(tmp_path, "own_decoder", w, True)[0])
    off = {p.point for p in found.points if not p.equal}
    assert off == {"v_cache"}


def test_axes_are_told_as_a_map_has_them():
    """[B, T, H, K] with two groups of two heads, as [g, k, r, t]."""
    y = np.random.default_rng(0).standard_normal((1, 5, 4, 3))
    x = y.reshape(5, 2, 2, 3).transpose(1, 3, 2, 0)
    found = fit(x, y, Wanted("q", [y], 2))
    assert (found.axes, found.off) == ("g k r t -> t g r k", 0)
    assert fit(y[0], y, Wanted("q", [y], 2)).axes == ""
    assert fit(1.01 * x, y, Wanted("q", [y], 2)).off == pytest.approx(0.01)
    merged = fit(y.transpose(2, 3, 0, 1).reshape(12, 5), y, Wanted("q", [y], 2))
    assert (merged.axes, merged.off) == ("grk t -> t grk", 0)


def test_a_cache_is_found_though_it_has_more_slots():
    y = np.random.default_rng(0).standard_normal((1, 5, 2, 3))
    x = np.zeros((2, 8, 3))
    x[:, :5] = y[0].transpose(1, 0, 2)
    assert fit(x, y, Wanted("k_cache", [y], 2)) == (0, "g s k -> s g k")
