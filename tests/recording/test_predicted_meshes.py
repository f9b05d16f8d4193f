"""The decoder cut over chips of a TPU that are not here: compiled for them, run on one CPU, judged."""

import re
import shutil

import msgspec
import numpy as np
import pytest

from precaudit.checks.lint.linting import LintedCalls, Lowering, lint_model
from precaudit.cli import run
from precaudit.diagnosis.diagnose import diagnose
from precaudit.errors import UserError
from precaudit.interpreters.tpu.target import parse_target
from precaudit.judging.gate import gate
from precaudit.recording.runs.reader import open_run
from precaudit.recording.tracing.repeat import repeat
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.reports.mesh import cost_text
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.meshes import MeshShape
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.devices import SplitSum
from precaudit.schema.selection import Selection
from precaudit.workflows.verbs import compare
from tests.helpers.tpus import needs_libtpu

SPLIT = [name for name, point in POINTS.items() if point.shares_terms]
PROMPTS = [Prompt(id="a", prompt="def f(x):")]
FOUR = {"device": "tpu-predicted:v5e:2x2", "mesh": "model=4"}


def recorded(folder, points="all", **how):
    select = Selection.parse(points=points, phases="prefill,decode")
    return trace(load("tiny", "bf16", **how), folder, PROMPTS, select, TraceOptions(decode_steps=2))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Tiny on four chips."""
    return recorded(tmp_path_factory.mktemp("chips") / "four", **FOUR).folder


def local_sizes(folder):
    return {(e.point, e.phase): e.rel_l2 for e in compare(folder).errors if e.kind == "local" and e.point in SPLIT}


@pytest.mark.turn  # 21 s
@needs_libtpu
def test_four_chips_add_bfloat16_parts_in_bfloat16_and_pass(four):
    record = open_run(four).record
    assert (record.device, record.device_count) == ("TPU v5e:2x2 (predicted)", 4)
    assert record.mesh == {"data": 1, "model": 4}
    for noted in record.neutrality:
        assert noted.split == dict.fromkeys(SPLIT, (SplitSum(parts=4, summed="bfloat16"),))
    compare(four)
    found = gate(four)
    assert found.exit_code == 0, [v.text for v in found.verdicts][:3]
    assert found.counts["pass"] > 200


@needs_libtpu
@pytest.mark.slow
def test_chips_that_are_not_here_give_the_same_bits_again(tmp_path):
    run = recorded(tmp_path / "run", ",".join(SPLIT), **FOUR)
    assert repeat(run, tmp_path / "again").differing == 0


@needs_libtpu
@pytest.mark.slow
def test_rounding_with_every_chip_costs_what_it_should(four, tmp_path):
    """Four parts rounded, and three sums of them, against one rounding."""
    alone = recorded(tmp_path / "one", ",".join(SPLIT), device="tpu-predicted:v5e").folder
    one, cut = local_sizes(alone), local_sizes(four)
    assert all(1.3 < cut[key] / one[key] < 2.6 for key in one), (one, cut)
    for cost in diagnose(four).costs:
        measured = np.mean([cut[key] / one[key] for key in one if key[0] == cost.point])
        assert cost.times == pytest.approx(measured, rel=0.15)
        assert (cost.wide, cost.bytes) == (pytest.approx(1, rel=1e-6), 2)
        text = cost_text(cost)
        assert "with every one of its 4 parts: 1." in text
        assert text.endswith("float32 partial sums: 1.00 ×, 2 × the bytes exchanged")
    shutil.copytree(four, tmp_path / "whole")
    record = open_run(four).record
    noted = tuple(msgspec.structs.replace(n, split={}) for n in record.neutrality)
    changed = msgspec.structs.replace(record, neutrality=noted)
    (tmp_path / "whole" / "run.json").write_bytes(msgspec.json.encode(changed))
    compare(tmp_path / "whole")
    failed = {v.point for v in gate(tmp_path / "whole").verdicts if v.status == "fail" and v.kind == "local"}
    assert failed >= set(SPLIT)


@needs_libtpu
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--device", "tpu-predicted:v5e:2x2", "--mesh", "data=2,model=4"), "v5e:2x2 has 4 chips, not 8"),
        (("--device", "tpu-predicted:v5e:2x2", "--mesh", "model=3"), "does not divide heads"),
        (("--device", "tpu-emulated:v5e", "--mesh", "model=2"), "leave --mesh out"),
        (
            ("--device", "tpu-predicted:v5e:3x5x7", "--mesh", "model=2"),
            "precaudit: v5e:3x5x7: libtpu has no such topology",
        ),
        (("--device", "tpu-predicted:v5e:9x9"), "precaudit: v5e:9x9: libtpu has no such topology"),
    ],
)
def test_a_mesh_that_chips_do_not_have_is_told_in_one_line(given, why, tmp_path, capfd):
    assert run(["trace", "tiny", *given, "-o", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert why in said
    assert re.fullmatch(r"precaudit: .*\n", said)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.turn  # 4 s
@needs_libtpu
def test_lint_lists_what_chips_exchange():
    found = lint_model(
        "tiny",
        load_policy("bf16"),
        Lowering(parse_target("v5e:2x2"), mesh=MeshShape(model=4)),
        LintedCalls(("decode",)),
    )
    adding = {x.point: x for x in found.exchanged if x.kind == "all-reduce"}
    for point in SPLIT:
        x = adding[point]
        assert (x.chips, x.format, x.times, x.bytes, x.rounds) == (4, "bf16", 5, 5 * 128 * 2, True)
    assert not adding["resid_in"].rounds  # rows of the table: one chip has each
    assert (
        lint_model("tiny", load_policy("bf16"), Lowering(parse_target("v5e:2x2")), LintedCalls(("decode",))).exchanged
        == ()
    )
    with pytest.raises(UserError, match="goes with --tpu"):
        lint_model("tiny", load_policy("bf16"), Lowering(mesh=MeshShape(model=4)))
