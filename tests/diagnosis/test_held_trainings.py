"""What two trainings are to each other, from records and tensors as they lie: what cannot be judged is no success."""

from math import inf, isnan, nan

import numpy as np
import pytest

from precaudit.diagnosis.training.conclusion import TrainingQuestion, conclude, times_grown
from precaudit.diagnosis.training.distances import difference, relative_size, spread_of, times_spread
from precaudit.diagnosis.training.groups import tensor_group
from precaudit.diagnosis.training.records import TrainingGrowth, TrainingTensor
from precaudit.reports.training import training_report
from precaudit.schema.records.base import json_number, value

ASKED = ("s", "programs", "A", "B")


def tensor(name="w", step=1, where="state", size=0.0, spread=1e-7, ratio=0.0, **more):
    numbers = {"size": json_number(size), "spread": json_number(spread), "ratio": json_number(ratio)}
    return TrainingTensor(case="a", step=step, where=where, name=name, group="parameters", **numbers, **more)


def found(*records, squares=None, **more):
    steps = max((r.step for r in records), default=1)
    return conclude(TrainingQuestion(*ASKED, steps, 4), records, squares or {}, more.get("lacking", ()), ())


def report(said, *records):
    return training_report(said, records, "out")


@pytest.mark.parametrize(
    ("records", "word", "code"),
    [
        ([tensor()], "same", 0),
        ([tensor(size=1e-7, ratio=1.0)], "rounding", 0),
        ([tensor(size=1e-7, ratio=4.0)], "rounding", 0),
        ([tensor(size=1e-7, ratio=4.01)], "drift", 1),
        ([tensor(size=inf, ratio=inf)], "drift", 1),
        ([tensor(size=1e-3, ratio=nan)], "unknown", 3),
        ([tensor(size=nan, ratio=nan)], "unknown", 3),
        ([tensor(size=1e-7, spread=inf, ratio=nan)], "unknown", 3),
        ([tensor(size=nan, ratio=nan), tensor(step=2, size=1.0, ratio=9.0)], "drift", 1),
        ([], "unknown", 3),
    ],
)
def test_what_two_trainings_are_is_a_word_and_an_exit_code(records, word, code):
    said = found(*records)
    assert (said.word, report(said, *records).exit_code) == (word, code)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (tensor(size=nan, ratio=nan), "w in step 1: A and B hold nothing but NaN"),
        (tensor(size=1.0, spread=inf, ratio=nan), "w in step 1: some correct makings are finite, others are not"),
        (tensor(size=1.0, ratio=nan), "w in step 1: no correct making is known"),
    ],
)
def test_why_a_tensor_cannot_be_judged_is_told(record, says):
    assert found(record).why == says
    assert report(found(record), record).headline.text == f"? B cannot be compared with A: {says}."


def test_a_formula_that_rounding_hides_is_3_and_one_of_points_alone_is_aside():
    state = tensor(size=1e-7, ratio=1.0, exact=1e-4)
    assert found(state).formula == state
    assert report(found(state), state).exit_code == 3
    point = tensor("turned", where="point", size=1.0, ratio=9.0, exact=1.0)
    said = found(point, tensor(size=1e-7, ratio=1.0, exact=0.0))
    assert (said.word, said.aside, said.formula) == ("rounding", ("turned",), None)
    assert found(point, state).aside == ()
    assert found(tensor(step=2, exact=1e-4)).formula is None  # after the first step rounding has grown into it


def test_members_that_grow_make_rounding_chaos_by_the_parameters():
    records = [tensor(size=1e-7, ratio=1.0), tensor(step=2, size=1e-6, ratio=1.0)]
    grown = {(0, "parameters"): [1.0, 1.0, 1.0], (1, "parameters"): [1.0, 121.0, 1.0]}
    assert found(*records, squares=grown).word == "chaos"
    assert found(*records, squares={**grown, (1, "parameters"): [1.0, 81.0, 1.0]}).word == "rounding"
    loss = {(step, "loss"): [1.0, 1e6**step, 1.0] for step in (0, 1)}
    steady = {(step, "parameters"): [1.0, 1.0, 1.0] for step in (0, 1)}
    assert found(*records, squares=loss).word == "chaos"
    assert found(*records, squares={**loss, **steady}).word == "rounding"


def test_growth_from_or_to_what_is_not_finite_is_no_factor():
    def growth(*sizes):
        return [TrainingGrowth(i, "loss", json_number(a), json_number(b)) for i, (a, b) in enumerate(sizes, 1)]

    assert times_grown(growth((1.0, 2.0), (3.0, 4.0)), "loss", 1) == (3.0, 2.0)
    assert times_grown(growth((inf, 2.0), (inf, 4.0)), "loss", 1) is None
    assert times_grown(growth((1.0, 2.0), (nan, 4.0)), "loss", 1) is None
    assert times_grown(growth((0.0, 2.0), (1.0, 4.0)), "loss", 1) is None
    assert times_grown(growth((9.0, 2.0), (1.0, 2.0), (2.0, 4.0)), "loss", 2) == (2.0, 2.0)


def test_distances_of_values_that_are_not_finite():
    a, b = np.array([1.0, inf, nan, 2.0]), np.array([1.0, inf, nan, 3.0])
    assert difference(b, a).tolist() == [0, 0, 0, 1]
    assert difference(np.array([nan, 1.0]), np.array([1.0, nan])).tolist() == [inf, inf]
    assert relative_size(0.0, 0.0) == 0
    assert relative_size(1.0, 0.0) == inf
    assert isnan(relative_size(nan, 0.0))
    assert spread_of(np.array([1.0, 2.0]), [np.array([1.0, inf])])[1:] == ("inf", "inf")


def test_a_difference_is_measured_by_the_largest_of_any_two_members_and_by_its_gain():
    own = np.array([3.0, 4.0])
    members = [own + np.array([1e-3, 0.0]), own - np.array([1e-3, 0.0])]
    size, spread, gains = (value(x) for x in spread_of(own, members))
    assert (size, spread, gains) == (5.0, pytest.approx(2e-3), pytest.approx(2 * 3e-3 / 25))
    assert times_spread(np.array([0.0, 4e-3]), own, size, spread, gains) == pytest.approx(8 / 3)  # its gain
    assert times_spread(np.array([-4e-3, 3e-3]), own, size, spread, gains) == pytest.approx(2.5)  # its distance
    assert times_spread(own * 0, own, size, inf, inf) == 0
    assert isnan(times_spread(own, own, size, inf, inf))
    floor = times_spread(np.array([0.0, 5 * 2.0**-23]), own, size, 0.0, 0.0)
    assert floor == pytest.approx(1.0)  # float32 tells no less apart


@pytest.mark.parametrize(
    ("where", "name", "shape", "group"),
    [
        ("output", "loss", (), "loss"), ("output", "train_loss", (), "loss"), ("output", "loss", (3,), "other"),
        ("state", "['loss']", (), "other"), ("point", "hidden.grad", (3, 2), "gradient"),
        ("point", "hidden.grad", (3, 3), "other"), ("state", "[0]['mu']['w']", (2, 3), "moments"),
        ("state", "[0]['w']", (2, 3), "parameters"), ("state", "[1]", (), "other"), ("point", "mu", (2, 3), "other"),
    ],
)  # fmt: skip
def test_a_tensor_is_of_a_group_by_its_name_and_shape(where, name, shape, group):
    assert tensor_group(where, name, shape, {(2, 3)}) == group
