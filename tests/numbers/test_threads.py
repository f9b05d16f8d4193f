"""Jobs on threads: every one once, errors raised, NumPy's state handed on, jobs of jobs."""

import threading
import time

import numpy as np
import pytest

from precaudit.numbers import threads
from precaudit.numbers.threads import each


def test_every_job_is_done_once_and_results_keep_their_order():
    done = []

    def job(i):
        time.sleep(0.002 * (i % 3))
        done.append(i)
        return i * i

    assert each(job, [(i,) for i in range(50)]) == [i * i for i in range(50)]
    assert sorted(done) == list(range(50))


@pytest.mark.skipif(threads.WORKERS < 2, reason="one core has no other thread")
def test_the_caller_is_one_of_the_threads():
    both = threading.Barrier(2, timeout=30)
    names = each(lambda: (both.wait(), threading.get_ident())[1], [(), ()])
    assert threading.get_ident() in names
    assert len(set(names)) == 2


@pytest.mark.parametrize("bad", [0, 7])
def test_an_error_is_raised_and_no_more_jobs_begin(bad):
    done = []

    def job(i):
        if i == bad:
            raise ValueError(f"job {i}")
        time.sleep(0.002)
        done.append(i)

    with pytest.raises(ValueError, match=f"job {bad}"):
        each(job, [(i,) for i in range(300)])
    assert len(done) < 299


@pytest.mark.skipif(threads.WORKERS < 2, reason="one core has no other thread")
@pytest.mark.parametrize("by_caller", [True, False])
def test_an_error_is_raised_when_no_job_runs_any_more(by_caller):
    caller, both, done = threading.get_ident(), threading.Barrier(2, timeout=30), []

    def job():
        both.wait()
        if (threading.get_ident() == caller) == by_caller:
            raise ValueError("a job")
        time.sleep(0.1)
        done.append(1)

    with pytest.raises(ValueError, match="a job"):
        each(job, [(), ()])
    assert done == [1]


def test_the_error_state_is_the_callers():
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        each(lambda x: np.exp(x), [(np.full(3, 1e3),)] * 4)
    with np.errstate(over="ignore"):
        assert np.isinf(each(lambda x: np.exp(x), [(np.full(3, 1e3),)] * 4)).all()


def test_jobs_may_have_jobs():
    inner = lambda i: sum(each(lambda j: i * j, [(j,) for j in range(5)]))  # noqa: E731
    assert each(inner, [(i,) for i in range(8)]) == [10 * i for i in range(8)]
