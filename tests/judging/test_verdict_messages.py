"""What a verdict says: numbers, then words of its own, apart; and growth since the baselines."""

from precaudit.judging.baselines import Drift
from precaudit.judging.judgement import Judgement
from precaudit.judging.verdicts import Verdict
from precaudit.reports.judgement import drift_lines, verdict_message

PLACE = {"prompt": "a", "phase": "call", "layer": 0, "point": "attended"}


def test_words_of_a_verdict_are_apart_from_its_numbers():
    differs = Verdict(
        status="fail", kind="formula", metric="rel_l2", value=0.46, limit=1e-6, text="in FP64 it differs", **PLACE
    )
    assert verdict_message(differs).endswith(" [formula] rel_l2 0.46, limit 1e-6; in FP64 it differs")
    lacking = Verdict(status="missing", kind="forward", text="no such tensor", **PLACE)
    assert verdict_message(lacking).endswith(" [forward]: no such tensor")


def test_growth_is_said_once_where_there_is_one_baseline_and_in_three_digits():
    grown = (Drift(100198.62, 100198.62, "k3_kl"), Drift(1.333, 2.254, "kl"))
    assert drift_lines(Judgement("a", (), {}, drift=grown)) == [
        "drift: k3_kl 1e5 × the baseline's",
        "drift: kl 1.33 × the baseline's, 2.25 × the first baseline's",
    ]
