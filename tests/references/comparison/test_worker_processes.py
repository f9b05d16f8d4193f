"""Many prompts of small tensors are shared by processes: the records are those of one, and nothing is left behind."""

import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from precaudit.errors import UserError
from precaudit.models.checkpoints import safetensors_files
from precaudit.models.checkpoints.readers import WeightReader
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers import processes, threads
from precaudit.numbers.executors import Threads
from precaudit.progress import silent
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.recorded import Recorded
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.comparison import shares
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.comparison.model_pairs import ModelPair, compare_models
from precaudit.references.comparison.pairs import PairPiece
from precaudit.references.comparison.selected import resolve_selection
from precaudit.references.textbook.pieces import Execution
from precaudit.references.textbook.reference import Textbook
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.pieces import Pickled

PROMPTS = [Prompt(f"p{i}", tokens=tuple(range(7 * i, 7 * i + 5 + i))) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "run"
    trace("tiny", folder, PROMPTS, Selection(layers="3"), TraceOptions(decode_steps=1))
    return folder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shares, "MANY", 1)
    monkeypatch.setattr(threads, "WORKERS", 2)


@pytest.fixture
def book(folder, tmp_path):
    recorded = Recorded.of(open_run(folder))
    selected = resolve_selection(recorded, None, ())
    source = shares.open_weights(recorded.run, "tiny")
    return Textbook.of(recorded, selected, source, tmp_path), selected


def lines(folder):
    return (folder / "errors.jsonl").read_bytes()


@pytest.mark.turn  # 4 s
def test_two_processes_write_what_one_does(folder, monkeypatch):
    monkeypatch.setattr(threads, "WORKERS", 2)
    compare(folder, options=CompareOptions(fresh=True))
    one = lines(folder)
    started, given = [], []
    start, make = processes.Process.__init__, processes.Process.make
    monkeypatch.setattr(processes.Process, "__init__", lambda self: started.append(self) or start(self))
    monkeypatch.setattr(
        processes.Process,
        "make",
        lambda self, errand, key, piece: given.append(piece) or make(self, errand, key, piece),
    )
    monkeypatch.setattr(shares, "MANY", 1)
    compare(folder, options=CompareOptions(fresh=True))
    assert len(started) == 2
    assert sorted((p.groups.start, p.prompts) for p in given) == [
        (group, prompts) for group in range(2) for prompts in (("p0", "p3"), ("p1", "p2"))
    ]
    assert lines(folder) == one


def test_a_run_against_another_is_pieces_of_layers(folder):
    opened = open_run(folder)
    pair = ModelPair((opened, opened), resolve_selection(Recorded.of(opened), None, ()))
    by = Pickled(3)
    one, found = (compare_models(pair, True, silent, x) for x in (Threads(), by))
    assert (found.errors, found.notes) == (one.errors, one.notes)
    assert by.given == [PairPiece(f"p{i}", part, 3) for i in range(4) for part in range(3)]
    assert one.peaks == {}
    assert min(found.peaks.values()) > 1 << 24


@pytest.mark.usefixtures("small")
def test_without_weights_they_say_so_too(folder, tmp_path):
    (tmp_path / "refs").mkdir()
    recorded = Recorded.of(open_run(folder))
    selected = resolve_selection(recorded, None, ())
    book = Textbook.of(recorded, selected, None, tmp_path)
    found = shares.layer_errors(book, selected, Execution())
    assert {e.unknown for e in found if e.point == "q"} == {"weights"}
    assert len(found) == len({(e.prompt, e.phase, e.step, e.layer, e.point, e.kind, e.candidate) for e in found})


def test_few_or_large_tensors_and_one_prompt_start_none(folder, monkeypatch):
    monkeypatch.setattr(threads, "WORKERS", 4)
    recorded = Recorded.of(open_run(folder))
    selected = resolve_selection(recorded, None, ())
    every = [selected.prompts]
    assert shares.divide_prompts(recorded, selected) == every
    monkeypatch.setattr(shares, "MANY", 1)
    assert shares.divide_prompts(recorded, selected) == [("p3",), ("p2",), ("p1",), ("p0",)]
    one = resolve_selection(recorded, Selection(prompts=("p1",)), ())
    assert shares.divide_prompts(recorded, one) == [("p1",)]
    monkeypatch.setattr(shares, "WEIGHTS", 16 * recorded.config.parameters // recorded.config.layers + 1)
    assert shares.divide_prompts(recorded, selected) == [("p0", "p3"), ("p1", "p2")]
    monkeypatch.setattr(shares, "MOST", 0.49)
    assert shares.divide_prompts(recorded, selected) == every
    monkeypatch.setattr(shares, "MOST", 0.6)
    monkeypatch.setattr(threads, "INLINE", 100)
    assert shares.divide_prompts(recorded, selected) == every


@pytest.mark.usefixtures("small")
def test_what_a_process_cannot_read_is_the_users_error(book):
    textbook, selected = book
    reader = replace(textbook.model.read, source="nowhere.gguf")
    assert isinstance(reader, WeightReader)
    with pytest.raises(UserError, match="nowhere"):
        shares.layer_errors(replace(textbook, model=Model(textbook.model.config, reader)), selected, Execution())
    nothing_runs()


@pytest.mark.usefixtures("small")
def test_where_no_process_can_be_started_one_makes_all(book, monkeypatch, tmp_path):
    found = shares.layer_errors(*book, Execution())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert shares.layer_errors(*book, Execution()) == found
    nothing_runs()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("said", ["", "printf '\\000\\000\\000\\000\\000\\000\\000\\011half'\n"])
def test_a_process_that_dies_is_told_and_ends_the_others(book, monkeypatch, tmp_path, said):
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\nread -r line\n{said}echo it broke >&2\nexit 3\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(RuntimeError, match=r"ended with 3\nit broke"):
        shares.layer_errors(*book, Execution())
    nothing_runs()


@pytest.mark.usefixtures("small")
def test_an_interrupt_ends_them(book):
    def interrupted(done, _total, _what):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shares.layer_errors(*book, Execution(tell=interrupted))
    nothing_runs()


def nothing_runs():
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_of_many_files_few_are_mapped_and_headers_are_read_once(folder, monkeypatch):
    monkeypatch.setattr("precaudit.recording.runs.reader.OPEN", 2)
    headers, mapped = [], set()
    read, memmap = safetensors_files.read_header, np.memmap
    monkeypatch.setattr(safetensors_files, "read_header", lambda path, also: headers.append(path) or read(path, also))
    monkeypatch.setattr(np, "memmap", lambda path, *how: mapped.add(path) or memmap(path, *how))
    run = open_run(folder)
    for _ in range(2):
        for point in run.points:
            run.tensor(point)
            assert sum(len(f._maps) for f in run._files.values()) <= 2
    assert len(headers) == len(set(headers)) == len(mapped) == len({p.file for p in run.points}) > 2
