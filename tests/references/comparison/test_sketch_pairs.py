"""What two runs of sketches say, and do not say: runs made by hand, so that each case is a few numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from precaudit.recording.runs.programs import ProgramPoint, ProgramRun
from precaudit.references.comparison.sketches import (
    SketchComparison,
    StateFault,
    _estimate,
    _farthest,
    _pairs,
    _state,
    _wrong,
)
from precaudit.reports.sketches import sketch_report
from precaudit.schema.records.sketches import SketchRecord

N = 128


def parts(seed=0, *, shape=(4, 2, 8), steps=1, nan=0, n=N):
    """Return the parts of a sketch of so many steps; equal seeds have equal bits."""
    rng = np.random.default_rng(seed)
    rows, heads = shape[0], shape[1] if len(shape) > 2 else 1
    return {
        "rows": rng.standard_normal((steps, rows, 3)), "heads": rng.standard_normal((steps, heads, 3)),
        "hashes": rng.integers(0, 1 << 32, (steps, rows, 2), np.uint32),
        "size": np.abs(rng.standard_normal((steps, 2))) + 1, "counts": np.tile([nan, 0], (steps, 1)),
        "projections": rng.standard_normal((steps, n)),
    }  # fmt: skip


def run_of(values, *, shapes=None, layers=None, cases=("a",), calls=1, entry="call", tokens=(0,)):
    """Return a run that holds ``values[name]`` in each call, stacked over the layers that are recorded."""
    shapes = shapes or dict.fromkeys(values, (4, 2, 8))
    stacked = () if layers is None else (len(layers),)
    points = tuple(
        ProgramPoint(name=name, shape=shapes[name], stacked=stacked, dtype="float32", source="", scope="", primitive="")
        for name in values
    )
    record = ProgramRun(
        schema=3, id="", program="", code="", weights="", automatic=True, cases=cases, calls=calls, points=points,
        device="cpu", versions={}, command="", started="", layers=layers, sketch=N, entry=entry,
    )  # fmt: skip

    def tensors(_case, call, _kind):
        found = {f"{name}/{part}": x for name, of in values.items() for part, x in of.items()}
        return found | {"inputs/0": np.array([tokens[call % len(tokens)]])}

    one = SimpleNamespace(record=record, tensors=tensors)
    return SimpleNamespace(record=record, entries=(one,))


def one(x):
    """Return the first step of parts."""
    return {name: part[0] for name, part in x.items()}


def test_where_there_is_no_estimate_it_says_why():
    x, y = one(parts(0)), one(parts(1))
    assert _estimate(x, y)[1:] == (pytest.approx(1.96 / (2 * N) ** 0.5), "")
    far = np.linalg.norm(x["projections"] - y["projections"]) / y["size"][0]
    assert _estimate(x, y)[0] == pytest.approx(far)
    near = y | {"projections": y["projections"] * (1 + 1e-9)}
    for ours, theirs, why in (
        (one(parts(0, nan=1)), y, "it holds NaN or infinity"),
        (x, one(parts(1, nan=1)), "it holds NaN or infinity"),
        (x, y | {"size": np.zeros(2)}, "the reference is 0"),
        (one(parts(0, n=64)), y, "the runs have other numbers of projections"),
        ({k: v for k, v in x.items() if k != "projections"}, y, "no projections were kept (--sketch N)"),
        (near, y, "below 2e-6, which projections in float32 cannot show"),
    ):
        assert _estimate(ours, theirs) == (None, None, why)


def test_the_row_that_is_farthest_is_named():
    x = np.zeros((5, 3))
    y = x.copy()
    y[3, 1] = 2
    assert _farthest(x, y) == 3
    [found], _ = _pairs(run_of({"q": parts(0)}), run_of({"q": parts(1)}))
    assert (found.row, found.head) == tuple(_farthest(parts(0)[k][0], parts(1)[k][0]) for k in ("rows", "heads"))


def test_a_layer_is_compared_with_the_same_layer_of_the_other_run():
    """Of one run layer 1 alone is recorded, of the other layers 0 and 1."""
    both = parts(0, steps=2)
    second = {name: part[1:] for name, part in both.items()}
    alone, every = run_of({"q": second}, layers=(1,)), run_of({"q": both}, layers=(0, 1))
    [found], lacking = _pairs(alone, every)
    assert (found.layer, found.equal, lacking) == (1, True, ["some layers of q are in the second run alone"])
    first, found = _pairs(every, alone)[0]
    assert (first.unknown, first.largest[1], first.nonfinite[1]) == ("the other run lacks it", None, None)
    assert found.equal


def test_another_shape_is_not_compared():
    """Also where rows are as many: of other heads, and of another width."""
    ours = run_of({"q": parts(0)})
    for shape in ((4, 3, 8), (4, 2, 16), (5, 2, 8)):
        theirs = run_of({"q": parts(1, shape=shape)}, shapes={"q": shape})
        [found], _ = _pairs(ours, theirs)
        assert (found.equal, found.rel_l2, found.unknown) == (False, None, "the other run's has another shape")


def test_what_one_run_lacks_is_said_of_both():
    ours, theirs = run_of({"q": parts(0)}, cases=("a", "b"), calls=2), run_of({"q": parts(0), "v": parts(1)})
    found, lacking = _pairs(ours, theirs)
    assert len(found) == 1
    assert set(lacking) == {"b is in one run alone", "v is in the second run alone", "call has 2 and 1 calls"}
    assert "b is in one run alone" in _pairs(theirs, ours)[1]
    assert _pairs(ours, run_of({"q": parts(0)}, entry="decode")) == (
        [], ["call is in one run alone", "decode is in one run alone"]
    )  # fmt: skip


def test_after_other_tokens_nothing_is_estimated():
    """Call 1 was fed another token; call 2 reads what it left."""
    ours = run_of({"q": parts(0)}, calls=3, tokens=(7, 8, 9))
    found, _ = _pairs(ours, run_of({"q": parts(0)}, calls=3, tokens=(7, 5, 9)))
    assert [r.unknown for r in found] == ["", *["other tokens were fed"] * 2]


def test_a_cache_of_any_call_is_checked():
    rows = np.arange(1, 9, dtype=np.uint32).reshape(1, 4, 2)
    row = {"hashes": rows[:, 2:3]}
    good = run_of({"k": row, "k_cache": {"hashes": rows}}, calls=2)
    assert _state(good.entries[0]) == (2, [])
    lost = run_of({"k": {"hashes": rows[:, :1] + 90}, "k_cache": {"hashes": rows}})
    checked, [fault] = _state(lost.entries[0])
    assert (checked, fault.point, fault.why) == (1, "k_cache", "1 of 1 rows that were written are not in it")
    changing = run_of({"k": row, "k_cache": {"hashes": rows}}, calls=2)
    whole = changing.entries[0].tensors
    changing.entries[0].tensors = lambda case, call, kind: {
        name: x + 50 * (np.arange(4) < 2)[:, None].astype(np.uint32) * call if name == "k_cache/hashes" else x
        for name, x in whole(case, call, kind).items()
    }
    [fault] = _state(changing.entries[0])[1]
    assert (fault.call, fault.why) == (1, "2 of its rows changed, and 1 were written")


def test_a_row_that_nobody_wrote_is_told_where_the_written_one_was_there_before():
    rows = np.arange(8, dtype=np.uint32).reshape(4, 2)
    now = rows.copy()
    now[0] = 77
    assert _wrong(now, rows[2:3], rows) == "1 of its rows changed and were not written"


def record(point="q", *, layer=0, equal=False, rel=None, why="", nonfinite=(0, 0)):
    return SketchRecord(
        case="a", phase="call", call=0, layer=layer, point=point, equal=equal, rows=4, differing=0 if equal else 1,
        largest=(1.0, 1.0 if nonfinite[1] is not None else None), nonfinite=nonfinite, rel_l2=0.0 if equal else rel,
        within=0.12 if rel else None, unknown=why,
    )  # fmt: skip


def told(*records, caches=0, faults=(), lacking=()):
    report = sketch_report(SketchComparison(records, caches, faults, lacking, ()))
    return report.headline.mark, report.headline.text.removeprefix(f"{report.headline.mark} "), report.notes


same = record(equal=True)


def test_only_values_that_are_all_there_and_finite_are_equal():
    assert told(same, same)[:2] == ("✓", "all 2 values have the same bits.")
    assert told(same, lacking=("b is in one run alone",))[0] == "?"
    assert told()[:2] == ("?", "no value is in both runs.")
    mark, text, _ = told(same, record("v", equal=True, nonfinite=(3, 3)))
    assert (mark, text) == (
        "?", "all 2 values have the same bits, and 1 of them hold NaN or infinity: the first is v of layer 0."
    )  # fmt: skip


def test_what_is_not_finite_in_the_first_run_alone_is_a_fault():
    mark, text, notes = told(same, record("v", nonfinite=(3, 1), why="it holds NaN or infinity"))
    assert (mark, text) == ("✗", "v of layer 0: 3 elements are NaN or infinite, 1 in the other run.")
    assert notes == ("1 value has no estimate: it holds NaN or infinity",)
    assert told(record(nonfinite=(3, None), why="the other run lacks it"))[0] == "?"


def test_the_worst_value_heads_a_report():
    mark, text, _ = told(record("k", rel=1e-3), record("q", rel=0.5), record("v", rel=0.1), same)
    assert mark == "?"
    assert text.startswith("3 of 4 values differ in bits, q of layer 0 by 0.5 of its size;")
    unknown = record(why="no projections were kept (--sketch N)")
    assert "by an amount that has no estimate" in told(unknown, unknown)[1]


def test_caches_that_are_wrong_come_first():
    fault = StateFault("a", "decode call", 1, 0, "k_cache", "1 of 1 rows that were written are not in it")
    mark, text, notes = told(same, caches=3, faults=(fault,))
    assert (mark, text) == ("✗", "1 of 3 caches do not hold what was written.")
    assert notes[0] == "state: 2 of 3 caches hold the rows that were written"
    assert notes[1].startswith("state: k_cache of layer 0 (a, decode call 1): ")
    assert told(same, caches=9, faults=(fault,) * 7)[2][-1] == "state: 2 more caches do not hold them"
