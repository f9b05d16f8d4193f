"""Broken model files, a short form of ``make fuzz``."""

import pytest

from benchmarks.fuzz import Corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_broken_file_is_named_or_loads(corpus, first):
    found = {seed: corpus.case(seed) for seed in (*range(first, first + 100), 721)}
    assert not {s: f for s, f in found.items() if f[1] not in ("loaded", "refused")}
    assert {what for _, what in found.values()} == {"loaded", "refused"}


@pytest.mark.slow
def test_more_broken_files(corpus):
    found = {seed: corpus.case(seed) for seed in range(400, 10_000)}
    assert not {s: f for s, f in found.items() if f[1] not in ("loaded", "refused")}
