"""One weight that is NaN or infinite, through every command and report: said as what it is, never a pass or a crash."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from precaudit.cli import run
from precaudit.judging.gate import gate
from precaudit.judging.rules import judge_pair
from precaudit.judging.verdicts import Verdict
from precaudit.recording.tracing.subject import load
from precaudit.references.comparison.prefill_decode import _pair
from precaudit.reports.judgement import verdict_message
from precaudit.schema.records.runs import StepRecord

WEIGHT = "model.layers.2.self_attn.v_proj.weight"


@pytest.fixture(scope="module", params=["nan", "inf"])
def broken(request, tmp_path_factory):
    """The bundled model with one such weight, and a run of it at every point."""
    folder = tmp_path_factory.mktemp(request.param)
    model = Path(shutil.copytree(load("tiny", device="cpu").checkpoint.path, folder / "model"))
    tensors = {name: np.array(x) for name, x in load_file(model / "model.safetensors").items()}
    tensors[WEIGHT][3, 5] = ml_dtypes.bfloat16(request.param)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    arguments = [
        "--text",
        "def f(x):\n    return x",
        "--points",
        "all",
        "--decode-steps",
        "1",
        "-o",
        str(folder / "run"),
    ]
    assert run(["trace", str(model), *arguments]) == 0
    return model, folder / "run", folder


def said(capfd, *arguments):
    code = run([str(a) for a in arguments])
    out, err = capfd.readouterr()
    assert code != 70, err
    assert "Traceback" not in out + err
    for word in ("explains nan", "explains -inf", "explains inf"):
        assert word not in out + err, word
    return code, " ".join((out + err).split())


@pytest.mark.turn  # 13 s
def test_every_command_says_what_is_not_finite(broken, capfd):
    model, traced, folder = broken
    code, text = said(capfd, "compare", traced)
    assert (code, (traced / "report.md").is_file()) == (0, True)
    assert "note: weights: tensor 'model.layers.2.self_attn.v_proj.weight': 1 value is NaN or infinite" in text
    assert "NaN ×" not in text
    assert "top-1 equal at 0 of 3 positions; 3 have none: logits are NaN or infinite." in text
    assert "records hold NaN or infinities; first: layer 2 v" in text
    assert said(capfd, "report", traced)[0] == said(capfd, "report", traced, "-v")[0] == 0
    assert said(capfd, "compare", traced, "--json")[0] == 0
    code, text = said(capfd, "gate", traced, "--junit", folder / "g.xml", "--markdown", folder / "g.md", "--github")
    assert code == 1
    assert "elements are NaN or infinite" in text
    verdicts = gate(traced).verdicts
    assert {v.status for v in verdicts if "there is no top-1" in v.text} == {"input suspect"}
    told = [verdict_message(v) for v in verdicts if v.metric == "nonfinite"]
    assert told
    for text in told:  # a finite element is none of those that are not
        assert "worst element" not in text or re.search(r"worst element .*: (NaN|-?inf)", text)
    assert (folder / "g.xml").is_file()
    assert (folder / "g.md").is_file()
    code, text = said(capfd, "diagnose", traced)
    assert code == 1
    assert "layer 2" in text
    assert said(capfd, "diagnose", traced, "-v")[0] == 1
    code, text = said(capfd, "baseline", traced, "-o", folder / "b.jsonl")
    assert (code, (folder / "b.jsonl").exists()) == (2, False)
    assert "not finite" in text
    assert said(capfd, "models", "--check", model)[0] == 1
    json.loads((traced / "compare.json").read_text())


def test_a_row_without_top_1_is_no_match_of_anything():
    """Its first index is a token's all the same: the reference's too, here."""
    logits = np.asarray([3.0, 1.0, 0.0])
    row = StepRecord(prompt="p", phase="prefill", step=0, position=4, token=1, top_ids=(0, 1, 2),
                     top_logits=(3.0, 1.0, 0.0), gap=2.0, logsumexp=3.2)  # fmt: skip
    recorded, truth = (
        SimpleNamespace(index={}),
        SimpleNamespace(logits=lambda *_: logits, sigma=1.0),
    )
    for top in ((3.0, 1.0, 0.0), ("nan", 3.0, 1.0), ("inf", 3.0, 1.0)):
        other = msgspec.structs.replace(row, phase="decode", top_logits=top, gap="nan" if top[0] == "nan" else top[0])
        pair = _pair(recorded, "prefill", row, other, truth)
        sound = top[0] == 3.0
        assert (pair.match, pair.f64_match, bool(pair.near_tie)) == (sound, sound, False)
        assert judge_pair(pair).status == ("pass" if sound else "fail")


def test_of_a_tensor_of_nan_alone_nothing_is_said_to_be_explained():
    known = {"status": "nonfinite", "kind": "local", "point": "x", "policy": "equations", "explained": 1.0}
    bad = Verdict(**known, metric="nonfinite", value=8, rel_l2=0.0)
    assert "explains" not in verdict_message(bad)
    assert "8 elements are NaN or infinite" in verdict_message(bad)
    assert "explains 100 % of it" in verdict_message(msgspec.structs.replace(bad, rel_l2=1e-3))
