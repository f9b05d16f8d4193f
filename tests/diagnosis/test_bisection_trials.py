"""Trials of a bisection: made once, repeated near the limit, kept, and never a coin."""

import pytest

from precaudit.diagnosis.bisection.limits import parse_criterion
from precaudit.diagnosis.bisection.records import BisectionAsked
from precaudit.diagnosis.bisection.trials import TRIALS, Trials, read_trials
from precaudit.errors import CannotJudge, UserError


def made(tmp_path, measure, test="kl<1e-3", changes=("a", "b"), twice=False):
    asked = BisectionAsked(
        subject="s", by="policy", good="A", bad="B", test=test, against="fp64", changes=changes, how="", code=""
    )
    return Trials(asked, parse_criterion(test), measure, tmp_path / "out", lambda _: None, twice)


def test_a_trial_is_made_once_and_read_by_the_next_bisection(tmp_path):
    folders = []

    def measure(changes, folder):
        folders.append(folder.name)
        return {"kl": 1.0 if changes else 1e-9}

    trials = made(tmp_path, measure)
    trials.open(force=False)
    assert [trials.run(c).answer for c in ((), ("a",), (), ("a", "b"))] == ["good", "bad", "good", "bad"]
    with (tmp_path / "out" / TRIALS).open("ab") as f:
        f.write(b'{"kind":"trial","key":"cut off')
    again = made(tmp_path, measure)
    again.open(force=False)
    assert again.run(("a",)).answer == "bad"
    assert (trials.made, again.made) == (3, 0)
    assert folders[0] == "good"
    assert folders[2] == "bad"
    assert len(read_trials(tmp_path / "out" / TRIALS)) == 4
    again.open(force=True)
    assert again.run(("a",)).answer == "bad"


def test_another_request_is_not_mixed_in(tmp_path):
    made(tmp_path, dict).open(force=False)
    with pytest.raises(UserError, match="another request"):
        made(tmp_path, dict, test="kl<1e-4").open(force=False)
    made(tmp_path, dict, test="kl<1e-4").open(force=True)


def test_a_figure_near_its_limit_is_measured_again(tmp_path):
    trials = made(tmp_path, lambda _c, _f: {"kl": 0.9e-3})
    trials.open(force=False)
    assert trials.run(()).answers == ("good", "good")


def test_a_limit_in_units_of_a_is_that_of_its_own_figure(tmp_path):
    trials = made(tmp_path, lambda changes, _f: {"kl": 3e-4 if changes else 1e-4}, test="kl<2x")
    trials.open(force=False)
    assert trials.run(()).answer == "good"
    trials.base = trials.run(()).figures
    assert trials.run(("a",)).answer == "bad"


def test_what_answers_differently_twice_is_told_and_decides_nothing(tmp_path):
    figures = iter([0.9e-3, 1.1e-3])
    trials = made(tmp_path, lambda _c, _f: {"kl": next(figures)})
    trials.open(force=False)
    with pytest.raises(CannotJudge, match="A with a answered good, then bad"):
        trials.run(("a",))
    with pytest.raises(CannotJudge, match="A with a answered good, then bad"):  # kept, and not thrown again
        trials.run(("a",))


def test_a_trial_that_cannot_be_made_is_unknown_with_its_reason(tmp_path):
    def measure(_changes, _folder):
        raise UserError("keys that do not go together")

    trials = made(tmp_path, measure)
    trials.open(force=False)
    found = trials.run(("a",))
    assert (found.answer, found.why) == ("unknown", "keys that do not go together")
