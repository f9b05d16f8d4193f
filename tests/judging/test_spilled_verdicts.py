"""Verdicts that lie in a file are those that were given, in the order of those in memory."""

import itertools

import pytest

from precaudit.judging import spilled
from precaudit.judging.spilled import Spilled
from precaudit.judging.verdicts import Verdict
from precaudit.schema.records.errors import Worst

VERDICTS = [
    Verdict(
        status=status, kind=kind, prompt=prompt, phase="prefill", step=step, layer=layer, point=point, index=index,
        value=float("inf"), rel_l2=0.25, worst=Worst(index=(1, 2), candidate=1.0, reference=2.0),
    )
    for step, (status, kind, prompt, layer, point, index) in enumerate(
        itertools.product(
            ("unknown", "fail"), ("local", "forward"), ("b", "a"), (1, None, 0), ("q", "logits"), ((3, 4), 7, None)
        )
    )
]  # fmt: skip


@pytest.mark.parametrize("many", [0, 5, 1000])
def test_what_is_kept_in_a_file_is_what_was_given(many, monkeypatch):
    whole = Spilled(VERDICTS).in_order()
    monkeypatch.setattr(spilled, "MANY", many)
    kept = Spilled(VERDICTS)
    assert len(kept) == len(VERDICTS)
    assert list(kept) == VERDICTS
    assert kept[7] == VERDICTS[7]
    assert kept[-2:] == VERDICTS[-2:]
    assert isinstance(whole, tuple)
    assert list(kept.in_order()) == list(whole)
    assert kept.in_order()[0] == whole[0]
    assert [v.status for v in whole] == sorted(v.status for v in VERDICTS)
    kept.extend(VERDICTS[:2])  # after it was read
    assert list(kept) == [*VERDICTS, *VERDICTS[:2]]
