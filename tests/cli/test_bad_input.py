"""Wrong use and bad input: exit code 2, a line or two that say what and where, no traceback, nothing half-written."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

import precaudit
from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.reader import open_run
from precaudit.recording.tracing.session import Session
from precaudit.references import cache
from tests.helpers.paths import CASES

TINY = Path(precaudit.__file__).parent / "bundled" / "tiny"
TEXT = ("--text", "def f(x):")
WHOLE = ("tiny", *TEXT, "--decode-steps", "2", "--device", "cpu")
Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
Q_NORM, INDEX = "model.layers.0.self_attn.q_norm.weight", "model.safetensors.index.json"
WEIGHTS, PREFILL = "model.safetensors", "tensors/text.prefill.0.safetensors"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """One whole small run, copied by the tests that alter it."""
    folder = tmp_path_factory.mktemp("full") / "whole"
    assert run(["trace", *WHOLE, "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def altered(full, tmp_path):
    return Path(shutil.copytree(full, tmp_path / "run"))


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def refuses(full, tmp_path, monkeypatch, capfd):  # noqa: ARG001 - JAX is loaded before time and memory are measured
    """Return the check that a command is refused: its code, its short message, and every file as it was."""
    monkeypatch.chdir(tmp_path)

    def check(*arguments, words, seconds=30):
        before = files(tmp_path)
        capfd.readouterr()
        with within(seconds):
            code = run([str(a) for a in arguments])
        out, err = capfd.readouterr()
        said = err.splitlines()
        assert code == 2, err
        assert "Traceback" not in out + err
        assert not out
        assert 1 <= len(said) <= 2, err
        assert said[-1].startswith("precaudit: ")
        assert len(said[-1]) <= 500
        assert not [word for word in words if word not in said[-1]], said[-1]
        assert files(tmp_path) == before

    return check


@contextmanager
def within(seconds, megabytes=500):
    """Fail when the body takes longer, or grows the process by more."""

    def stop(_signum, _frame):
        pytest.fail(f"still busy after {seconds} s")  # no Exception: nothing under test swallows it

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again: one inside a gc callback is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes << 10


def files(folder):
    """Everything below a folder: names, and contents of files."""
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def quick(subject, *options):
    """Return a quick trace's arguments; later options replace earlier ones."""
    text = () if {"--prompts", "--tokens-from"} & set(options) else TEXT
    short = ("--phases", "prefill", "--layers", "0", "--points", "q", "--device", "cpu")
    return ["trace", str(subject), *short, *text, "-o", "out", *map(str, options)]


def local(folder):
    """The local records of a comparison."""
    found = [json.loads(line) for line in (folder / "errors.jsonl").read_text().splitlines()]
    return [e for e in found if e["kind"] == "local"]


def spoil(path, change):
    """Replace a file's bytes (a new file has none); None deletes it."""
    data = change(path.read_bytes() if path.is_file() else b"")
    path.unlink() if data is None else path.write_bytes(data)


def table(edit):
    """Return the change of bytes that edits a JSON table."""

    def change(data):
        raw = json.loads(data)
        edit(raw)
        return json.dumps(raw).encode()

    return change


def header_of(data):
    """Return (header, offset of the data) of safetensors bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def laid(edit):
    """Return a change of the tensors {name: (dtype, shape, bytes)} of a safetensors file, one behind the other."""

    def change(data):
        raw, start = header_of(data)
        tensors = {
            name: (t["dtype"], t["shape"], data[slice(*(start + n for n in t["data_offsets"]))])
            for name, t in raw.items() if name != "__metadata__"
        }  # fmt: skip
        edit(tensors)
        made, body = {}, b""
        for name, (dtype, shape, held) in tensors.items():
            made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(held)]}
            body += held
        text = json.dumps(made).encode()
        return len(text).to_bytes(8, "little") + text + body

    return change


def patched(data, at, change=None):
    """Replace bytes; without any, flip a bit."""
    at %= len(data)
    change = change or bytes([data[at] ^ 1])
    return data[:at] + change + data[at + len(change) :]


# Each table: what is wrong, how, and the words the message must have.
OPTIONS = [
    (["--layers", "99"], ["layer 99", "out of range", "5"]),
    (["--layers", "abc"], ["layer", "'abc'"]),
    (["--points", "atn_out"], ["unknown point", "'atn_out'", "did you mean 'attn_out'"]),
    (["--phases", "prefil"], ["unknown phase", "'prefil'", "did you mean 'prefill'"]),
    (["--policy", "bf61"], ["unknown policy", "'bf61'", "did you mean 'bf16'"]),
    (["--points", "sttn_out"], ["unknown point", "'sttn_out'", "did you mean 'attn_out'"]),
    (["--policy", "nope"], ["unknown policy 'nope': no .toml file of that name; known: bf16, "]),
    (["--set", "score=float32"], ["unknown policy key", "'score'", "did you mean 'scores'"]),
    (["--set", "scores=float33"], ["unknown number format", "'float33'", "did you mean 'float32'"]),
    (["--set", "scores"], ["--set", "'scores'", "KEY=VALUE"]),
    (["--set", "attention=sdpb"], ["attention", "'sdpb'", "did you mean 'sdpa'"]),
    (["--set", "attention=sdpa", "--set", "softmax=bf16"], ["sdpa keeps softmax in float32", "attention = naive"]),
    (["--set", "attention=flash", "--points", "q,probs"], ["--points probs", "attention = flash", "attention=naive"]),
    (["--set", "matmul=BF16_BF16_F32"], ["matmul", "BF16_BF16_F32", "cpu", "not honoured"]),
    (["--text", "  "], ["--text", "empty"]),
    (["--text", "a " * 4096], ["longer", "context", "4096"]),
    (["--phases", "decode", "--decode-steps", "4096"], ["longer", "context", "4096"]),
    (["--prompt", "txt"], ["unknown prompt", "'txt'", "did you mean 'text'"]),
    ([*TEXT, "--prompts", "p.jsonl"], ["--text", "--prompts", "not both"]),
    (["--prompts", "nowhere.jsonl"], ["no prompts file", "nowhere.jsonl"]),
    (["--tokens-from", str(TINY)], [str(TINY), "no run", "run.json"]),
]
PROMPTS = [
    (b"Hello\n", ["p.jsonl:1", "JSON"]),
    (b'{"id":"a","prompt":"\xff\xfe"}\n', ["p.jsonl:1"]),
    (b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n', ["p.jsonl:2", "'a'", "twice"]),
    (b'{"id":"a"}\n', ["p.jsonl:1", "'a'", "exactly one"]),
    (b'{"id":"a","promt":"x"}\n', ["p.jsonl:1", "promt"]),
    (b'{"id":"a","tokens":[1,260]}\n', ["'a'", "token id 260", "position 1", "vocabulary of 260"]),
    (b'{"id":"a","tokens":[-1]}\n', ["'a'", "token id -1", "position 0", "vocabulary"]),
    (b'{"id":"a","tokens":[' + b"1," * 4096 + b"1]}", ["'a'", "4097", "longer", "context of 4096"]),
]


DRAWS = [
    (["--batch", "0"], ["--batch 0", "at least 1"]),
    (["--new-tokens", "0"], ["--new-tokens 0", "at least 1"]),
    (["--n", "0"], ["--n 0", "at least 1"]),
    (["--rounds", "0"], ["--rounds 0", "at least 1"]),
    (["--temperature", "-1"], ["--temperature -1", "greedy"]),
    (["--temperature", "nan"], ["--temperature NaN"]),
    (["--top-k", "0"], ["--top-k 0", "at least 1"]),
    (["--top-p", "1.5"], ["--top-p 1.5", "at most 1"]),
    (["--seed", "-1"], ["--seed -1"]),
    (["--policy", "bf16,bf61"], ["unknown policy", "'bf61'", "did you mean 'bf16'"]),
    (["--policy", "bf16,bf16"], ["--policy", "bf16", "twice"]),
    (["--trainer-policy", "bf61"], ["unknown policy", "'bf61'"]),
    (["--trainer", "nowhere"], ["no model", "nowhere"]),
    (["--loops", "for"], ["--loops", "'for'", "python, while"]),
    (["--loops", "while,while"], ["--loops", "python, while or both"]),
    (["--end-tokens", "2,260"], ["--end-tokens", "260", "vocabulary of 260"]),
    (["--end-tokens", "two"], ["--end-tokens", "two", "token ids"]),
    (["--new-tokens", "4096"], ["'a'", "4096 decode steps", "longer", "context of 4096"]),
    (["--prompts", "nowhere.jsonl"], ["no prompts file", "nowhere.jsonl"]),
    (["--answers", "nowhere.jsonl"], ["--answers or --prompts"]),
    (["--fail-above", "k1=1"], ["--fail-above", "'k1'"]),
    (
        ["--fail-below", "answers_difference=0"],
        ["=0", "--answers FILE", "two policies, --policy A,B"],
    ),
    (["--fail-below", "answers_difference=-5"], ["answers_difference=-5", "share", "-0.02"]),
    (["--from", "p.jsonl"], ["--from", "leave out --prompts"]),
]


def fields(**changes):
    return table(lambda raw: raw.update(changes))


def header(edit):
    def change(data):
        _, start = header_of(data)
        text = table(edit)(data[8:start])
        return len(text).to_bytes(8, "little") + text + data[start:]

    return change


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
FAR, EXTRA = 10**9, {Q_NORM: {"dtype": "BF16", "shape": [32], "data_offsets": [0, 64]}}
OWN = {Q_NORM: ("BF16", [32], bytes(64))}


def spread(t):
    """Leave 2 bytes between the last tensor and the one before, which are of no tensor."""
    last = max(t, key=lambda name: t[name]["data_offsets"])
    t[last]["data_offsets"] = [n + 2 for n in t[last]["data_offsets"]]


MODELS = {
    "no config": ("config.json", lambda _: None, ["config.json"]),
    "architecture": ("config.json", fields(model_type="gpt2"), ["not supported", "'gpt2'", "gemma2, gemma3_text"]),
    "scaled RoPE": ("config.json", fields(rope_scaling=LLAMA3), ["rope_scaling", "llama3"]),
    "scaled RoPE, new style": ("config.json", fields(rope_parameters=LLAMA3), ["rope_parameters", "llama3"]),
    "sliding window": ("config.json", fields(sliding_window=128), ["sliding_window", "128"]),
    "unknown field": ("config.json", fields(attn_logit_softcapping=30.0), ["'attn_logit_softcapping'", "30.0"]),
    "wrong kind": ("config.json", fields(hidden_size="wide"), ["hidden_size", "not a whole number", "wide"]),
    "no layers": ("config.json", fields(num_hidden_layers=0), ["layers", "at least 1"]),
    "too many layers": ("config.json", fields(num_hidden_layers=10**9), ["layers"]),
    "truncated": (WEIGHTS, lambda data: data[:-1000], ["model.safetensors", "truncated"]),
    "huge header": (WEIGHTS, lambda data: struct.pack("<Q", 2**60) + data[8:], ["model.safetensors", str(2**60)]),
    "header not JSON": (WEIGHTS, lambda data: patched(data, 8, b"x"), ["model.safetensors", "header", "not JSON"]),
    "deep header": (WEIGHTS, lambda _: struct.pack("<Q", 10**6) + b"[" * 10**6, ["header", "not JSON"]),
    "offsets outside": (WEIGHTS, header(lambda t: t[NORM].update(data_offsets=[FAR, FAR + 256])), [NORM, str(FAR)]),
    "shape against config": (WEIGHTS, header(lambda t: t[NORM].update(shape=[64, 2])), [NORM, "[64, 2]", "[128]"]),
    "missing tensor": (WEIGHTS, laid(lambda t: t.pop(Q_PROJ)), [Q_PROJ, "missing"]),
    "extra tensor": (WEIGHTS, laid(lambda t: t.update(OWN)), [Q_NORM, "not part of", "llama"]),
    "overlapping tensors": (WEIGHTS, header(lambda t: t.update(EXTRA)), [WEIGHTS, Q_NORM, "overlap at byte 0"]),
    "bytes of no tensor": (
        WEIGHTS,
        header(lambda t: t.pop(Q_PROJ)),
        [WEIGHTS, "before tensor", "of no tensor"],
    ),
    "a gap": (WEIGHTS, lambda data: header(spread)(data) + b"00", [WEIGHTS, "of no tensor"]),
    "bytes behind": (WEIGHTS, lambda data: data + b"00", [WEIGHTS, "2 bytes behind the last tensor"]),
    "index outside": (INDEX, lambda _: b'{"weight_map":{"a":"../other.safetensors"}}', ["'../other.saf", "index"]),
    "index at the root": (INDEX, lambda _: b'{"weight_map":{"a":"/etc/hostname"}}', ["'/etc/hostname'", "index"]),
}
GGUF, FIELD, TENSOR = b"GGUF" + struct.pack("<I", 3), struct.pack("<QQQ", 0, 1, 1), struct.pack("<QQQ", 1, 0, 1)
GGUFS = {
    **{f"the first {n} bytes": lambda sound, n=n: sound[:n] for n in (0, 3, 23, 60, -1000, -8)},
    "random bytes": lambda _: random.Random(0).randbytes(10_000),
    "huge counts": lambda _: GGUF + struct.pack("<QQ", 2**60, 2**60),
    "huge tensor count": lambda _: GGUF + struct.pack("<QQ", 2**60, 0),
    "huge string": lambda _: GGUF + FIELD + b"a" + struct.pack("<IQ", 8, 2**60),
    "huge array": lambda _: GGUF + FIELD + b"a" + struct.pack("<IIQ", 9, 0, 2**60),
    "huge tensor": lambda _: GGUF + TENSOR + b"a" + struct.pack("<IQIQ", 1, 2**60, 0, 0),
}


def attn_out(data):
    """Change one byte inside the tensor 2.attn_out."""
    header, start = header_of(data)
    return patched(data, start + header["2.attn_out"]["data_offsets"][0] + 5)


RUNS = {
    "newer schema": ("run.json", fields(schema=99), ["run.json", "schema 99", "newer", "upgrade"]),
    "schema is no number": ("run.json", fields(schema="one"), ["run.json", "not a run manifest"]),
    "binary": ("run.json", lambda _: b"\x00\xff garbage", ["run.json", "not a run manifest"]),
    "deep": ("run.json", lambda _: b"[" * 10**5, ["run.json", "not a run manifest"]),
    "nothing but schema": ("run.json", lambda _: b'{"schema": 1}', ["run.json", "missing required field"]),
    "policy lacks a key": ("run.json", table(lambda r: r["policy"].pop("scores")), ["run.json", "scores"]),
    "policy's format": ("run.json", table(lambda r: r["policy"].update(scores="float33")), ["run.json", "float33"]),
    "config lacks layers": ("run.json", table(lambda r: r["model"]["config"].pop("layers")), ["run.json", "layers"]),
    "config's kind": ("run.json", table(lambda r: r["model"]["config"].update(width="wide")), ["run.json", "width"]),
    "unknown point": ("run.json", table(lambda r: r["requested"].update(points=["qq"])), ["run.json", "qq"]),
    "no prompt asked for": ("run.json", table(lambda r: r["requested"].update(prompts=[])), ["run.json", "'text'"]),
    "a tensor's byte": (PREFILL, attn_out, [PREFILL, "'2.attn_out'", "altered"]),
    "tensor file cut": (PREFILL, lambda data: data[:-1], [PREFILL, "truncated"]),
    "tensor file gone": (PREFILL, lambda _: None, [PREFILL, "missing"]),
    "token id": ("prompts.jsonl", lambda data: data.replace(b":[100,", b":[101,"), ["prompts.jsonl", "altered"]),
    "step": ("steps.jsonl", lambda data: data.replace(b":9,", b":8,", 1), ["steps.jsonl", "altered"]),
}


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda x: " ".join(x)[:30])
def test_wrong_option_of_trace(options, words, refuses):
    refuses(*quick("tiny", *options), words=words)


TOMLS = {
    "deep": (b"x = " + b"[" * 20_000 + b"]" * 20_000, "nested too deep"),
    "dotted": (b".".join([b"a"] * 1_000) + b" = 1", "nested more than 64 deep"),
    "digits": (b"x = " + b"9" * 5_000, "an integer of more than 64 bits"),
    "hexadecimal": (b"x = 0x" + b"f" * 9_000, "an integer of more than 64 bits"),
    "a key twice": (b"x = 1\nx = 2\n", "Cannot overwrite a value"),
    "no UTF-8": (b'x = "\xff"\n', "'utf-8' codec"),
    "NUL": (b'x = "a\\u0000b"\n', "a NUL character"),
}
READERS = {
    "policy": ("trace", "tiny", *TEXT, "--policy", "x.toml", "-o", "out"),
    "budgets": ("gate", "program", "--budgets", "x.toml"),
    "audit": ("audit", "--config", "x.toml"),
    "names of a dump": ("import", "dump.npy", "--map", "x.toml", "-o", "out"),
    "names of a model": ("trace", "model", *TEXT, "-o", "out"),
    "names of a program": ("compare", "program", "--program", f"{CASES}/closed_key.py:closed", "--map", "x.toml"),
    "points": ("trace", f"{CASES}/closed_key.py:closed", "--rename", "x.toml", "-o", "out"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "program"
    assert run(["trace", f"{CASES}/closed_key.py:closed", "-o", str(folder)]) == 0
    assert run(["compare", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("reader", READERS)
def test_toml_that_no_reader_takes(reader, program, model, tmp_path, refuses):
    """One function reads all TOML, and what it refuses it refuses of every file."""
    np.save(tmp_path / "dump.npy", np.zeros(2))
    shutil.copytree(program, tmp_path / "program")
    shutil.copy(CASES / "decoder.json", tmp_path / "x.json")
    for data, words in TOMLS.values() if reader in ("audit", "names of a dump") else [*TOMLS.values()][:3]:
        (tmp_path / "x.toml").write_bytes(data)
        (model / "names.toml").write_bytes(data)
        refuses(*READERS[reader], words=["names.toml" if "model" in reader else "x.toml", "not TOML", words])


def test_no_such_command_or_model(tmp_path, refuses):
    refuses("comprae", words=["no command", "'comprae'", "did you mean 'compare'"])
    refuses(*quick(tmp_path / "nowhere"), words=["no model", "nowhere", "tiny", ".gguf"])
    refuses(*quick(TINY / WEIGHTS), words=["model.safetensors", "not a .gguf"])


@pytest.mark.parametrize(("options", "words"), DRAWS, ids=lambda x: " ".join(x)[:30])
def test_wrong_option_of_rollout(options, words, tmp_path, refuses):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "tokens": [5, 6]}')
    refuses("rollout", "tiny", "--prompts", "p.jsonl", "--device", "cpu", *options, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "x"], ["--lengths x", "such as 40,500"]),
        (["--lengths", "0"], ["empty"]),
        (["--lengths", "4096"], ["longer", "context of 4096"]),
        (["--lengths", "5", "--batch", "0"], ["--batch 0"]),
        (["--lengths", "5", "--policy", "bf61"], ["unknown policy", "'bf61'"]),
        (["--lengths", "5", "--prompts", "p.jsonl"], ["--prompts or --lengths"]),
    ],
    ids=lambda x: " ".join(x)[:30],
)
def test_wrong_option_of_warmup(options, words, refuses):
    refuses("warmup", "tiny", *options, "--device", "cpu", words=words)


def test_a_model_s_end_token_outside_its_vocabulary(model, refuses):
    (model / "generation_config.json").write_text('{"eos_token_id": 260}')
    refuses("rollout", model, words=["generation_config.json", "end token 260", "vocabulary of 260", "--end-tokens"])


@pytest.mark.parametrize(("content", "words"), PROMPTS, ids=lambda x: str(x)[:40])
def test_broken_prompts_file(content, words, tmp_path, refuses):
    (tmp_path / "p.jsonl").write_bytes(content)
    refuses(*quick("tiny", "--prompts", "p.jsonl"), words=words)


@pytest.mark.parametrize(("name", "change", "words"), MODELS.values(), ids=MODELS)
def test_broken_model(name, change, words, model, refuses):
    shutil.copy(TINY / WEIGHTS, model.parent / "other.safetensors")
    spoil(model / name, change)
    refuses(*quick(model), words=[str(model), *words], seconds=3)


@pytest.mark.parametrize("change", GGUFS.values(), ids=GGUFS)
def test_broken_gguf(change, tmp_path, refuses):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuses(*quick(path), words=[str(path), "metadata field", "missing"])  # sound, though no whole model
    spoil(path, change)
    refuses(*quick(path), words=[str(path), "truncated or not a GGUF"], seconds=5)


def test_run_that_is_there_needs_force(altered, refuses):
    refuses(*quick("tiny", "-o", altered), words=[str(altered), "holds a run", "--force"])
    assert run(quick("tiny", "-o", altered, "--force", "--points", "v")) == 0
    assert open_run(altered).record.requested.points == ("v",)
    assert [p.name for p in (altered / "tensors").iterdir()] == [Path(PREFILL).name]


def test_a_trace_killed_while_it_replaces_a_run_locks_nobody_out(altered, monkeypatch, capfd):
    """Cut off between removing the old run and writing the new run.json, with a part of it or without."""
    again = quick("tiny", "-o", altered, "--force", "--points", "v")
    for place in ("runs.folders.shutil.rmtree", "runs.several.RunWriter"):
        with monkeypatch.context() as patch:
            patch.setattr(f"precaudit.recording.{place}", Mock(side_effect=KeyboardInterrupt))
            assert run(again) == 130
        assert not (altered / "run.json").exists()
        (altered / "tensors").mkdir(parents=True, exist_ok=True)
        (altered / ".run.json.1234.part").write_text("{")
        assert run(quick("tiny", "-o", altered)) == 2
        assert "--force to replace what a run that was cut off left" in capfd.readouterr().err
        assert run(again) == 0
    assert open_run(altered).record.requested.points == ("v",)


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("names", [["thesis.txt"], ["run.json"], ["run.json", "thesis.txt"]])
def test_foreign_files_are_never_replaced(names, force, tmp_path, refuses):
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_text("{}")
    refuses(*quick("tiny", *force), words=["out", "choose another -o"])


def test_foreign_files_beside_a_run_are_never_replaced(altered, refuses):
    (altered / "thesis.txt").write_text("years of work")
    refuses(*quick("tiny", "-o", altered, "--force"), words=[str(altered), "thesis.txt"])


@pytest.mark.parametrize("place", ["file", "file/out", "file/further/out"])
def test_output_under_a_file(place, tmp_path, refuses):
    (tmp_path / "file").write_text("x")
    refuses(*quick("tiny", "-o", tmp_path / place, "--force"), words=[str(tmp_path / place)])


def test_output_not_writable(tmp_path, refuses, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda _path, mode, **_: mode != os.W_OK)  # root may write anywhere
    refuses(*quick("tiny"), words=["out", "not writable"])


def test_no_space_for_the_run(refuses, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=0)))
    refuses(*quick("tiny"), words=["no space", "MB", "--layers"])


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, FULL_RUST], ids=["python", "rust"])
@pytest.mark.parametrize("good", [0, 2])
def test_no_space_while_writing(good, error, tmp_path, monkeypatch, capfd):
    calls, save_file = [], safetensors.numpy.save_file

    def save(tensors, path):
        calls.append(path)
        if len(calls) > good:
            path.write_bytes(b"half")
            raise error
        save_file(tensors, path)

    monkeypatch.setattr(safetensors.numpy, "save_file", save)
    assert run(["trace", *WHOLE, "-o", str(tmp_path / "out")]) == 2
    message = capfd.readouterr().err
    assert all(word in message for word in ("No space left on device", "tensors", "partial"))
    check_partial(tmp_path / "out", good, capfd)


def test_interrupted(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Session, "run", Mock(side_effect=KeyboardInterrupt))
    assert run(["trace", *WHOLE, "-o", str(tmp_path / "out")]) == 130
    assert "interrupted" in capfd.readouterr().err
    check_partial(tmp_path / "out", 0, capfd)


def check_partial(out, tensors, capfd):
    """A run that was cut off is refused without --partial; with it, what is there is compared and the rest missing."""
    assert open_run(out, partial=True).record.finished is None
    assert not [p for p in files(out) if ".part" in p.name]
    assert len(list((out / "tensors").iterdir())) == tensors
    assert run(["compare", str(out)]) == 2
    assert "cut off before it finished; open what is there with --partial" in capfd.readouterr().err
    assert run(["compare", str(out), "--partial"]) == 0
    assert "missing" in capfd.readouterr().out
    assert any("missing" in e for e in local(out))
    assert any("rel_l2" in e for e in local(out)) == (tensors > 0)


def test_no_space_for_references(altered, tmp_path, monkeypatch, capfd):
    """A cache that takes nothing is no reason to stop: it is said."""
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    real = cache.whole

    @contextmanager
    def half(path, inside):
        with real(path, inside) as f:
            f.write(b"half")
            raise FULL

    monkeypatch.setattr(cache, "whole", half)
    assert run(["compare", str(altered)]) == 0
    assert "references are not kept: " in capfd.readouterr().out
    assert (altered / "errors.jsonl").exists()
    assert not [p for p in files(tmp_path) if ".part" in p.name]


def test_wrong_use_of_compare_and_report(altered, model, refuses):
    for command in ("compare", "report"):
        refuses(command, model, words=[str(model), "no run", "precaudit trace"])
        refuses(command, "nowhere", words=["nowhere", "no run"])
    refuses("compare", altered, "--layers", "99", words=["layer 99", "out of range"])
    refuses("compare", altered, "--points", "mlp_out", words=["'mlp_out'", "not recorded"])
    refuses("compare", altered, "--accum", "float17", words=["'float17'", "float16"])
    refuses("compare", altered, "--model", "nowhere", words=["no model", "nowhere"])
    refuses("compare", altered, "nowhere", words=["nowhere", "no run"])
    refuses("report", altered, words=[str(altered), "not compared", "precaudit compare"])


@pytest.mark.parametrize(("name", "change", "words"), RUNS.values(), ids=RUNS)
def test_run_that_was_altered(name, change, words, altered, refuses):
    spoil(altered / name, change)
    refuses("compare", altered, words=[str(altered), *words])


def test_a_run_without_prompts_or_cases(altered, program, tmp_path, refuses):
    (altered / "prompts.jsonl").write_bytes(b"")
    hashes = {"prompts.jsonl": file_hash(altered / "prompts.jsonl")}
    spoil(altered / "run.json", table(lambda r: r["hashes"].update(hashes)))
    spoil(altered / "run.json", table(lambda r: r["requested"].update(prompts=[])))
    own = shutil.copytree(program, tmp_path / "program")
    spoil(own / "run.json", fields(cases=[]))
    export = ("--csv", "out.csv")
    for command, *more in (("compare",), ("gate",), ("diagnose",), ("report",), ("export", *export)):
        refuses(command, altered, *more, words=["prompts.jsonl: no prompt is in it"])
        refuses(command, own, *more, words=["run.json: a run has at least one case"])
    with pytest.raises(UserError, match="there is no prompt"):
        precaudit.trace("tiny", tmp_path / "out", prompts=[])
    assert not (tmp_path / "out").exists()


def test_other_run_that_was_altered(full, altered, tmp_path, refuses):
    spoil(altered / PREFILL, attn_out)
    refuses("compare", shutil.copytree(full, tmp_path / "sound"), altered, words=[PREFILL, "'2.attn_out'", "altered"])
    spoil(altered / "prompts.jsonl", lambda data: data.replace(b":[100,", b":[101,"))
    refuses(*quick("tiny", "--tokens-from", altered), words=["prompts.jsonl", "altered"])


@pytest.mark.parametrize("place", ["../other.safetensors", "tensors/../../other.safetensors", "{other}"])
def test_run_that_leads_outside(place, altered, refuses):
    """points.jsonl names a sound file elsewhere, and run.json agrees with it."""
    place = place.format(other=shutil.copy(altered / PREFILL, altered.parent / "other.safetensors"))
    spoil(altered / "points.jsonl", lambda data: data.replace(PREFILL.encode(), place.encode()))
    digest = f"xxh3:{xxhash.xxh3_128_hexdigest((altered / 'points.jsonl').read_bytes())}"
    spoil(altered / "run.json", table(lambda raw: raw["hashes"].update({"points.jsonl": digest})))
    refuses("compare", altered, words=["points.jsonl", "outside the run", place])


def own_run(model):
    assert run(quick(model, "-o", model.parent / "run", "--points", "q,attn_out")) == 0
    return model.parent / "run"


def test_weights_changed_by_one_byte(model, refuses):
    own = own_run(model)
    spoil(model / WEIGHTS, lambda data: patched(data, -2))
    refuses("compare", own, words=[str(model), "weights", "not those of this run", "--model"])


@pytest.mark.parametrize("looked", [False, True], ids=["at first", "after a look without weights"])
def test_weights_moved_away(looked, model, capfd):
    own, moved = own_run(model), model.rename(model.with_name("elsewhere"))
    if looked:
        assert run(["compare", str(own)]) == 0
        assert "no weights" in capfd.readouterr().out
        found = {e["point"]: e for e in local(own)}
        assert found["q"]["unknown"] == "weights"
        assert "unknown" not in found["attn_out"]
        assert found["attn_out"]["rel_l2"] > 0
    assert run(["compare", str(own), "--model", str(moved)]) == 0
    assert "no weights" not in capfd.readouterr().out
    assert all(e.get("rel_l2", 0) > 0 for e in local(own))


@pytest.mark.turn  # 4 s
def test_nan_in_a_weight(model, tmp_path, capfd):
    names, start = header_of((model / WEIGHTS).read_bytes())
    at = start + names[Q_PROJ]["data_offsets"][0] + 64
    spoil(model / WEIGHTS, lambda data: patched(data, at, b"\xc0\x7f"))
    assert run(quick(model, "-o", tmp_path / "run", "--points", "q,attn_out", "--layers", "0,1")) == 0
    warned = capfd.readouterr().err
    assert all(word in warned for word in ("warning", Q_PROJ, "NaN"))
    assert run(["compare", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert not err
    assert "NaN" in out
    assert "Rounding accounts for all" not in out  # NaN never passes (docs/exit-codes.md)
    assert "exact" not in out


# Numbers that claim more than there is


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("points.jsonl", lambda r: r.update(positions=[0, 10**12]), ["2147483647", "positions"]),
        ("points.jsonl", lambda r: r.update(positions=[0, 2**31]), ["positions"]),
        ("points.jsonl", lambda r: r.update(positions=[0, 2**30]), ["1073741824 positions of", "altered"]),
        ("points.jsonl", lambda r: r.update(positions=[5, 5]), ["0 positions of", "altered"]),
        ("points.jsonl", lambda r: r.update(positions=[]), ["0 positions", "altered"]),
        ("points.jsonl", lambda r: r.update(shape=[10**15, *r["shape"][1:]]), ["shape"]),
        ("points.jsonl", lambda r: r.update(layer=-1), ["layer"]),
        ("points.jsonl", lambda r: r.update(step=2**63), ["step"]),
        ("steps.jsonl", lambda r: r.update(step=-(2**40)), ["step"]),
        ("steps.jsonl", lambda r: r.update(position=-1), ["position"]),
        ("steps.jsonl", lambda r: r.update(token=10**10), ["token"]),
        ("prompts.jsonl", lambda r: r.update(tokens=[10**12]), ["tokens"]),
    ],
)
def test_hostile_numbers_in_lines_are_refused_before_memory_is_spent(altered, refuses, file, change, words):
    rows = [json.loads(line) for line in (altered / file).read_text().splitlines()]
    change(rows[0])
    (altered / file).write_text("".join(json.dumps(r) + "\n" for r in rows))
    raw = json.loads((altered / "run.json").read_text())
    raw["hashes"][file] = file_hash(altered / file)
    (altered / "run.json").write_text(json.dumps(raw))
    refuses("compare", altered, words=[f"{file}:1", *words])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["model"]["config"].update(context=10**12), ["context = 1000000000000"]),
        (lambda r: r["model"]["config"].update(vocab=10**9), ["vocab = 1000000000"]),
        (lambda r: r["model"]["config"].update(layers=10**6), ["layers = 1000000"]),
        (lambda r: r["requested"].update(decode_steps=10**9), ["decode_steps = 1000000000"]),
        (lambda r: r["requested"].update(decode_steps=10**12), ["decode_steps"]),
        (lambda r: r["requested"].update(batch=-1), ["batch"]),
        (lambda r: r["requested"].update(layers=[10**12]), ["layers"]),
        (lambda r: r.update(schema=0), ["schema is 0"]),
        (lambda r: r.update(schema=-3), ["schema is -3"]),
    ],
)
def test_hostile_numbers_in_a_manifest_are_refused(altered, refuses, change, words):
    raw = json.loads((altered / "run.json").read_text())
    change(raw)
    (altered / "run.json").write_text(json.dumps(raw))
    refuses("compare", altered, words=["run.json", *words])


def test_what_a_run_names_is_never_fetched(altered, monkeypatch, capfd):
    """Weights by hub id that are not cached here: nothing asks the network, and what needs no weights is compared."""
    import huggingface_hub

    raw = json.loads((altered / "run.json").read_text())
    raw["model"]["reference"] = "someone/model"
    (altered / "run.json").write_text(json.dumps(raw))
    asked = []

    def download(_name, local_files_only=False, **_):
        asked.append(local_files_only)
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert run(["compare", str(altered)]) == 0
    assert set(asked) == {True}
    said = " ".join(capfd.readouterr().out.split())
    assert "someone/model is not in the hub's cache here, and what a run names is not fetched" in said
    assert "--model PATH" in said


def test_a_run_of_before_the_embedding_s_factor_had_a_key_is_exact(altered):
    path = altered / "run.json"
    raw = json.loads(path.read_text())
    assert raw["policy"].pop("embed_factor") == "exact"
    path.write_text(json.dumps(raw))
    assert open_run(altered).record.policy["embed_factor"] == "exact"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "1,1,128x512"), ["--shape 1,1,128x512", "B,H,Q,DxS"]),
        (("--shape", "1,1,1,128"), ["B,H,Q,DxS"]),
        (("--shape", "-1,1,1,128x512"), ["B,H,Q,DxS"]),
        (("--shape", "1,1,1,128x0"), ["a size is 0"]),
        (("--shape", "1,0,1,128x8"), ["a size is 0"]),
        (("--shape", "1,1,1,128x99999999"), ["too large", "elements"]),
        (("--shape", "1,1,4096,65536x4096"), ["too large"]),
        (("--shape", "1,1,1,1x" + "9" * 400), ["too large"]),
        (("--formats", "bf17"), ["bf17", "did you mean 'bfloat16'"]),
        (("--formats", "float64"), ["float64"]),
        (("--formats", ","), ["none is named"]),
        (("--tpu", "v9"), ["unknown TPU", "v5e"]),
        (("--tpu", "v5e:many"), ["topology"]),
        (("--fail-on", "default"), ["--fail-on", "worse than"]),
        (("--fail-on", "slowly worse than 1e-3"), ["no way 'slowly'"]),
        (("--fail-on", "default worse than 1e-3 rel_l3"), ["rel_l2"]),
        (("--fail-on", "default worse than x"), ["a number"]),
        (("--fail-on", "@ replaced"), ["names no arithmetic"]),
    ],
)
def test_wrong_option_of_probe(options, words, refuses):
    refuses("probe", "--device", "cpu", "--no-time", "-o", "out.jsonl", *options, words=words)
