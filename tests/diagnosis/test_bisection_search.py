"""The search of a bisection on planted answers: monotone and not, told and untold; and what TEST says."""

import itertools
import random

import pytest

from precaudit.diagnosis.bisection.ddmin import ddmin, smallest_sets, strongest_first
from precaudit.diagnosis.bisection.first import first_bad
from precaudit.diagnosis.bisection.limits import judge_figures, parse_criterion
from precaudit.errors import UserError

TWENTY = tuple(f"key{i}" for i in range(20))


def holding(*planted):
    """Return a question that any superset of a planted set answers with yes, and the list of what was asked."""
    asked = []

    def ask(some):
        asked.append(some)
        return any(set(p) <= set(some) for p in planted)

    return ask, asked


@pytest.mark.parametrize("planted", [("key7",), ("key0", "key19"), ("key3", "key4", "key11")])
def test_a_planted_set_is_found_among_twenty(planted):
    ask, asked = holding(planted)
    assert ddmin(TWENTY, ask) == planted
    assert len(asked) < 80


def test_every_planted_set_of_six_changes_is_found_and_proved():
    six = TWENTY[:6]
    for size in range(1, 7):
        for planted in itertools.combinations(six, size):
            found = smallest_sets(six, holding(planted)[0], singles=0, most=64)
            assert (found.sets, found.proof) == ((planted,), "smallest")


def test_all_changes_that_do_it_alone_are_told():
    ask, asked = holding(("key2",), ("key5",), ("key8", "key9"))
    found = smallest_sets(TWENTY, ask, singles=24, most=0)
    assert (found.sets, found.proof) == ((("key2",), ("key5",)), "smallest")
    assert len(asked) == 20


def limited(weights, limit):
    """Return a question that is answered by what changes add up to, what they add, and the list of what was asked."""
    asked = []

    def ask(some):
        asked.append(some)
        return sum(weights[c] for c in some) >= limit

    return ask, lambda some: sum(weights[c] for c in some), asked


@pytest.mark.parametrize("seed", range(20))
def test_the_strongest_that_reach_a_limit_are_found_with_few_questions(seed):
    """Of effects that add up none of fewer changes reaches it, and no change of these is too many."""
    draw = random.Random(seed)
    weights = {c: draw.expovariate(1) for c in TWENTY}
    limit = 0.8 * sum(weights.values())
    ask, strength, asked = limited(weights, limit)
    found = strongest_first(TWENTY, ask, strength)
    assert sum(weights[c] for c in found) >= limit
    assert all(sum(weights[c] for c in found) - weights[left] < limit for left in found)
    fewest = next(n for n in range(21) if sum(sorted(weights.values())[20 - n :]) >= limit)
    assert len(found) == fewest
    assert len(asked) < 30


def test_changes_whose_effect_is_no_number_are_halved():
    ask, _, _ = limited(dict.fromkeys(TWENTY, 1), 3)
    assert strongest_first(TWENTY, ask, lambda some: None if some == ("key4",) else 1.0) is None
    assert len(smallest_sets(TWENTY, ask, singles=20, most=0).sets[0]) == 3


def test_strong_changes_that_cancel_give_way_to_others():
    """Two of the strongest undo each other: more are taken, and what is found has the effect."""
    changes = ("a", "b", "c", "d")

    def ask(some):
        return ("c" in some and not {"a", "b"} <= set(some)) or set(some) == set(changes)

    found = strongest_first(changes, ask, lambda some: {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}[some[0]])
    assert ask(found)
    assert not any(ask(tuple(x for x in found if x != left)) for left in found)


def test_a_smaller_set_than_the_minimal_one_is_found_where_it_may_be_tried():
    """ddmin ends at the pair in one half that a third change of the other half does alone, if not with the first."""
    changes = ("a", "b", "c", "d")

    def ask(some):
        return {"a", "b"} <= set(some) or set(some) == {"d"}

    assert ddmin(changes, ask) == ("a", "b")
    assert smallest_sets(changes, ask, singles=0, most=10).sets == (("d",),)
    assert smallest_sets(changes, ask, singles=0, most=1).proof == "1-minimal"


def test_what_is_not_monotone_ends_at_a_set_that_loses_the_effect_without_any_one_change():
    for seed in range(200):
        draw = random.Random(seed)
        answers = {}

        def ask(some, draw=draw, answers=answers):
            fixed = {(): False, TWENTY[:8]: True}
            return fixed.get(some, answers.setdefault(some, draw.random() < 0.3))

        found = ddmin(TWENTY[:8], ask)
        assert ask(found)
        assert not any(ask(tuple(c for c in found if c != left)) for left in found)


def test_what_cannot_be_told_leaves_the_proof_open():
    def ask(some):
        return None if some == ("key1",) else {"key1", "key2"} <= set(some)

    found = smallest_sets(TWENTY[:4], ask, singles=24, most=64)
    assert (found.sets, found.proof) == ((("key1", "key2"),), "open")


def test_a_set_whose_smaller_ones_were_not_all_told_is_not_called_minimal():
    def ask(some):
        return None if some == ("key1", "key2") else {"key1", "key2", "key3"} <= set(some)

    found = smallest_sets(TWENTY[:6], ask, singles=0, most=5)
    assert (found.sets, found.proof) == ((("key1", "key2", "key3"),), "open")


def test_no_more_trials_are_added_than_are_allowed_over_all_sizes():
    ask, asked = holding(("key0", "key5", "key10", "key15"))
    ddmin(TWENTY, ask)
    alone = len(set(asked))
    asked.clear()
    found = smallest_sets(TWENTY, ask, singles=0, most=190)
    assert found.proof == "1-minimal"
    assert alone < len(asked) <= alone + 190


def test_what_is_left_without_a_part_is_cut_as_finely_as_before():
    ask, asked = holding(("key0", "key19"))
    assert ddmin(TWENTY, ask) == ("key0", "key19")
    assert len(asked) <= 50  # 65 where halves are tried again


@pytest.mark.parametrize("turn", range(1, 30))
def test_the_first_bad_of_a_row_is_found(turn):
    asked = []
    found = first_bad(30, lambda i: asked.append(i) or i >= turn)
    assert (found.good, found.bad, found.between) == (turn - 1, turn, ())
    assert len(asked) <= 5


def test_states_that_cannot_be_told_are_passed_over_and_named():
    found = first_bad(10, lambda i: None if i in (4, 5) else i >= 6)
    assert (found.good, found.bad, found.between) == (3, 6, (4, 5))


@pytest.mark.parametrize(
    ("text", "figure", "word", "near"),
    [
        ("kl<1e-3", 1e-4, "good", False), ("kl<1e-3", 9e-4, "good", True), ("kl<1e-3", 1.1e-3, "bad", True),
        ("kl<1e-3", "nan", "bad", False), ("kl<1e-3", "inf", "bad", False), ("flips=0", 0, "good", False),
        ("flips=0", 1, "bad", True), ("flips<=2", 2, "good", False), ("flips<2", 2, "bad", True),
        ("flips<2", 3, "bad", False), ("kl<2x", 1.9e-4, "good", True),
        ("kl<2x", 3e-4, "bad", False), ("bits", 0, "good", False), ("verdict", 1, "bad", False),
        ("verdict", 3, "unknown", False), ("forward@attn_out<2e-3", 1e-3, "good", False),
    ],
)  # fmt: skip
def test_a_test_is_answered_by_its_figure(text, figure, word, near):
    test = parse_criterion(text)
    answer = judge_figures(test, {test.name: figure}, {"kl": 1e-4})
    assert answer[:2] == (word, near)


def test_a_figure_that_is_not_there_is_no_answer():
    word, _, why = judge_figures(parse_criterion("kl<1"), {"logits": 0.1}, {})
    assert word == "unknown"
    assert why == "kl was not measured; there are logits"


@pytest.mark.parametrize("text", ["", "kl", "kl>1", "kl<", "kl<1.2.3", "loss<1", "forward<2x", "kl<-1"])
def test_what_is_no_test_is_refused(text):
    with pytest.raises(UserError, match="--test"):
        parse_criterion(text)
