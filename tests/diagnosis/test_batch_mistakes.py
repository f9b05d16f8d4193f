"""Attention of batches and caches that reads what is another row's, or another scale's: named where it begins."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from precaudit.diagnosis.masks import other_mask
from precaudit.diagnosis.scales import other_scale
from precaudit.judging.programs import with_indices
from precaudit.judging.verdicts import Verdict
from precaudit.models.configs import from_config_json
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.recording.runs.programs import ProgramPoint
from precaudit.references.mutations.forms import Inputs, evaluate_form, usual_form
from precaudit.schema.places import calls_text, layers_text
from tests.helpers.paths import CASES

SHAPES = {"batch": (3, 8, 64), "alone": (1, 24, 64), "rows": (24, 64), "heads": (3, 2, 4, 16)}
CONFIG = from_config_json(msgspec.json.decode((CASES / "decoder.json").read_bytes()), "decoder.json")


def reading(*lengths, start=0):
    """Return what attention reads of rows of these lengths, after ``start`` keys of a cache."""
    draw, found = np.random.default_rng(0), []
    for n in lengths:
        q = draw.standard_normal((n, CONFIG.heads, CONFIG.head_dim))
        k, v = (draw.standard_normal((start + n, CONFIG.kv_heads, CONFIG.head_dim)) for _ in range(2))
        found.append(Inputs(Model(CONFIG, lambda _: None), 0, "attn_out", start + np.arange(n), (q, k, v)))
    return found


def seen(each, change=lambda _b, k, v: (k, v)):
    return [
        evaluate_form(usual_form, replace(o, values=(o.values[0], *change(b, *o.values[1:]))), FP64)
        for b, o in enumerate(each)
    ]


def test_rows_with_the_mask_of_another_are_named():
    each = reading(5, 8, 6)
    assert other_mask(each, seen(each)) is None
    found = other_mask(each, seen(each, lambda _b, k, v: (k[:5], v[:5])))
    assert (
        found.says == "rows 1 and 2 of the batch have the mask of another: row 0 has 5 keys; first at row 1, position 5"
    )
    found = other_mask(each, seen(each, lambda b, k, v: (k[:6], v[:6]) if b == 1 else (k, v)))
    assert found.says == "row 1 of the batch has the mask of another: row 2 has 6 keys; first at row 1, position 6"
    assert other_mask(each, seen(each, lambda _b, k, v: (k[:4], v[:4]))) is None, "no row has 4"
    assert other_mask(each[:1], seen(each[:1], lambda _b, k, v: (k[:4], v[:4]))) is None


@pytest.mark.parametrize(
    ("factors", "what"), [((1.25, 1.25), "keys and values"), ((0.5, 1.0), "keys"), ((1.0, 3.0), "values")]
)
def test_a_scale_that_is_another_from_a_slot_on_is_named(factors, what):
    each = reading(6, start=5)

    def scaled(_b, *cached):
        return [np.concatenate([x[:8], f * x[8:]]) for f, x in zip(factors, cached, strict=True)]

    found = other_scale(each, seen(each, scaled), 12)
    assert (
        found.says
        == f"{what} are read times {max(factors) if max(factors) > 1 else 0.5:g} from slot 8 on, page 2 of 4 slots each"
    )
    assert other_scale(each, seen(each, scaled)).says.endswith(" from slot 8 on")
    assert other_scale(each, seen(each)) is None


def test_other_values_in_some_slots_are_no_scale():
    each = reading(6)

    def other(_b, k, v):
        return k, np.concatenate([v[:4], v[4:] + 0.1])

    assert other_scale(each, seen(each, other), 12) is None


def test_rows_of_a_batch_are_told_as_rows():
    points = tuple(ProgramPoint(n, shape, (), "bfloat16", "", "", "mul") for n, shape in SHAPES.items())
    one = SimpleNamespace(record=SimpleNamespace(phase="call", points=points, outputs=()))
    opened = SimpleNamespace(entries=(one,))
    verdicts = [Verdict(status="fail", kind="local", phase="call", point=n, scope="token", index=23) for n in SHAPES]
    verdicts += [Verdict(status="fail", kind="formula", phase="call", point="batch", scope="token", index=23)]
    assert [v.index for v in with_indices(verdicts, opened)] == [(2, 7), 23, 23, (2, 1, 3), 23]


def test_calls_and_layers_in_words():
    assert calls_text([8, 9, 9, 11, 10], 12) == "from call 8 on"
    assert calls_text([3, 1], 12) == "at calls 1, 3"
    assert calls_text([2], 12) == "at call 2"
    assert calls_text(range(12), 12) == calls_text([], 4) == ""
    assert layers_text([0, 1, 2, 3]) == "layers 0 to 3"
    assert layers_text([1, 3, 5]) == "every second layer from 1 to 5"
    assert layers_text([5, 11, 17]) == "every 6th layer from 5 to 17"
    assert layers_text([4]) == "layer 4"
    assert layers_text([0, 2]) == "layers 0, 2"
