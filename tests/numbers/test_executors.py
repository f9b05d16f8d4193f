"""Pieces made by other processes: in order, done again where one dies, split as the process that asked splits them."""

import os

import pytest

from precaudit.errors import UserError
from precaudit.numbers import threads
from precaudit.numbers.executors import Threads, executor
from precaudit.numbers.processes import Processes
from tests.helpers import pieces


@pytest.fixture(scope="module")
def two():
    made = Processes(2)
    yield made
    made.close()


def test_results_stand_in_the_order_of_pieces(two):
    told = []
    assert two.map(pieces.square, 0.001, range(20), lambda *x: told.append(x), "squares") == [i * i for i in range(20)]
    assert [done for done, total, what in told if (total, what) == (20, "squares, 2 processes")] == list(range(20))
    assert Threads().map(pieces.square, 0, range(3)) == [0, 1, 4]
    assert two.map(pieces.square, 0, []) == []


def test_rows_are_split_as_here_and_blas_has_one_thread(two, monkeypatch):
    monkeypatch.setattr(threads, "WORKERS", 3)
    assert two.map(pieces.split, None, [7]) == [([(0, 2), (2, 4), (4, 7)], {1})]


def test_what_a_piece_raises_is_raised(two):
    with pytest.raises(UserError, match=r"^5 is not there$"):
        two.map(pieces.fail_user, None, [5, 5, 5])
    with pytest.raises(RuntimeError, match=r"in fail\n.*\nKeyError: 5"):
        two.map(pieces.fail, None, [5])
    assert two.map(pieces.square, 0, [3]) == [9]


def test_the_piece_of_a_process_that_dies_is_made_again(two, tmp_path):
    assert two.map(pieces.die_once, tmp_path, range(5)) == list(range(5))
    assert (tmp_path / "died").exists()


def test_a_piece_that_kills_every_process_is_the_users_error(two):
    with pytest.raises(UserError, match=r"3 processes were killed while they made the same piece.*fewer --jobs"):
        two.map(pieces.die, None, [1])


def test_its_end_ends_processes():
    with executor(2) as made:
        made.map(pieces.square, 0, [1, 2])
        running = [p.process.pid for p in made.idle]
    for pid in running:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(UserError, match="leave out --jobs"), executor(2, "tcp://127.0.0.1:1"):
        pass


def test_a_piece_that_does_not_fit_the_memory_of_a_process_is_named():
    with executor(2, memory=300_000_000) as made:
        assert made.map(pieces.hold, None, [1, 2, 3]) == [1_000_000, 2_000_000, 3_000_000]
        with pytest.raises(
            UserError, match=r"^piece 2 of 3 \(sums\) does not fit --memory 300 MB, in a process of its "
        ):
            made.map(pieces.hold, None, [1, 900, 2], what="sums")
        assert made.map(pieces.hold, None, [4]) == [4_000_000]
        assert all(peak <= 300_000_000 for peak in made.peaks.values())


@pytest.mark.parametrize(
    ("jobs", "scheduler", "memory", "why"),
    [
        (1, None, 1 << 30, "give --jobs 2 or more"),
        (2, "tcp://127.0.0.1:1", 1 << 30, "dask worker --memory-limit"),
        (1000, None, 1 << 40, r"--memory 1100 GB are more than the [\d.]+ GB of this machine; give fewer, or less"),
    ],
)
def test_memory_that_cannot_be_had_is_told_before_anything_starts(jobs, scheduler, memory, why):
    with pytest.raises(UserError, match=why), executor(jobs, scheduler, memory):
        pass
