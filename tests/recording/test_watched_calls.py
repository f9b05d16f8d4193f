"""``jax.jit`` as a watched script has it: what is counted, what is kept, and the Program that kept calls make."""

import copy
import functools
import inspect
import threading

import jax
import jax.experimental.pjit
import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.errors import CannotJudge
from precaudit.judging.gate import judge_found
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.watching.calls import LOWERED, Jitted, Picked, Watch, sequences, shapes_text
from precaudit.recording.watching.programs import program_of_calls, roles_of
from precaudit.references.comparison.programs import compare_program
from precaudit.schema.records.errors import ForwardError, LocalError


@pytest.fixture
def watching():
    """Return what starts a watch; JAX is as it was when the test ends."""
    begun, handed = [], []

    def begin(name="", file="", calls=()):
        watch = Watch(Picked(name, file, tuple(calls)), lambda _, group: handed.extend(group))
        watch.put_into(jax)
        begun.append(watch)
        watch.handed = handed
        return watch

    yield begin
    for watch in begun:
        watch.take_out()


def one(watch, name):
    (found,) = [f for f in watch.functions if f.name == name]
    return found


def test_every_way_of_jitting_is_counted_by_its_own_name_and_line(watching):
    watch = watching()

    @jax.jit
    def bare(x):
        return x + 1

    @functools.partial(jax.jit, static_argnames="n", donate_argnums=0)
    def partial(x, n):
        return x * n

    class Model:
        @functools.partial(jax.jit, static_argnums=0)
        def method(self, x, scale=2.0):
            return bare(x) * scale

    held = jnp.ones(3)
    closure = jax.jit(lambda: held * 2)
    model = Model()
    for _ in range(3):
        bare(jnp.ones(3))
    bare(jnp.ones((2, 3), jnp.bfloat16))
    assert partial(jnp.ones(4), n=3).tolist() == [3, 3, 3, 3]
    assert model.method(jnp.ones(2), scale=3.0).tolist() == [6, 6]
    assert closure().tolist() == [2, 2, 2]
    counts = {f.name: f.calls for f in watch.functions}
    assert counts == {"bare": 4, "partial": 1, "method": 1, "<lambda>": 1}  # bare within method is its parent's
    assert [*map(shapes_text, one(watch, "bare").shapes)] == [["float32[3]"], ["bfloat16[2, 3]"]]
    assert one(watch, "bare").compiled == 2
    assert one(watch, "bare").place.startswith(__file__)
    assert one(watch, "method").formats == ("float32",)


def faces():
    """Return what a script may do with a jitted method and a jitted function beside calling them."""

    class Model:
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x):
            return x + 1

    model, x, jitted = Model(), jnp.ones(3), jax.jit(lambda x: x * 2)
    return {
        "bound": inspect.ismethod(model.step),
        "owner": model.step.__self__ is model,
        "name": functools.wraps(model.step)(lambda x: x).__name__,
        "wrapped": isinstance(jitted, jax.stages.Wrapped),
        "shape": model.step.eval_shape(model, x).shape,
        "lowered": "add" in model.step.lower(model, x).as_text(),
        "called": model.step(x).tolist(),
        "copy": copy.copy(jitted)(x).tolist(),
        "deep": copy.deepcopy({"f": jitted})["f"](x).tolist(),
    }


def test_a_jitted_function_can_do_what_it_can_unwatched(watching):
    bare = faces()
    watching()
    assert faces() == bare
    assert bare["name"] == "step"
    assert bare["wrapped"]


def test_asking_what_it_is_does_not_lower_it(watching):
    watch = watching()
    jitted = jax.jit(lambda x: x)
    assert isinstance(jitted, jax.stages.Wrapped)
    (found,) = watch.functions
    assert LOWERED not in found.unseen
    jitted.lower(jnp.ones(2))
    assert LOWERED in found.unseen


def test_what_is_traced_or_not_jitted_is_no_call_of_its_own(watching):
    watch = watching()

    @jax.jit
    def f(x):
        return (x * x).sum()

    jax.grad(f)(jnp.ones(3))
    jax.vmap(f)(jnp.ones((2, 3)))
    jax.jit(lambda x: f(x) + f(x + 1))(jnp.ones(3))
    with jax.disable_jit():
        f(jnp.ones(3))
    assert one(watch, "f").calls == 0
    f.lower(jnp.ones(3)).compile()(jnp.ones(3))
    assert (one(watch, "f").calls, one(watch, "f").unseen[-1]) == (0, LOWERED)


def test_calls_of_threads_are_all_counted(watching):
    watch = watching()
    f = jax.jit(lambda x: x + 1)
    threads = [threading.Thread(target=lambda: [f(jnp.ones(2)) for _ in range(20)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert watch.functions[-1].calls == 80


def loop(watching, calls, donate=()):
    """Run a decode loop of four steps whose state goes from call to call."""
    watch = watching("step", calls=calls)
    weights = jax.random.normal(jax.random.key(0), (8, 8)).astype(jnp.bfloat16)
    held = jnp.float32(0.5)

    def step(w, state, token):
        x = jnp.tanh(state @ w) + token.astype(w.dtype) * held.astype(w.dtype)
        return x.sum(), x

    step = jax.jit(step, donate_argnums=donate)
    state = jnp.ones(8, jnp.bfloat16)
    for token in (3, 1, 4, 1):
        _, state = step(weights, state, jnp.int32(token))
    return watch.handed


@pytest.mark.parametrize("donate", [(), (1,)])
def test_a_loop_is_one_case_with_its_state_handed_on(watching, tmp_path, donate):
    kept = loop(watching, (0, 1, 2, 3), donate)
    roles = roles_of(kept)
    assert (roles.parameters, roles.state, roles.given) == ((0,), {1: 1}, (2,))
    program = program_of_calls(kept, "step")
    assert (program.steps, list(program.cases)) == (3, ["call0to3"])
    opened = trace_program(program, tmp_path / "run")
    for call, was in enumerate(kept):  # what is recorded is what the script computed, bit for bit
        outputs = opened.tensors("call0to3", call, "outputs")
        assert np.array_equal(outputs["outputs.out1"], was.outputs[1])


def test_what_is_computed_in_64_bits_is_unknown(watching, tmp_path):
    """FP64 is no reference of float64. What comes in bfloat16 beside it is judged, and NaN is NaN."""
    with jax.enable_x64(True):
        watch = watching("f", calls=(0,))

        @jax.jit
        def f(w, x):
            h = x @ w
            narrow = h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
            return narrow, jnp.sqrt(h @ w.T)

        f(jnp.eye(8, dtype=jnp.float64) / 3, -jnp.ones((2, 8)))
        program = program_of_calls(watch.handed, "f")
        opened = trace_program(program, tmp_path / "run")
        assert any(x.startswith("jax_enable_x64 is on") for x in opened.record.warnings)
        found = compare_program(opened, program)
    verdicts = judge_found(found).verdicts
    assert all(e.unknown for e in found.errors if e.point == "h" and isinstance(e, LocalError | ForwardError))
    assert {v.status for v in verdicts if v.point == "h"} == {"unknown"}
    assert {v.status for v in verdicts if v.point.startswith("f")} >= {"nonfinite"}
    assert "pass" in judge_found(found).counts


def test_calls_apart_are_programs_of_their_own(watching):
    kept = loop(watching, (0, 2, 3))
    assert [[k.number for k in group] for group in sequences(kept)] == [[0], [2, 3]]
    alone = program_of_calls(sequences(kept)[0], "step")
    assert (alone.steps, list(alone.cases)) == (0, ["call0"])


def test_the_first_call_of_each_shape_is_kept(watching):
    watch = watching("f")

    @jax.jit
    def f(x):
        return x * 2

    for n in (3, 3, 4, 3, 4):
        f(jnp.ones(n))
    assert [k.number for k in watch.handed] == [0, 2]


def test_arguments_that_are_not_those_traced_are_refused(watching):
    kept = loop(watching, (0,))
    kept[0].inputs.append(np.ones(3))
    with pytest.raises(CannotJudge, match="call 0 was kept with arguments"):
        program_of_calls(kept, "step")


def test_pmap_is_named_as_not_recorded(watching):
    watch = watching()
    jax.pmap(lambda x: x + 1)(jnp.ones((1, 2)))
    assert (watch.functions[-1].calls, watch.functions[-1].unseen) == (1, ["pmap: counted, not recorded"])


def test_pjit_is_jit_by_its_former_name(watching):
    watch = watching()
    before = jax.experimental.pjit
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    double = before.pjit(lambda x: x * 2, device, out_shardings=device)
    assert double(jnp.ones(2)).tolist() == [2, 2]
    assert (watch.functions[-1].name, watch.functions[-1].calls) == ("<lambda>", 1)
    watch.take_out()
    assert not isinstance(before.pjit(jnp.sin), Jitted)


def test_a_number_that_is_handed_on_is_state_by_identity(watching):
    """Two numbers may be equal by chance; the very output of the call before is not."""
    watch = watching("step", calls=(0, 1, 2))

    def step(x, scale):
        return x * scale, scale * 0.5

    step = jax.jit(step)
    x, scale = jnp.ones(4), jnp.float32(2)
    for _ in range(3):
        x, scale = step(x, scale)
    assert roles_of(watch.handed).state == {0: 0, 1: 1}


def test_what_is_called_when_the_script_has_ended_is_not_counted(watching):
    watch = watching()
    f = jax.jit(lambda x: x + 1)
    f(jnp.ones(2))
    watch.take_out()
    f(jnp.ones(2))
    assert watch.functions[-1].calls == 1


def test_a_function_that_is_jitted_again_and_again_is_one(watching):
    watch = watching()

    def f(x):
        return x

    for _ in range(3):
        jax.jit(f)(jnp.ones(2))
    assert [(x.name, x.calls, x.equations) for x in watch.functions] == [("f", 3, 0)]


def test_a_function_without_equations_is_described_once(watching, monkeypatch):
    watch = watching()
    f = jax.jit(lambda x: x)
    described = []
    describe = type(f)._describe
    monkeypatch.setattr(type(f), "_describe", lambda *given: (described.append(1), describe(*given)))
    for _ in range(3):
        f(jnp.ones(2))
    assert (watch.functions[-1].calls, described) == (3, [1])
