"""Mistakes of converters, each made in three layouts of a checkpoint and named; what is honest beside them is not."""

import numpy as np
import pytest

from precaudit.workflows.alignment import align
from tests.references.alignment import layouts
from tests.references.alignment.layouts import HEAD, LAYOUTS, WIDTH, tensors
from tests.references.alignment.mistakes import (
    DOWN,
    GATE,
    INPUT,
    MISTAKES,
    NORM,
    SECOND,
    UP,
    K,
    Q,
    V,
    all_rounded,
    both,
    exchange,
    heads,
    interleaved,
    naming,
    on,
    on_every,
    padded,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, layout):
    change, kind, words, tensor = MISTAKES[mistake]
    altered = tensors()
    change(altered)
    found = align(LAYOUTS[layout](altered), tensors()).mistakes
    assert naming(found, kind, words, tensor), [m.sentence for m in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_missing_is_named(layout):
    held = LAYOUTS[layout](tensors())
    del held[NORM if layout == "apart" else "norm"]
    assert [(m.kind, m.tensor) for m in align(held, tensors()).mistakes] == [("missing", NORM)]


HONEST = {
    "as it is": both(),
    "rounded once": all_rounded(),
    "both interleaved": both(on_every(Q, heads(HEAD)), on_every(K, heads(HEAD))),
    "heads padded after they were interleaved": both(
        *(on_every(n, lambda x: padded(interleaved(x, HEAD))) for n in (Q, K)), on_every(V, padded)
    ),
    "every MLP doubled": on_every(DOWN, lambda x: x * np.float32(2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("twin", HONEST)
def test_what_is_honest_is_no_mistake(twin, layout):
    held = tensors()
    HONEST[twin](held)
    found = align(LAYOUTS[layout](held), tensors())
    assert not found.mistakes, [m.sentence for m in found.mistakes]
    assert not found.unaligned
    assert all(p.found == 1 for p in found.parts)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_tensors_are_never_wrong(layout, value):
    held = tensors()
    for name in (INPUT, SECOND):
        on_every(name, lambda x, value=value: np.full_like(x, value))(held)
    on(NORM, lambda _: np.full(WIDTH, value, np.float32))(held)
    assert not align(LAYOUTS[layout](held), held).mistakes


def test_what_is_missing_has_its_nearest():
    """Weights with noise of a tenth of their size are the tensor's no more."""
    held = layouts.stacked(tensors())
    noise = np.random.default_rng(3).standard_normal(held["layers"]["up"].shape)
    held["layers"]["up"] = (held["layers"]["up"] + 0.1 * noise).astype(np.float32)
    found = align(held, tensors())
    assert [m.kind for m in found.mistakes] == ["missing"]
    assert "the nearest vector is of layers/up, relative L2 error 0." in found.mistakes[0].says
    assert [(u.parameter, u.nearest.split(".")[-2]) for u in found.unaligned] == [("layers/up", "up_proj")]


def test_of_two_layers_the_name_says_which_is_wrong(monkeypatch):
    monkeypatch.setattr(layouts, "LAYERS", 2)
    held = tensors()
    exchange(GATE, UP)(held)
    [found] = align(layouts.stacked(held), tensors()).mistakes
    assert (found.kind, found.tensor) == ("exchanged", GATE)
    assert found.says == f"it is exchanged with {UP}"
