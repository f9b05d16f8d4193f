"""Runs of every kind, opened by their folder alone, and what is asked of them whatever they are of."""

import pytest

import precaudit
from precaudit.errors import UserError
from precaudit.judging.recalled import provenance_of, recall_any
from precaudit.recording.dumps.runs import Imported
from precaudit.recording.opening import holds_run
from precaudit.recording.programs.loading import load_program
from precaudit.recording.runs.bits import compare_bits
from precaudit.recording.runs.kinds import kind_of, manifest_of
from precaudit.recording.runs.programs import Opened
from precaudit.recording.runs.reader import Run
from tests.helpers.other_decoder import fixture_tokens, write_dump
from tests.helpers.paths import EXAMPLES
from tests.helpers.runs import record

OWN = f"{EXAMPLES / 'own_decoder.py'}:program"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "model")
    precaudit.trace(load_program(OWN), folder / "program", points="query", positions="0", reference=OWN)
    names = write_dump(folder / "theirs", {"a": fixture_tokens()})
    precaudit.import_dump(folder / "theirs", folder / "dump", names)
    return folder


@pytest.mark.turn  # 4 s
def test_a_folder_says_what_it_is_a_run_of(runs):
    kinds = {"model": Run, "program": Opened, "dump": Imported}
    for name, kind in kinds.items():
        opened = precaudit.open_run(runs / name)
        assert type(opened) is kind
        assert precaudit.open_run(opened) is opened
        assert holds_run(opened)
        assert holds_run(str(runs / name))
    assert [kind_of(runs / name) for name in kinds] == list(kinds)
    assert {manifest_of(runs / name).name for name in kinds} == {"run.json"}
    assert not holds_run(runs)
    with pytest.raises(UserError, match="no run here"):
        precaudit.open_run(runs)


@pytest.mark.turn  # 6 s
def test_records_and_their_origin_are_read_of_models_and_programs_alike(runs):
    with pytest.raises(UserError, match="not compared yet"):
        recall_any(runs / "model")
    with pytest.raises(UserError, match="was not compared yet"):
        recall_any(runs / "program")
    for name in ("model", "program"):
        program = {"program": load_program(OWN)} if name == "program" else {}
        precaudit.compare(runs / name, **program)
        found = recall_any(runs / name)
        assert {e.kind for e in found.errors} >= {"local", "forward"}
        assert provenance_of(found.run).run == name


def test_bits_of_a_run_are_its_own(runs):
    for name in ("model", "program"):
        opened = precaudit.open_run(runs / name)
        same = compare_bits(opened, precaudit.open_run(runs / name))
        assert (same.differing, same.where) == (0, None)
        assert same.tensors > 0
    with pytest.raises(UserError, match="was imported: nothing here made it"):
        precaudit.repeat(runs / "dump", runs / "again")
