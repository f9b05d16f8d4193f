"""What a script's ``jax.jit`` becomes while it is watched: each way to write one works, or is named as not seen."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from precaudit.recording.watching.calls import LAST, LOWERED, Picked, Watch
from precaudit.recording.watching.programs import program_of_calls

before_it_began = jax.jit(lambda x: x + 1)


@pytest.fixture
def watched():
    """Yield a function that watches what a script does, and returns the watch and the groups that it handed over."""
    put: list[Watch] = []

    def watch(script, **picked):
        groups = []
        put.append(found := Watch(Picked(**picked), lambda of, group: groups.append((of.name, group))))
        found.put_into(jax)
        try:
            script()
        finally:
            for f in found.functions:
                found.hand_over(f, ended=True)
            found.take_out()
        return found, groups

    with jax.numpy_dtype_promotion("standard"):
        yield watch
    for one in put:
        assert one.jax.jit is one.original[jax, "jit"]


def counts(watch):
    return {f.name: f.calls for f in watch.functions}


def seen(watch, name):
    (found,) = (f for f in watch.functions if f.name == name)
    return found


X = jnp.arange(6.0).reshape(2, 3)


def decorated():
    @jax.jit
    def f(x):
        return x * 2

    f(X), f(X)


def partially():
    @partial(jax.jit, static_argnames="n")
    def f(x, n):
        return x * n

    f(X, n=2), f(X, 3)


def by_name():
    f = jax.jit(named)
    f(x=X), f(X)


def named(x):
    return x * 2


named.__name__ = "f"


def of_a_partial():
    def f(scale, x):
        return scale * x

    g = jax.jit(partial(f, 2.0))
    g(X), g(X)


def as_a_method():
    class Model:
        scale = 3.0

        @partial(jax.jit, static_argnums=0)
        def f(self, x):
            return self.scale * x

    Model().f(X), Model().f(X)


def donated():
    @partial(jax.jit, donate_argnums=0)
    def f(x):
        return x + 1

    f(f(X + 0))


def closed():
    y = X + 1

    @jax.jit
    def f(x):
        return x @ y.T

    f(X), f(X)


def with_loops():
    @jax.jit
    def f(x):
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]

    f(X), f(X)


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    @jax.jit
    def f(x):
        return jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    f(X), f(X)


def in_threads():
    @jax.jit
    def f(x):
        return x * 2

    threads = [threading.Thread(target=f, args=(X,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def without_waiting():
    f = jax.jit(named)
    np.asarray(f(f(X)))


def by_nnx():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    @nnx.jit
    def f(model, x):
        return model(x)

    f(model, X), f(model, X)


def by_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    @eqx.filter_jit
    def f(model, x):
        return jax.vmap(model)(x)

    f(model, X), f(model, X)


APART = (partially, by_name)  # whose calls are not of one trace
WAYS = (
    decorated, partially, by_name, of_a_partial, as_a_method, donated, closed, with_loops, sharded, in_threads,
    without_waiting, by_nnx, by_equinox,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_every_way_to_jit_is_counted_and_kept(watched, way):
    watch, groups = watched(way, name="f", calls=(0, 1))
    assert counts(watch)["f"] == 2
    assert seen(watch, "f").unseen == []
    kept = [[k.number for k in group] for _, group in groups]
    at_once = way is in_threads and sorted(kept) == [[0], [1]]  # the second may end before the first
    assert at_once or kept == ([[0], [1]] if way in APART else [[0, 1]])
    for _, group in groups:
        program = program_of_calls(group, "f")
        out = jax.jit(program.call)(program.params, *next(iter(program.cases.values())))
        for x, y in zip(out, group[0].outputs, strict=True):
            assert np.asarray(x).tobytes() == y.tobytes()


def lowered():
    f = jax.jit(named)
    compiled = f.lower(X).compile()
    compiled(X)


def mapped():
    jax.pmap(named)(X[:1])


def disabled():
    f = jax.jit(named)
    with jax.disable_jit():
        f(X)


@pytest.mark.parametrize(
    ("way", "says"),
    [(lowered, LOWERED), (mapped, "pmap: counted"), (disabled, "called under jax.disable_jit")],
    ids=["ahead of time", "pmap", "disable_jit"],
)  # fmt: skip
def test_what_is_not_seen_is_named(watched, way, says):
    watch, groups = watched(way, name="f")
    assert any(why.startswith(says) for why in seen(watch, "f").unseen)
    assert not [group for _, group in groups if way is not mapped]


def test_what_was_jitted_before_is_not_seen(watched):
    watch, _ = watched(lambda: before_it_began(X))
    assert watch.functions == []


def test_a_call_within_another_is_a_part_of_it(watched):
    def script():
        inner = jax.jit(named)

        @jax.jit
        def outer(x):
            return inner(x) + 1

        outer(X)
        jax.vmap(inner)(X)
        jax.grad(lambda x: inner(x).sum())(X)

    watch, _ = watched(script)
    assert counts(watch) == {"f": 0, "outer": 1}
    assert seen(watch, "f").within == 3


def test_compilations_are_counted_and_each_shape_is_named(watched):
    def script():
        f = jax.jit(lambda x: x * 2)
        for n in (2, 3, 2, 3):
            f(jnp.ones(n))

    watch, groups = watched(script, name="<lambda>")
    f = seen(watch, "<lambda>")
    assert (f.calls, f.compiled, [[s for _, s in shape] for shape in f.shapes]) == (4, 2, [[(2,)], [(3,)]])
    assert [[k.number for k in group] for _, group in groups] == [[0], [1]]


def loop():
    f = jax.jit(named)
    x = X
    for _ in range(5):
        x = f(x)


def test_a_group_is_handed_over_when_the_last_of_it_has_ended(watched):
    at, groups = [], []
    put = Watch(Picked(name="f", calls=(0, 1, 3)), lambda _, group: groups.append(group))
    put.put_into(jax)
    f = jax.jit(named)
    for i in range(5):
        f(X)
        at.append((i, len(groups)))
    put.take_out()
    assert at == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)]
    _, of_all = watched(loop, name="f", calls=(1, LAST))
    assert [[k.number for k in group] for _, group in of_all] == [[1], [4]]


def test_what_several_calls_are_given_is_copied_once(watched):
    def script():
        @jax.jit
        def f(w, x):
            return w @ x.T

        w = jnp.ones((2, 3))
        f(w, X), f(w, X + 1)

    _, ((_, group),) = watched(script, name="f", calls=(0, 1))
    assert group[0].inputs[0] is group[1].inputs[0]
    assert group[0].inputs[1] is not group[1].inputs[1]


def test_what_is_jitted_while_calls_are_recorded_is_not_the_scripts():
    put = Watch(Picked(name="f"), lambda *_: jax.jit(lambda x: x + 1)(X))
    put.put_into(jax)
    jax.jit(named)(X)
    put.take_out()
    assert counts(put) == {"f": 1}
