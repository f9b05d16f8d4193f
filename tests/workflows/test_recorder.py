"""What a recorder says of calls before and after it records them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.recording.runs.programs import open_program_run
from precaudit.recording.watching.calls import Jitted, Picked, Watch
from precaudit.recording.watching.records import Picking, WatchOrder
from precaudit.workflows import recorder
from precaudit.workflows.recorder import Recorder, other_versions

W, X = (
    jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.bfloat16) for i, s in enumerate(((4, 8, 8), (3, 8)))
)


def flat(w, x):
    return jnp.tanh(x @ w[0])


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def recorded(f, folder, **order):
    """Return the recorder of one call of a function, what it told, and the call."""
    told, groups = [], []
    found = Recorder(WatchOrder(picked=Picking(), output=str(folder), **order), told.append)
    watch = Watch(Picked(calls=(0,), every=True), lambda of, group: groups.append((of, group)))
    watch.use()
    Jitted(jax.jit(f), f, {}, watch)(W, X)
    return found, told, *groups[0]


@pytest.mark.parametrize(("f", "less"), [(flat, False), (scanned, True)])
def test_of_a_large_call_it_is_said_what_one_layer_takes_where_there_are_layers(f, less, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "LARGE", 0)
    found, told, of, group = recorded(f, tmp_path / "run")
    found.take(of, group)
    assert found.notes == []
    assert told[0].startswith(f"recording {f.__name__}, call 0: ")
    assert ("; --layers -1: " in told[0]) == less


def test_outputs_that_are_not_the_scripts_are_noted_in_the_run(tmp_path):
    found, _, of, group = recorded(flat, tmp_path / "run")
    group[0].outputs[0] = group[0].outputs[0] + group[0].outputs[0].dtype.type(0.5)
    found.take(of, group)
    (warning,) = open_program_run(tmp_path / "run").record.warnings
    assert warning == found.notes[0].removeprefix("flat, call 0: ")
    assert warning.startswith("output 0 of call 0 differs from the script's by up to 0.5")


def test_a_process_that_was_forked_records_nothing(tmp_path):
    found, _, of, group = recorded(flat, tmp_path / "run")
    found.process += 1
    found.take(of, group)
    assert (found.made, found.notes, (tmp_path / "run").exists()) == ([], [], False)


def test_what_breaks_while_calls_are_recorded_is_a_note(tmp_path, monkeypatch):
    found, _, of, group = recorded(flat, tmp_path / "run")
    monkeypatch.setattr(found, "_record", lambda *_: 1 / 0)
    found.take(of, group)
    assert found.notes == ["flat, call 0: recording broke off: ZeroDivisionError: division by zero"]


def test_an_interrupt_says_what_was_not_done(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    found, _, of, group = recorded(flat, tmp_path / "run", diagnose=True)
    found.take(of, group)
    monkeypatch.setattr(found, "_diagnosis", stop)
    found.compare()
    assert found.made[0].compared
    assert found.notes == [f"flat, call 0: interrupted, not diagnosed: precaudit diagnose {tmp_path / 'run'} --rerun"]


def test_other_versions_are_named():
    assert other_versions({"jax": jax.__version__}) == []
    assert other_versions({"jax": "0.0.1"}) == [f"jax is {jax.__version__}, the run has 0.0.1"]


def test_copies_and_outputs_are_let_go_when_no_more_calls_are_kept():
    watch = Watch(Picked(calls=(0, 1), every=True))
    watch.use()
    jitted = Jitted(jax.jit(flat), flat, {}, watch)
    jitted(W, X)
    assert len(jitted._copies) == 2
    jitted(W, X)
    assert (jitted._copies, jitted._last) == ({}, [])
    jitted(W, X)
    assert (jitted._copies, jitted._last) == ({}, [])
