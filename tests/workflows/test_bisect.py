"""``precaudit bisect`` from the command line: planted answers, outputs, ends that are none, Ctrl-C and resume."""

import json
import shlex
import sys

import pytest

from precaudit.cli import run
from precaudit.diagnosis.bisection import policies
from precaudit.schema.policies import load_policy
from tests.helpers.clusters import running_cluster

TEXT = ["--text", "def f(x):", "--decode-steps", "1"]
MANY = {
    "activations": "float32", "residual": "float32", "scores": "float32", "probs": "float32", "attn_out": "float32",
    "mlp": "float32", "kv_cache": "float32", "matmul": "highest", "norm": "bfloat16", "rope": "bfloat16",
    "softmax": "bfloat16", "logits": "bfloat16", "excess_precision": "off", "decode_attention": "float32",
    "embed_factor": "exact", "embeddings": "as-stored", "layers": "unrolled", "fused": "qkv", "mask": "window:8",
    "weights": "float16",
}  # fmt: skip


@pytest.fixture
def twenty(tmp_path):
    """A policy with all keys of another, twenty of them, but for two that kernels decide."""
    path = tmp_path / "other.toml"
    path.write_text("".join(f'{key} = "{x}"\n' for key, x in MANY.items()))
    assert len(policies.differing_keys(load_policy("bf16"), load_policy(str(path)))) == 20
    return path


def bisect(tmp_path, *given, by="policy"):
    return run(["bisect", "tiny", "--by", by, "-o", str(tmp_path / "out"), *given])


def found_in(tmp_path):
    return json.loads((tmp_path / "out" / "bisect.json").read_text())


def command(tmp_path, body):
    """Return a command that answers by a Python expression over ``changes``; 1 where it is true."""
    path = tmp_path / "answer.py"
    path.write_text(f"import os\nchanges = set(os.environ['PRECAUDIT_CHANGES'].split())\nraise SystemExit({body})\n")
    return shlex.join([sys.executable, str(path)])


def test_one_key_of_twenty_is_found(tmp_path, twenty, capsys):
    given = ["--good", "bf16", "--bad", str(twenty), "--test-command", command(tmp_path, "int('rope' in changes)")]
    page = tmp_path / "page.md"
    assert bisect(tmp_path, *given, "--markdown", str(page)) == 0
    said = capsys.readouterr()
    assert "✓ rope alone, of 20 that differ, breaks" in said.out
    assert "no smaller set" not in said.out  # than of one
    assert "rope: bad" in said.err
    found = found_in(tmp_path)
    assert (found["sets"], found["proof"], found["trials"]) == ([["rope"]], "smallest", 22)
    assert "| rope" in page.read_text()
    trials = [json.loads(x) for x in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert [t["kind"] for t in trials] == ["asked"] + ["trial"] * 22
    assert all(t["answers"] == [t["answer"]] * 2 for t in trials[1:])  # a command has no figure to be near to


def test_two_keys_that_only_together_break_it_are_found(tmp_path, twenty, capsys):
    body = "int({'rope', 'kv_cache'} <= changes)"
    given = ["--good", "bf16", "--bad", str(twenty), "--test-command", command(tmp_path, body)]
    assert bisect(tmp_path, *given, "--json") == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["sets"], first["proof"]) == ([["rope", "kv_cache"]], "smallest")


def test_the_cure_is_the_set_that_has_to_go_back(tmp_path, twenty, capsys):
    body = "int(bool({'rope', 'kv_cache'} & changes))"
    given = ["--good", "bf16", "--bad", str(twenty), "--test-command", command(tmp_path, body), "--find", "cure"]
    assert bisect(tmp_path, *given) == 0
    assert "rope, kv_cache together, 2 of 20 that differ, mend" in (said := capsys.readouterr().out)
    assert "; no smaller set does." in said


@pytest.mark.turn  # 7 s
def test_a_key_that_costs_precision_is_found_by_kl(tmp_path, capsys):
    path = tmp_path / "other.toml"
    text = {**load_policy("fp32-highest").settings(), "scores": "bfloat16", "excess_precision": "off"}
    path.write_text("".join(f'{key} = "{x}"\n' for key, x in text.items()))
    given = ["--good", "fp32-highest", "--bad", str(path), "--test", "kl<1e-9"]
    assert bisect(tmp_path, *given, *TEXT[:2], "--decode-steps", "0", "--against", "good") == 0
    assert "✓ scores alone, of 2 that differ, breaks kl<1e-9" in capsys.readouterr().out


def test_commands_at_once_leave_the_records_of_one_after_another(tmp_path, twenty, capsys):
    both = 'for key in rope kv_cache; do echo "$PRECAUDIT_CHANGES" | grep -qx $key || exit 0; done; exit 1'
    given = ["--good", "bf16", "--bad", str(twenty), "--test-command", both]
    kept = []
    for jobs in ("1", "3"):
        assert bisect(tmp_path, *given, "--jobs", jobs, "--force") == 0
        assert "rope, kv_cache together" in capsys.readouterr().out
        lines = (tmp_path / "out" / "trials.jsonl").read_text().splitlines()[1:]
        kept.append([{k: x for k, x in json.loads(line).items() if k != "seconds"} for line in lines])
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_policies_in_processes_leave_the_records_of_one(tmp_path):
    path = tmp_path / "other.toml"
    text = {**load_policy("fp32-highest").settings(), "scores": "bfloat16", "excess_precision": "off"}
    path.write_text("".join(f'{key} = "{x}"\n' for key, x in text.items()))
    given = ["--good", "fp32-highest", "--bad", str(path), "--test", "kl<1e-9", *TEXT[:2], "--decode-steps", "0"]
    kept = []
    for jobs in ("1", "2"):
        assert bisect(tmp_path, *given, "--against", "good", "--jobs", jobs, "--force") == 0
        lines = (tmp_path / "out" / "trials.jsonl").read_text().splitlines()[1:]
        kept.append([{k: x for k, x in json.loads(line).items() if k != "seconds"} for line in lines])
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_policies_on_a_cluster_leave_the_records_of_one_process(tmp_path):
    pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install -e '.[cluster]'")
    given = ["--good", "fp32-highest", "--bad", "bf16", "--test", "kl<1e-5", *TEXT[:2], "--decode-steps", "0"]
    kept = []
    with running_cluster(2, tmp_path) as (address, *_):
        for where in ((), ("--scheduler", address)):
            assert bisect(tmp_path, *given, "--most", "0", *where, "--force") == 0
            lines = (tmp_path / "out" / "trials.jsonl").read_text().splitlines()[1:]
            kept.append([{k: x for k, x in json.loads(line).items() if k != "seconds"} for line in lines])
    assert kept[0] == kept[1]


def test_trials_on_this_machine_go_to_no_cluster(tmp_path, capsys):
    given = ["--raise", "float32", "--test", "kl<1", "--scheduler", "tcp://127.0.0.1:1", *TEXT]
    assert bisect(tmp_path, *given, by="layers") == 2
    assert "leave out --scheduler" in capsys.readouterr().err


def test_layers_are_tried_one_after_another(tmp_path, capsys):
    assert bisect(tmp_path, "--raise", "float32", "--test", "kl<1", "--jobs", "2", *TEXT, by="layers") == 2
    assert "one after another" in capsys.readouterr().err


@pytest.mark.slow
def test_the_keys_of_bf16_that_break_a_limit_together_are_found(tmp_path, capsys):
    given = ["--good", "fp32-highest", "--bad", "bf16", "--test", "kl<1e-5"]
    assert bisect(tmp_path, *given, *TEXT) == 0
    assert "activations" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_the_layer_that_has_to_be_float32_is_found(tmp_path, capsys):
    assert bisect(tmp_path, "--raise", "float32", "--test", "kl<1e-5", *TEXT, by="layers") == 0
    assert "✓ layer 0 alone, of 8 that differ, mends kl<1e-5" in capsys.readouterr().out


def test_a_that_is_bad_and_b_that_is_good_are_wrong_use(tmp_path, twenty, capsys):
    ends = ["--good", "bf16", "--bad", str(twenty), "--test-command"]
    assert bisect(tmp_path, *ends, "exit 1") == 2
    assert "A (bf16) is bad already by exit 1" in capsys.readouterr().err
    assert bisect(tmp_path, *ends, "exit 0", "--force") == 2
    assert "is good already by exit 0" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "says"), [(125, "cannot decide"), (127, "ended with 127")])
def test_an_end_that_cannot_be_told_is_3(tmp_path, twenty, capsys, code, says):
    assert bisect(tmp_path, "--good", "bf16", "--bad", str(twenty), "--test-command", f"exit {code}") == 3
    assert says in capsys.readouterr().err


def test_a_command_that_answers_by_chance_is_3(tmp_path, twenty, capsys):
    flag = tmp_path / "flag"
    coin = f"test -e {flag} && exit 1; touch {flag}"
    assert bisect(tmp_path, "--good", "bf16", "--bad", str(twenty), "--test-command", coin) == 3
    assert "A answered good, then bad: the test is not stable" in capsys.readouterr().err


def test_what_ctrl_c_broke_off_goes_on(tmp_path, twenty, capsys, monkeypatch):
    from precaudit.diagnosis.bisection.commands import CommandTrials

    given = ["--good", "bf16", "--bad", str(twenty), "--test-command", command(tmp_path, "int('rope' in changes)")]
    measure, made = CommandTrials.measure, []

    def once(self, changes, folder):
        made.append(changes)
        if len(made) == 9:
            raise KeyboardInterrupt
        return measure(self, changes, folder)

    monkeypatch.setattr(CommandTrials, "measure", once)
    assert bisect(tmp_path, *given) == 130
    assert "4 trials are kept" in capsys.readouterr().err
    assert bisect(tmp_path, *given) == 0
    assert "22, 18 of them ran now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--good", "bf16", "--bad", "bf16", "--test", "bits"], "are the same: nothing to bisect"),
        (["--good", "bf16", "--test", "bits"], "give both policies"),
        (["--good", "bf16", "--bad", "fp32"], "one of them"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl>1"], "is no test"),
        (["--good", "bf16", "--bad", "sdpa.toml", "--test", "bits"], "unknown policy 'sdpa.toml'"),
        (["--good", "bf16", "--bad", "fp23", "--test", "bits"], "unknown policy 'fp23'"),
        (["--good", "bf16", "--bad", "int8-weights", "--test", "kl<1"], "--against good"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<2x", "--against", "good"], "no error against itself"),
        (["--good", "bf16", "--bad", "fp32", "--test", "bits", "--against", "fp64"], "bits are compared with A's"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--prompt", "nope"], "unknown prompt 'nope'"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--text", " "], "--text is empty"),
        (["--good", "bf16", "--bad", "fp32", "--test-command", ""], "--test-command is empty"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--prompts", "no.jsonl"], "no prompts file at no.jsonl"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--decode-steps", "-1"], "'--decode-steps'"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--most", "-1"], "'--most'"),
        (["--good", "bf16", "--bad", "fp32", "--test", "kl<1", "--between", "1"], "takes no --between"),
    ],
)
def test_wrong_use_is_one_line_and_2(tmp_path, capsys, given, says):
    assert bisect(tmp_path, *given) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_line_and_2(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    assert bisect(tmp_path, "--good", "bf16", "--bad", "fp32", "--test-command", "true") == 2
    assert capsys.readouterr().err == f"precaudit: {tmp_path / 'out'} cannot be made: File exists\n"
    assert (tmp_path / "out").read_text() == "a file"


def test_what_an_earlier_bisection_found_goes_where_it_is_replaced(tmp_path, twenty):
    ends = ["--good", "bf16", "--bad", str(twenty), "--test-command"]
    assert bisect(tmp_path, *ends, command(tmp_path, "int('rope' in changes)")) == 0
    assert bisect(tmp_path, *ends, "exit 1", "--force") == 2
    assert not (tmp_path / "out" / "bisect.json").exists()


@pytest.mark.turn  # 4 s
def test_bits_by_policy_are_held_to_a(tmp_path, capsys):
    path = tmp_path / "other.toml"
    text = {**load_policy("bf16").settings(), "embed_factor": "exact"}
    path.write_text("".join(f'{key} = "{x}"\n' for key, x in text.items()))
    given = ["--good", "bf16", "--bad", str(path), "--test", "bits", *TEXT[:2], "--decode-steps", "0"]
    assert bisect(tmp_path, *given) == 2
    assert "is good already by bits, differing 0" in capsys.readouterr().err
    asked = json.loads((tmp_path / "out" / "trials.jsonl").read_text().splitlines()[0])
    assert asked["against"] == "good"
    assert not list((tmp_path / "out").rglob("errors.jsonl"))


@pytest.mark.slow
def test_a_verdict_is_that_of_each_policy_and_made_twice(tmp_path, capsys):
    given = ["--good", "fp32", "--bad", "bf16", "--test", "verdict", "--points", "logits"]
    assert bisect(tmp_path, *given, *TEXT) == 2
    assert "B (bf16) is good already by verdict" in capsys.readouterr().err
    trials = [json.loads(x) for x in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()[1:]]
    assert [(t["answers"], t["figures"]["verdict"]) for t in trials] == [(["good", "good"], 0.0)] * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--test", "kl<1"], "give --raise float32"),
        (["--test", "verdict", "--raise", "float32"], "one policy for all layers"),
        (["--test", "forward@q<1", "--raise", "float32"], "q lies inside layers"),
    ],
)
def test_layers_refuse_what_they_cannot_show(tmp_path, capsys, given, says):
    assert bisect(tmp_path, *given, by="layers") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("by", ["policy --good bf16 --bad fp32", "flags --good= --bad=A=1", "layers --raise float32"])
def test_a_subject_that_is_not_there_is_told_at_once(tmp_path, capsys, by):
    assert run(["bisect", "nowhere", "-o", str(tmp_path / "out"), "--test", "kl<1", "--by", *by.split()]) == 2
    assert "no model at 'nowhere'" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_told_at_once(tmp_path, capsys):
    given = ["--by", "flags", "--good", "", "--bad", "A=1", "--test", "bits", "-o", str(tmp_path / "out")]
    assert run(["bisect", str(tmp_path / "mine.py:program"), *given]) == 2
    assert "no such file" in capsys.readouterr().err
