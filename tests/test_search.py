"""What is tried of a program's places that do not close, in which order, and of which layers."""

from types import SimpleNamespace

import pytest

from precaudit.recording.runs.programs import EQUATIONS
from precaudit.references.traced import search
from precaudit.references.traced.judged import Segments, closes
from precaudit.references.traced.remade import INPUTS
from precaudit.schema.records import ErrorRecord, Signed, Unexplained

FAR = Unexplained(
    rel_l2=1.0, u=1e3, excess=1e3, gain=Signed(value=1.0, noise=0.1), mean=Signed(value=1.0, noise=0.1),
    componentwise=(1e3, (0, 0)),
)  # fmt: skip
# What closes each point: a way of rounding, or what the segments hold besides.
CLOSED_BY = {"plain": (), "read": (INPUTS,), "way": ("another",), "noise": "moved", "twice": "again", "tied": "tied"}
OPEN = ["read", "way", "noise", "twice", "tied", "never"]  # of what the first ways make
EVERY = [(SimpleNamespace(name=name), layer) for name in [*CLOSED_BY, "never"] for layer in (0, 1, 2)]


class Tried:
    """Gives what is asked for, and notes it."""

    def __init__(self, small=False):
        self.tapped, self.first, self.asked = SimpleNamespace(small=small), {()}, []

    def give(self, what, left):
        self.asked.append((what, {p: list(layers) for p, layers in left.items()}))
        return dict.fromkeys([(p, layer) for p, layers in left.items() for layer in layers], 0)

    def all_inputs(self, left):
        return {(INPUTS,): self.give("inputs", left)}

    def other_ways(self, left):
        return {("another",): self.give("ways", left)}

    def some_inputs(self, left):
        return {("some",): self.give("some", left)}

    def made_as(self, name, left):
        return self.give(name, left)

    def moved(self, drawn, left, _unrounded):
        assert drawn == "drawn"
        return (self.give("moved", left),)

    def again(self, apart, left):
        assert apart == "apart"
        return (self.give("again", left),)

    def tied(self, ways, left):
        assert ways == "ties"
        return {(): self.give("tied", left)}


def closed(made, name, layer):
    """Return the way that closes a place, None where nothing that is made does."""
    by, place = CLOSED_BY.get(name), (name, layer)
    if isinstance(by, tuple):
        return by if place in made.honest.get(by, {}) else None
    held = {"moved": made.moved, "again": made.again, "tied": tuple(made.tied.values())}
    return () if any(place in rows for rows in held.get(by, ())) else None


def judged(_call, some, made):
    def record(name, layer):
        by = closed(made, name, layer)
        return ErrorRecord(
            prompt="a", phase="call", step=0, layer=layer, point=name, kind="local", candidate="r", reference="fp64",
            dtype="bfloat16", n=8, unexplained=FAR if by is None else None, elided={EQUATIONS: by} if by else None,
        )  # fmt: skip

    return [record(p.name, layer) for p, layer in some]


@pytest.fixture
def begun(monkeypatch):
    """A search whose points close as CLOSED_BY says."""
    monkeypatch.setattr(search, "judged", judged)
    monkeypatch.setattr(Segments, "only", lambda self, _left: self)

    def begin(**how):
        rows = {(p.name, layer): 0 for p, layer in EVERY}
        return search.Search(None, EVERY, Segments(rows, {(): rows}, ()), Tried(**how))

    return begin


def test_what_is_tried_closes_what_it_can_and_is_tried_of_what_is_open(begun):
    made = begun()
    made.ways()
    made.inputs("drawn")
    made.on_gpu("apart", "ties")
    layers = [0, 1, 2]
    left = dict.fromkeys(OPEN, layers)
    tries = {"inputs": "read", "ways": "way", "some": None, "moved": "noise", "again": "twice", "tied": "tied"}
    for what, point in tries.items():
        assert made.more.asked.pop(0) == (what, left)
        left.pop(point, None)
    assert not made.more.asked
    assert made.left() == {"never": layers}
    assert {e.point for e in made.found if not closes(e)} == {"never"}
    assert [(e.point, e.layer) for e in made.found] == [(p.name, layer) for p, layer in EVERY]


def test_one_layer_is_tried_first_and_what_closes_it_of_the_others(begun):
    made = begun()
    made.layers_first()
    asked = dict(made.more.asked)
    first = {point: [0] for point in OPEN}
    assert asked["inputs"] == first
    assert asked["some"] == {p: [0] for p in first if p not in ("read", "way")}
    assert (asked[INPUTS,], asked["another",]) == ({"read": [1, 2]}, {"way": [1, 2]})
    assert list(made.left()) == ["noise", "twice", "tied", "never"]


def test_of_a_small_program_all_layers_are_tried_at_once(begun):
    made = begun(small=True)
    made.layers_first()
    assert not made.more.asked
