"""Taps inside while loops: every iteration has its own values, planted, emulated, and judged where it ran."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as tap
from safetensors.numpy import load_file, save_file

import precaudit
from precaudit import Program, gate
from precaudit.diagnosis.evidence.effects import output_shares
from precaudit.diagnosis.evidence.last_call import Last
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr import plant, reap
from precaudit.interpreters.jaxpr.bounded import bound_loops
from precaudit.judging.rules import judge
from precaudit.progress import silent
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.planning import ProgramSelection, points
from precaudit.recording.programs.preparing import prepare_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.programs import file_name, open_program_run
from precaudit.references.comparison.programs import compare_program
from precaudit.schema.limits import default_limits
from tests.helpers.paths import EXAMPLES
from tests.helpers.runs import altered as altered_at

LOOP = f"{EXAMPLES / 'generation_loop.py'}:program"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The generation loop's run, compared: eleven iterations of case a, three of b; c is a with one fault."""
    program = load_program(LOOP)
    program = replace(program, cases={**program.cases, "c": program.cases["a"]})
    opened = trace_program(program, tmp_path_factory.mktemp("loop") / "run")
    bad = altered(opened, "attended", (3, 1))
    return program, bad, compare_program(bad, program)


def altered(opened, point, at):
    """Return a run in which a point of case c is 2 % larger in one step."""
    name = file_name(opened.record, "c", 0, "taps")
    tensors = load_file(opened.folder / name)
    whole = tensors[point].copy()
    whole[at] = (whole[at].astype(np.float32) * 1.02).astype(whole.dtype)
    save_file({**tensors, point: whole}, opened.folder / name)
    hashes = {**opened.record.hashes, name: file_hash(opened.folder / name)}
    write_manifest(opened.folder, msgspec.structs.replace(opened.record, hashes=hashes))
    return open_program_run(opened.folder)


@pytest.mark.turn  # 11 s
def test_a_generation_loop_passes_and_its_iterations_are_as_many_as_it_took(run):
    program, opened, errors = run
    assert [(x.iterations, x.source) for x in opened.record.loops] == [(11, "generation_loop.py:52")]
    verdicts = [(e, judge(e, default_limits())) for e in errors if e.prompt != "c"]
    assert {v.status for e, v in verdicts if e.prompt == "a"} == {"pass"}
    assert {v.status for e, v in verdicts if e.prompt == "b"} == {"pass", "not run"}
    ran = {case: {e.layer for e in errors if e.prompt == case and e.point == "logits" and e.skipped is None}
           for case in program.cases}  # fmt: skip
    assert ran == {"a": set(range(11)), "b": set(range(3)), "c": set(range(11))}


@pytest.mark.turn  # 26 s
def test_what_is_recorded_is_what_each_iteration_made(run):
    """The tokens that the loop returns are those that its recorded logits choose; bit for bit the bare loop's."""
    program, opened, _ = run
    for case in ("a", "b"):
        tokens, steps, cache, last = jax.jit(program.call)(program.params, *program.cases[case])
        taps, n = opened.tensors(case, 0, "taps"), int(steps)
        assert taps["logits~1"][:n].argmax(-1).tolist() == tokens[1 : n + 1].tolist()
        assert np.array_equal(taps["logits~1"][n - 1], last)
        for name, whole in zip(("keys", "values"), cache, strict=True):
            assert np.array_equal(taps[name][n - 1], whole)
        assert taps["keys@taken"].sum() == n
    assert all(n.bitwise for n in opened.record.neutrality)


def test_a_fault_at_one_iteration_is_flagged_there(run):
    _, opened, _ = run
    judged = gate(opened.folder)
    assert judged.exit_code == 1
    failed = {(v.prompt, v.layer, v.point) for v in judged.verdicts if v.status == "fail" and v.kind == "local"}
    assert ("c", 3 * 2 + 1, "attended") in failed
    assert {(case, layer) for case, layer, _ in failed} == {("c", 7)}


def sampled(params, count):
    """Tokens are drawn by a sum that float32 and FP64 see on two sides of a tie."""

    def step(state):
        i, token, x = state
        x = x @ params["w"] + params["embed"][token]
        return i + 1, jnp.where(x.astype(jnp.float32)[0] > params["edge"], i + 1, 0), x

    return lax.while_loop(lambda s: s[0] < count, step, (0, 0, params["embed"][0]))[2]


@pytest.mark.turn  # 5 s
def test_the_loop_of_the_reference_goes_the_way_that_was_recorded(tmp_path):
    """A threshold between what bfloat16 gave and what FP64 gives: another token, unless the recorded one is held."""
    draw = np.random.default_rng(4)
    params = {
        "w": jnp.asarray(draw.standard_normal((8, 8)) / 3, jnp.bfloat16),
        "embed": jnp.asarray(draw.standard_normal((5, 8)), jnp.bfloat16), "edge": jnp.float32(np.inf),
    }  # fmt: skip
    program = Program(sampled, params, {"a": (jnp.int32(4),)}, outputs="x")
    stored = trace_program(program, tmp_path / "first").tensors("a", 0, "taps")["x"][0, 0].astype(np.float64)
    wide = {k: np.asarray(v, np.float64) for k, v in params.items()}
    exact = (wide["embed"][0] @ wide["w"] + wide["embed"][0])[0]
    assert stored != exact
    program = replace(program, params={**params, "edge": jnp.float32((float(stored) + exact) / 2)})
    errors = compare_program(trace_program(program, tmp_path / "run"), program)
    assert all(0 < float(e.rel_l2) < 2.0**-6 for e in errors if e.kind == "forward" and e.point != "x.in")
    assert gate(tmp_path / "run").exit_code == 0
    some = trace_program(program, tmp_path / "some", ProgramSelection(layers=(1, 3)))
    assert {e.layer for e in compare_program(some, program)} == {1, 3, None}
    assert gate(tmp_path / "some").exit_code == 0
    assert some.tensors("a", 0, "taps")["sampled.in"].shape == (2, 8)


def greedy(params, token):
    """Generate by the largest of nine logits, up to five times or to token 4."""
    w, embed = params

    def step(state):
        i, token, x, _ = state
        x = jnp.tanh(x @ w + embed[token])
        logits = (embed @ x).astype(jnp.float32)
        return i + 1, jnp.argmax(logits).astype(jnp.int32), x, logits

    first = (0, token, embed[token], jnp.zeros(len(embed)))
    return lax.while_loop(lambda s: (s[0] < 5) & (s[1] != 4), step, first)[3]


def test_shares_of_every_iteration_leave_nothing_over(tmp_path):
    """All own errors together turn FP64 into what was recorded, so their shares are the change."""
    draw = np.random.default_rng(0)
    params = tuple(jnp.asarray(draw.standard_normal(shape) / 3, jnp.bfloat16) for shape in ((12, 12), (9, 12)))
    program = Program(greedy, params, {"a": (jnp.int32(1),)}, outputs="logits")
    opened = trace_program(program, tmp_path / "run")
    last = Last(opened, program, prepare_program(program, loops=opened.record.loops), "outputs.logits")
    (found,) = output_shares(last, ["a"], "margin", silent)
    assert found.unknown is None
    assert float(found.explained) == pytest.approx(float(found.change), rel=1e-6)
    assert {s.layer for s in found.shares if s.point == "logits"} == set(range(opened.record.loops[0].iterations))


# reap and plant


def doubled(x):
    return lax.while_loop(lambda v: v < 9, lambda v: tap(v * 2, "doubled"), x)


@pytest.mark.parametrize("room", [2, 3, 5])
def test_a_bounded_loop_gives_the_results_of_the_loop(room):
    out, taps = jax.jit(reap(bound_loops(doubled, room)))(jnp.float32(1.5))
    assert float(out) == float(doubled(jnp.float32(1.5))) == 12.0
    assert taps["doubled"].tolist() == [3.0, 6.0, 12.0, 0.0, 0.0][:room]
    assert taps["doubled@taken"].tolist() == [True, True, True, False, False][:room]


def test_nested_loops_and_vmapped_ones():
    def outer(x):
        def step(s):
            return s[0] + 1, lax.while_loop(lambda v: v < 10 * s[0], lambda v: tap(v + s[0], "inner"), s[1])

        return lax.while_loop(lambda s: s[0] < 3, step, (1, x))[1]

    _, taps = reap(bound_loops(outer, 4))(7)
    assert taps["inner"].tolist() == [[8, 9, 10, 0], [12, 14, 16, 18], [0] * 4, [0] * 4]
    assert taps["inner@taken"].tolist() == [[True] * 3 + [False], [True] * 4, [False] * 4, [False] * 4]
    out, taps = reap(bound_loops(jax.vmap(doubled), 3))(jnp.array([2.0, 20.0]))
    assert out.tolist() == [16.0, 20.0]
    assert taps["doubled"].tolist()[:2] == [[4.0, 40.0], [8.0, 40.0]]


def test_planted_iterations_have_their_own_errors():
    f = bound_loops(doubled, 4, rest=False)
    _, taps = reap(f)(jnp.float32(1.5))
    changed = taps["doubled"].at[1].add(0.5)
    with jax.enable_x64(True):
        out, errors = plant(f, "force")({"doubled": changed}, np.float32(1.5))
        assert (float(out), np.asarray(errors["doubled"]).tolist()) == (12.0, [0.0, 0.5, -1.0, 0.0])
        by_tap = jax.grad(lambda v: plant(f, "add")({"doubled": v}, np.float32(1.5))[0])(jnp.zeros(4))
    assert by_tap.tolist() == [4.0, 2.0, 1.0, 0.0]


# What a program's loop needs


def test_loops_in_loops_and_in_calls_are_counted():
    def call(w, x, n):
        def inner(s):
            return s[0] + 1, jnp.tanh(s[1]) @ w

        def outer(s):
            return s[0] + 1, lax.while_loop(lambda t: t[0] < s[0], inner, (0, s[1]))[1]

        return jax.jit(lambda v: lax.while_loop(lambda s: s[0] < n, outer, (0, v))[1])(x)

    w, x = jnp.eye(4) / 2, jnp.ones((2, 4))
    program = Program(call, w, {"a": (x, jnp.int32(3)), "b": (x, jnp.int32(5))})
    assert sorted(prepare_program(program).iterations.values()) == [4, 5]
    assert {p.stacked for p in points(program)} >= {(5, 4)}


def test_a_loop_that_never_runs_is_not_run_and_no_pass(tmp_path):
    def call(w, x, n):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1] @ w

    program = Program(call, jnp.eye(4), {"a": (jnp.ones((2, 4)), jnp.int32(0))})
    compare_program(trace_program(program, tmp_path / "run"), program)
    judged = gate(tmp_path / "run")
    assert judged.exit_code == 3
    assert {v.status for v in judged.verdicts} == {"unknown"}


def test_the_condition_of_a_loop_that_holds_taps_is_refused_by_name_and_line():
    def call(w, x):
        return lax.while_loop(lambda v: tap(v.sum(), "size") < 9, lambda v: v @ w, x)

    at = call.__code__.co_firstlineno + 1
    with pytest.raises(
        UserError, match=rf"tap 'size' lies inside the condition of while at .*test_while_loops\.py:{at}"
    ):
        points(Program(call, jnp.eye(2) * 2, {"a": (jnp.ones((2, 2)),)}))


def test_a_line_in_a_folder_whose_name_has_a_space_is_told_whole():
    code = "def call(w, x):\n    return lax.while_loop(lambda v: tap(v.sum(), 'size') < 9, lambda v: v @ w, x)\n"
    exec(compile(code, "/a folder (new)/mine.py", "exec"), names := {"lax": lax, "tap": tap})
    with pytest.raises(UserError, match=r"condition of while at /a folder \(new\)/mine\.py:2"):
        points(Program(names["call"], jnp.eye(2) * 2, {"a": (jnp.ones((2, 2)),)}))


def test_a_loop_whose_end_rounding_decides_is_given_room(tmp_path, monkeypatch):
    """One that was counted to end after 2 iterations and is recorded with 3, in the second case of two."""

    def call(w, x, n):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]

    x = jnp.ones((2, 4))
    program = Program(call, jnp.eye(4) / 3, {"a": (x, jnp.int32(2)), "b": (x, jnp.int32(3))}, outputs="out")
    counted = "precaudit.recording.programs.preparing._count_iterations"
    monkeypatch.setattr(counted, lambda *_: {"call": 2})
    opened = trace_program(program, tmp_path / "run")
    assert [n.case for n in opened.record.neutrality] == ["a", "b"]
    assert [loop.iterations for loop in opened.record.loops] == [4]
    line = call.__code__.co_firstlineno + 1
    (warned,) = opened.record.warnings
    assert warned.startswith(
        f"rounding decides when the while loop call (test_while_loops.py:{line}) ends: it took more"
    )
    found = compare_program(opened, program)
    made = Counter(e.point for e in found.errors if e.kind == "local" and e.skipped is None)
    assert {*made.values()} == {5}  # 2 and 3 iterations
    assert gate(found).exit_code == 0
    cut_off = msgspec.structs.replace(opened.record, finished=None, neutrality=opened.record.neutrality[:1])
    write_manifest(tmp_path / "run", cut_off)
    again = trace_program(program, tmp_path / "run", options=ProgramTraceOptions(resume=True))
    assert (again.record.loops, again.record.hashes) == (opened.record.loops, opened.record.hashes)
    monkeypatch.setattr("precaudit.recording.programs.loop_room.TIMES", 1)
    with pytest.raises(UserError, match=r"b, call 0: the while loop call .* did not end within 2 iterations"):
        trace_program(program, tmp_path / "other")


def adaptive(p, y):
    """Heun's method for y' = tanh(a y) − y / 2 up to t = 1, whose next step follows from the error of this one."""

    def slope(y):
        return jnp.tanh(p @ y) - 0.5 * y

    def advance(state):
        t, h, y, n = state
        first = slope(y)
        euler = y + h * first
        heun = y + h * 0.5 * (first + slope(euler))
        error = jnp.sqrt(jnp.mean((heun - euler) ** 2)) / 1e-4
        t, y = jnp.where(error <= 1, t + h, t), jnp.where(error <= 1, heun, y)
        h = jnp.minimum(h * jnp.clip(0.9 / jnp.sqrt(error + 1e-9), 0.2, 5.0), 1.0 - t + 1e-7)
        return t, h, y, n + 1

    return lax.while_loop(lambda s: (s[0] < 1.0) & (s[3] < 200), advance, (jnp.float32(0), jnp.float32(0.1), y, 0))[2]


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    draw = np.random.default_rng(7).standard_normal
    given = jnp.asarray(draw((24, 24)) / 24**0.5, jnp.float32), {"a": (jnp.asarray(draw(24), jnp.float32),)}
    program = Program(adaptive, *given, outputs="y")
    return program, trace_program(program, tmp_path_factory.mktemp("solved") / "run")


def test_the_step_of_an_adaptive_solver_is_recorded_with_what_it_makes(solved):
    """Recomputed from the first step on, it had errors of 1 % after ten: h follows from differences of 1e-4."""
    program, opened = solved
    assert {"t", "h"} <= {p.name for p in opened.record.points}
    assert opened.record.loops[0].iterations > 20
    assert gate(compare_program(opened, program)).exit_code == 0


@pytest.mark.turn  # 5 s
def test_a_step_size_that_is_off_fails_at_its_step(solved, tmp_path):
    program, opened = solved
    bad = altered_at(opened, tmp_path / "bad", "h", lambda h: h * np.where(np.arange(len(h)) == 9, np.float32(1.01), 1))
    its = {(v.point, v.layer) for v in gate(compare_program(bad, program)).verdicts if v.status == "fail"}
    assert ("h", 9) in its


def test_what_a_lambda_makes_has_the_name_of_its_loop():
    def call(w, x):
        grown = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)
        return grown + 1

    names = [p.name for p in points(Program(call, jnp.eye(4), {"a": (jnp.ones((2, 4)),)}))]
    assert {name.partition("~")[0].removesuffix(".in") for name in names} == {"grown", "call"}


def test_a_loop_within_a_loop_ends_with_each_of_its_iterations(tmp_path):
    """A step is halved until the loss falls; near the minimum rounding decides when that is."""
    draw = np.random.default_rng(2).standard_normal
    a, b, x = (jnp.asarray(draw(n) / 4, jnp.float32) for n in ((16, 16), 16, 16))

    def loss(w, x):
        return jnp.sum(jnp.tanh(w @ x - b) ** 2)

    def call(w, x):
        def step(state):
            x, n = state
            value, slope = jax.value_and_grad(loss, argnums=1)(w, x)
            falls = value - 0.3 * (slope @ slope)
            size = lax.while_loop(lambda t: (loss(w, x - t * slope) > falls) & (t > 1e-4), lambda t: t * 0.5, 2.0)
            return x - size * slope, n + 1

        return lax.while_loop(lambda state: state[1] < 8, step, (x, 0))[0]

    program = Program(call, a, {"a": (x,)}, outputs="x")
    opened = trace_program(program, tmp_path / "run")
    outer, inner = sorted(opened.record.loops, key=lambda loop: loop.name != "call")
    assert (outer.iterations, inner.iterations) == (8, 15)  # 2 / 2¹⁵ is the first below 1e-4
    assert gate(compare_program(opened, program)).exit_code == 0


def test_the_command_selects_iterations_of_a_while_loop(tmp_path):
    """It was told that a loop has one layer, however many iterations it took."""

    def call(w, x):
        return lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.tanh(s[0] @ w), s[1] + 1), (x, 0))[0]

    program = Program(call, jnp.eye(4) / 2, {"a": (jnp.ones((2, 4)),)}, outputs="x")
    opened = precaudit.trace(program, tmp_path / "run", layers="1:3")
    assert opened.record.layers == (1, 2)
    with pytest.raises(UserError, match="layer 3 is out of range: there are 3"):
        precaudit.trace(program, tmp_path / "other", layers="3")
