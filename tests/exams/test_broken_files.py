"""Broken files of models, runs and users, a short form of ``make fuzz``, and what it found."""

import json

import pytest

from exams.fuzz import DUMPS, Corpus, sealed
from precaudit.cli import run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_broken_file_is_named_or_loads(corpus, first):
    found = {seed: corpus.case(seed) for seed in (*range(first, first + 100), 721)}
    assert not {s: f for s, f in found.items() if f[1] not in ("loaded", "refused")}
    assert {what for _, what in found.values()} == {"loaded", "refused"}


def test_a_broken_dump_is_named_or_loads(corpus):
    found = {seed: corpus.case(seed) for seed in range(DUMPS, DUMPS + 200)}
    assert not {s: f for s, f in found.items() if f[1] not in ("loaded", "refused")}
    assert {what for _, what in found.values()} == {"loaded", "refused"}


@pytest.mark.slow
def test_more_broken_files(corpus):
    found = {seed: corpus.case(seed) for seed in range(400, 10_000)}
    assert not {s: f for s, f in found.items() if f[1] not in ("loaded", "refused")}


def test_half_a_character_in_a_manifest_is_no_manifest(corpus, capsys):
    path = corpus.folder / "run" / "run.json"
    with corpus.kept("run", path):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "\ud800"}))
        assert run(["gate", str(path.parent)]) == 2
    assert "run.json: not a run manifest" in capsys.readouterr().err


def test_a_record_of_an_unknown_point_is_refused(corpus, capsys):
    path = corpus.folder / "run" / "errors.jsonl"
    with corpus.kept("run", path):
        path.write_text(path.read_text().replace('"attn_out"', '"att[_out"'))
        sealed(path.parent)
        for command in ("gate", "report"):
            assert run([command, str(path.parent)]) == 2
            assert "errors.jsonl:1: a record of an unknown point 'att[_out'" in capsys.readouterr().err


def test_a_key_that_no_policy_has_is_told_with_its_file(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('scroes = "float32"\n')
    assert run(["trace", "tiny", "--policy", str(path), "-o", str(tmp_path / "run")]) == 2
    assert f"policy {path}: unknown policy key 'scroes'" in capsys.readouterr().err
