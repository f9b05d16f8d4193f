"""A loop of one's own, recorded: ``precaudit.recording`` and ``precaudit.watched``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precaudit
from precaudit.errors import CannotJudge, UserError
from precaudit.recording.runs.programs import open_program_run

W = jax.random.normal(jax.random.key(0), (16, 16)).astype(jnp.bfloat16)
X = jax.random.normal(jax.random.key(1), (4, 16)).astype(jnp.bfloat16)


@jax.jit
def step(w, x, token):
    x = jnp.tanh(x @ w) + token.astype(w.dtype)
    return x.sum(dtype=jnp.float32), x


@pytest.mark.turn  # 3 s
def test_a_loop_is_recorded_compared_and_judged(tmp_path):
    x = X
    with precaudit.recording(tmp_path / "run") as r:
        for token in (3, 1, 4):
            _, x = r.call(step, W, x, jnp.int32(token))
    record = open_program_run(tmp_path / "run").record
    assert (record.calls, record.cases, r.runs) == (3, ("call0to2",), [tmp_path / "run"])
    assert (r.judgement.exit_code, r.notes) == (0, ())
    plain = X
    for token in (3, 1, 4):
        _, plain = step(W, plain, jnp.int32(token))
    assert np.asarray(x).tobytes() == np.asarray(plain).tobytes()


def test_functions_that_take_turns_are_runs_of_their_own(tmp_path):
    with precaudit.recording(tmp_path / "run", compare=False) as r:
        for token in (3, 1):
            y = r.call(step, W, X, jnp.int32(token))[1]
            r.call(lambda w, y: y @ w, W, y)
    assert [open_program_run(x).record.calls for x in r.runs] == [2, 2]
    with pytest.raises(UserError, match="there are 2 runs"):
        _ = r.judgement


def test_a_block_that_raises_records_nothing(tmp_path):
    def loop():
        with precaudit.recording(tmp_path / "run") as r:
            r.call(step, W, X, jnp.int32(1))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        loop()
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_recorded_is_said(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(UserError, match="is not a run"), precaudit.recording(tmp_path / "mine"):
        pass
    with pytest.raises(CannotJudge, match="has no points"), precaudit.recording(tmp_path / "run") as r:
        r.call(lambda n: n + 1, jnp.int32(1))


def test_the_first_calls_of_a_watched_function_are_recorded(tmp_path):
    @precaudit.watched(tmp_path / "run", calls=2)
    @jax.jit
    def next_state(w, x):
        return jnp.tanh(x @ w)

    x = X
    for _ in range(4):
        x = next_state(W, x)
    assert next_state.recording.runs == [tmp_path / "run"]
    assert next_state.recording.judgement.exit_code == 0
    assert open_program_run(tmp_path / "run").record.calls == 2
    with pytest.raises(UserError, match="calls = 0 records none"):
        precaudit.watched(calls=0)


def test_the_room_is_a_package_still():
    from precaudit.recording.runs import programs

    assert precaudit.recording.runs.programs is programs
