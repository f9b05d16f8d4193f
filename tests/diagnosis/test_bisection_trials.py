"""Trials of a bisection: made once, repeated near the limit, kept, and never a coin."""

import time

import pytest

from precaudit.diagnosis.bisection.ddmin import smallest_sets
from precaudit.diagnosis.bisection.first import first_bad
from precaudit.diagnosis.bisection.limits import parse_criterion
from precaudit.diagnosis.bisection.records import BisectionAsked
from precaudit.diagnosis.bisection.tasks import Tasks
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
    for other in ("flips=0", "logits<1e-3", "bits", "verdict"):
        with pytest.raises(UserError, match="another request"):
            made(tmp_path, dict, test=other).open(force=False)
    with pytest.raises(UserError, match="another request"):
        made(tmp_path, dict, changes=("a", "c"), test="kl<1e-4").open(force=False)
    made(tmp_path, dict, test="flips=0").open(force=True)


def test_another_limit_of_the_same_figure_reads_the_trials_that_were_made(tmp_path):
    figures = {(): 1e-9, ("a",): 9e-5, ("b",): 3e-4, ("a", "b"): 2e-3}
    asked = []

    def measure(changes, _folder):
        asked.append(changes)
        return {"kl": figures[changes]}

    first = made(tmp_path, measure)
    first.open(force=False)
    assert [first.run(c).answer for c in figures] == ["good", "good", "good", "bad"]
    names = {c: first.run_folder(c) for c in figures}
    asked.clear()
    second = made(tmp_path, measure, test="kl<1e-4")
    second.open(force=False)
    assert [second.run(c).answer for c in figures] == ["good", "good", "bad", "bad"]
    assert asked == [("a",), ("a",)]  # near the new limit, so that it is measured twice
    assert {c: second.run_folder(c) for c in figures if c != ("a",)} == {c: x for c, x in names.items() if c != ("a",)}


def test_a_trial_that_answered_differently_is_made_again_for_another_limit(tmp_path):
    answers = iter([1.1e-3, 0.9e-3, 2e-3])
    first = made(tmp_path, lambda _c, _f: {"kl": next(answers)})
    first.open(force=False)
    with pytest.raises(CannotJudge):
        first.run(("a",))
    second = made(tmp_path, lambda _c, _f: {"kl": next(answers)}, test="kl<1e-5")
    second.open(force=False)
    assert second.run(("a",)).figures["kl"] == 2e-3


def test_a_command_is_no_limit_of_the_same_figure(tmp_path):
    made(tmp_path, dict, test="kl<1e-4").open(force=False)
    asked = BisectionAsked(
        subject="s", by="policy", good="A", bad="B", test="./kl.sh", against="fp64", changes=("a", "b"), how="", code=""
    )
    command = Trials(asked, parse_criterion("kl<1e-4"), dict, tmp_path / "out", lambda _: None)
    with pytest.raises(UserError, match="another request"):
        command.open(force=False)


def test_a_figure_near_its_limit_is_measured_again(tmp_path):
    trials = made(tmp_path, lambda _c, _f: {"kl": 0.9e-3})
    trials.open(force=False)
    assert trials.run(()).answers == ("good", "good")


@pytest.mark.parametrize("jobs", [2, 5])
def test_several_at_once_give_the_answer_and_the_records_of_one(tmp_path, jobs):
    names = tuple("abcdefghij")

    def measure(changes, folder):
        time.sleep(0.002 * len(changes))
        folder.mkdir(parents=True)
        return {"kl": 1.0 if {"c", "h"} <= set(changes) else 1e-9}

    def search(folder, at_once):
        trials = made(folder, measure, changes=names)
        trials.tasks = Tasks(at_once)
        trials.open(force=False)
        found = smallest_sets(names, lambda some: trials.run(some).answer == "bad", 4, 20, trials.ahead)
        first = first_bad(
            11, lambda i: trials.run(names[:i]).answer == "bad", lambda s: trials.ahead([names[:i] for i in s])
        )
        trials.tasks.close()
        kept = [(t.changes, t.answers, t.figures) for t in read_trials(folder / "out" / TRIALS)[1:]]
        return found, first, kept, sorted(x.name for x in (folder / "out" / "runs").iterdir())

    assert search(tmp_path / "several", jobs) == search(tmp_path / "one", 1)


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
