"""Wrong use and bad input: exit code 2, a message of a line or two that says what and where, nothing half-written."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import SafetensorError

import precaudit
from precaudit import store
from precaudit.checkpoints import open_checkpoint
from precaudit.cli import run
from precaudit.tracing.session import Session

TINY = Path(precaudit.__file__).parent / "bundled" / "tiny"
TEXT = ("--text", "def f(x):")
QUICK = ("--phases", "prefill", "--layers", "0", "--points", "q", "--device", "cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """One whole small run, copied by the tests that alter it."""
    folder = tmp_path_factory.mktemp("full") / "whole"
    assert run(["trace", "tiny", *TEXT, "--decode-steps", "2", "--device", "cpu", "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def altered(full, tmp_path):
    """A copy of the run to alter."""
    return Path(shutil.copytree(full, tmp_path / "run"))


@pytest.fixture
def model(tmp_path):
    """A copy of tiny to break."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def refuses(tmp_path, monkeypatch, capfd):
    """Return the check that a command is refused: its code, its short message, and every file as it was."""
    monkeypatch.chdir(tmp_path)

    def check(*arguments, words, code=2, lines=2):
        before = files(tmp_path)
        capfd.readouterr()
        assert run([str(a) for a in arguments]) == code
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        assert not out
        said = err.splitlines()
        assert 1 <= len(said) <= lines, err
        assert len(said[-1]) <= 500, err
        assert said[-1].startswith("precaudit: ")
        for word in (words,) if isinstance(words, str) else words:
            assert word in said[-1]
        assert files(tmp_path) == before
        return said[-1]

    return check


@pytest.fixture
def trace_refuses(refuses, tmp_path):
    """Return the check for a quick trace; later options replace earlier ones."""

    def check(subject, *options, words, **more):
        text = () if {"--prompts", "--tokens-from", "--text"} & set(options) else TEXT
        return refuses("trace", subject, *QUICK, *text, "-o", tmp_path / "out", *options, words=words, **more)

    return check


def files(folder):
    """Everything below a folder: names, and contents of files."""
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def traced(subject, output, *options):
    assert run(["trace", str(subject), *QUICK, *TEXT, "-o", str(output), *options]) == 0
    return output


def records(folder, name="errors.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def manifest(folder):
    return json.loads((folder / "run.json").read_text())


def edit_json(path, **changes):
    """Set fields (``a__b`` is b in table a); the value ``...`` deletes."""
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        *tables, key = name.split("__")
        table = raw
        for t in tables:
            table = table[t]
        if value is ...:
            del table[key]
        else:
            table[key] = value
    path.write_text(json.dumps(raw))


def rehash(folder, name):
    """Make run.json agree with an altered file."""
    raw = manifest(folder)
    raw["hashes"][name] = f"xxh3:{xxhash.xxh3_128_hexdigest((folder / name).read_bytes())}"
    (folder / "run.json").write_text(json.dumps(raw))


def header_of(path):
    """Return (header, offset of the data) of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def edit_header(path, edit):
    header, start = header_of(path)
    edit(header)
    text, payload = json.dumps(header).encode(), path.read_bytes()[start:]
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def edit_bytes(path, at, change):
    data = bytearray(path.read_bytes())
    data[at : at + len(change)] = change
    path.write_bytes(data)


def flip(path, at):
    edit_bytes(path, at, bytes([path.read_bytes()[at] ^ 1]))


class TooLongError(BaseException):
    """Not an Exception, so that nothing under test swallows it."""


@contextmanager
def within(seconds, megabytes=500):
    """Fail when the body takes longer or grows the process by more."""

    def stop(signum, frame):
        raise TooLongError(f"still busy after {seconds} s")

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < megabytes << 20


# ---------------------------------------------------------------- commands and options

OPTIONS = {
    "layer out of range": (["--layers", "99"], ["layer 99", "out of range", "5"]),
    "layer is no number": (["--layers", "abc"], ["layer", "'abc'"]),
    "no layer": (["--layers", ","], ["layer"]),
    "point": (["--points", "atn_out"], ["unknown point", "'atn_out'", "did you mean 'attn_out'"]),
    "phase": (["--phases", "prefil"], ["unknown phase", "'prefil'", "did you mean 'prefill'"]),
    "policy": (["--policy", "bf61"], ["unknown policy", "'bf61'", "did you mean 'bf16'"]),
    "policy file missing": (["--policy", "mine.toml"], ["unknown policy", "mine.toml"]),
    "setting's key": (["--set", "score=float32"], ["unknown policy key", "'score'", "did you mean 'scores'"]),
    "setting's format": (["--set", "scores=float33"], ["unknown number format", "'float33'", "did you mean 'float32'"]),
    "setting's word": (["--set", "excess_precision=on"], ["excess_precision", "'on'", "off"]),
    "setting without =": (["--set", "scores"], ["--set", "'scores'", "KEY=VALUE"]),
    "matmul on cpu": (["--set", "matmul=BF16_BF16_F32"], ["matmul", "BF16_BF16_F32", "cpu", "not honoured"]),
    "device": (["--device", "npu"], ["unknown device", "'npu'", "cpu"]),
    "empty text": (["--text", "  "], ["--text", "empty"]),
    "text too long": (["--text", "a " * 4096], ["longer", "context", "4096"]),
    "decode too long": (["--text", "a", "--phases", "decode", "--decode-steps", "4096"], ["longer", "context", "4096"]),
    "negative steps": (["--decode-steps", "-1"], ["--decode-steps", "at least 0"]),
    "no batch": (["--batch", "0"], ["--batch", "at least 1"]),
    "positions": (["--positions", "last:x"], ["position", "last:x"]),
    "positions of no row": (["--positions", "4000:4001"], ["4000:4001", "none"]),
    "prompt filter": (["--prompt", "txt"], ["unknown prompt", "'txt'", "did you mean 'text'"]),
    "text and prompts": ([*TEXT, "--prompts", "p.jsonl"], ["--text", "--prompts", "not both"]),
    "prompts missing": (["--prompts", "nowhere.jsonl"], ["no prompts file", "nowhere.jsonl"]),
    "tokens from nowhere": (["--tokens-from", "nowhere"], ["nowhere", "no run", "run.json"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_option_of_trace(name, trace_refuses):
    options, words = OPTIONS[name]
    trace_refuses("tiny", *options, words=words)


@pytest.mark.parametrize(
    ("typed", "meant"), [("comprae", "'compare'"), ("traec", "'trace'"), ("reprot", "'report'")]
)
def test_unknown_command(typed, meant, refuses):
    refuses(typed, words=["no command", repr(typed), "did you mean", meant])


def test_policy_file_that_is_not_toml(tmp_path, trace_refuses):
    (tmp_path / "mine.toml").write_text("scores: float32")
    trace_refuses("tiny", "--policy", "mine.toml", words=["mine.toml", "not TOML"])


# ---------------------------------------------------------------- prompts

PROMPTS = {
    "not JSON": ("Hello\n", ["p.jsonl:1", "JSON"]),
    "second line": ('{"id":"a","prompt":"x"}\n{"id":\n', ["p.jsonl:2"]),
    "not UTF-8": (b'{"id":"a","prompt":"\xff\xfe"}\n', ["p.jsonl:1"]),
    "twice": ('{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n', ["p.jsonl:2", "'a'", "twice"]),
    "no content": ('{"id":"a"}\n', ["p.jsonl:1", "'a'", "exactly one"]),
    "two contents": ('{"id":"a","prompt":"x","tokens":[1]}\n', ["p.jsonl:1", "'a'", "exactly one"]),
    "unknown field": ('{"id":"a","promt":"x"}\n', ["p.jsonl:1", "promt"]),
    "empty file": ("\n\n", ["p.jsonl", "no prompt"]),
    "empty text": ('{"id":"a","prompt":" "}\n', ["'a'", "empty"]),
    "no tokens": ('{"id":"a","tokens":[]}\n', ["'a'", "empty"]),
    "token too large": ('{"id":"a","tokens":[1,260]}\n', ["'a'", "token id 260", "position 1", "vocabulary", "260"]),
    "token negative": ('{"id":"a","tokens":[-1]}\n', ["'a'", "token id -1", "position 0", "vocabulary"]),
    "too many tokens": (json.dumps({"id": "a", "tokens": [1] * 4097}), ["'a'", "4097", "longer", "context of 4096"]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_broken_prompts_file(name, tmp_path, trace_refuses):
    content, words = PROMPTS[name]
    (tmp_path / "p.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    trace_refuses("tiny", "--prompts", "p.jsonl", words=words)


# ---------------------------------------------------------------- models


def test_no_model_there(tmp_path, trace_refuses):
    trace_refuses(tmp_path / "nowhere", words=["no model", "nowhere", "tiny", ".gguf"])


def test_folder_without_config(model, trace_refuses):
    (model / "config.json").unlink()
    trace_refuses(model, words=[str(model), "config.json"])


def test_file_that_is_no_model(model, trace_refuses):
    trace_refuses(model / "model.safetensors", words=["model.safetensors", "not a .gguf"])


CONFIGS = {
    "architecture": ({"model_type": "gpt2"}, ["unknown architecture", "'gpt2'", "llama"]),
    "no architecture": ({"model_type": ...}, ["unknown architecture"]),
    "scaled RoPE": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "llama3"]),
    "scaled RoPE, new style": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters", "llama3"]),
    "sliding window": ({"sliding_window": 128}, ["sliding_window", "128"]),
    "sliding layers": ({"layer_types": ["sliding_attention"] * 5}, ["layer_types", "sliding_attention"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
    "unknown field": ({"attn_logit_softcapping": 30.0}, ["'attn_logit_softcapping'", "30.0"]),
    "missing field": ({"hidden_size": ...}, ["'hidden_size'", "missing"]),
    "wrong kind": ({"hidden_size": "wide"}, ["wrong kind", "wide"]),
    "heads": ({"num_attention_heads": 3}, ["3", "2", "heads"]),
    "no layers": ({"num_hidden_layers": 0}, ["layers", "at least 1"]),
    "more layers": ({"num_hidden_layers": 6}, ["model.layers.5.", "missing"]),
    "fewer layers": ({"num_hidden_layers": 4}, ["model.layers.4."]),
    "other width": ({"vocab_size": 261}, ["embed_tokens", "[260, 128]", "[261, 128]"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_that_is_not_understood(name, model, trace_refuses):
    changes, words = CONFIGS[name]
    edit_json(model / "config.json", **changes)
    trace_refuses(model, words=[str(model), *words])


def test_config_with_a_thousand_million_layers(model, trace_refuses):
    edit_json(model / "config.json", num_hidden_layers=10**9)
    with within(2):
        trace_refuses(model, words=[str(model)])


def test_config_that_is_not_json(model, trace_refuses):
    (model / "config.json").write_text("{")
    trace_refuses(model, words=["config.json", "not JSON"])


def _entry(name, **changes):
    return lambda header: header[name].update(changes)


def _extra(header):
    header["model.layers.0.self_attn.q_norm.weight"] = {"dtype": "BF16", "shape": [32], "data_offsets": [0, 64]}


HEADERS = {
    "offsets outside": (_entry("model.norm.weight", data_offsets=[10**9, 10**9 + 256]), ["model.norm.weight", "1000000000"]),
    "offsets reversed": (_entry("model.norm.weight", data_offsets=[256, 0]), ["model.norm.weight", "256"]),
    "offsets negative": (_entry("model.norm.weight", data_offsets=[-256, 0]), ["model.norm.weight", "malformed"]),
    "shape and bytes": (_entry("model.norm.weight", shape=[127]), ["model.norm.weight", "254"]),
    "shape and config": (_entry("model.norm.weight", shape=[64, 2]), ["model.norm.weight", "[64, 2]", "[128]"]),
    "integers": (_entry("model.norm.weight", dtype="I16"), ["model.norm.weight", "I16", "not supported"]),
    "missing": (lambda header: header.pop(Q_PROJ), [Q_PROJ, "missing"]),
    "extra": (_extra, ["model.layers.0.self_attn.q_norm.weight", "not part of", "llama"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_tensor(name, model, trace_refuses):
    edit, words = HEADERS[name]
    edit_header(model / "model.safetensors", edit)
    trace_refuses(model, words=[str(model), *words])


BROKEN = {
    "truncated": (lambda data: data[:-1000], ["truncated"]),
    "truncated header": (lambda data: data[:100], ["truncated"]),
    "three bytes": (lambda data: data[:3], ["truncated"]),
    "huge header": (lambda data: (2**60).to_bytes(8, "little") + data[8:], [str(2**60), "truncated"]),
    "header not JSON": (lambda data: data[:8] + b"x" + data[9:], ["header", "not JSON"]),
    "header a list": (lambda data: (2).to_bytes(8, "little") + b"[]", ["header", "table"]),
    "deep header": (lambda data: (10**6).to_bytes(8, "little") + b"[" * 10**6, ["header", "not JSON"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_safetensors(name, model, trace_refuses):
    change, words = BROKEN[name]
    path = model / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with within(5):
        trace_refuses(model, words=[str(path), *words])


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "absent.safetensors"])
def test_index_that_names_another_place(name, model, trace_refuses):
    shutil.copy(TINY / "model.safetensors", model.parent / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    trace_refuses(model, words=[str(model), name, "index"])


def small_gguf(path):
    """Write a sound GGUF of one layer."""
    import gguf

    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(64)
    w.add_embedding_length(32)
    w.add_feed_forward_length(64)
    w.add_head_count(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([chr(97 + i) for i in range(16)])
    shapes = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32), "attn_norm": (32,)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "ffn_norm": (32,)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in {"token_embd.weight": (16, 32), **tensors, "output_norm.weight": (32,)}.items():
        w.add_tensor(name, np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("kept", [0, 3, 23, 100, 600, 5000, -40])
def test_truncated_gguf(kept, tmp_path, trace_refuses):
    path = small_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(str(path)).config.layers == 1
    path.write_bytes(path.read_bytes()[:kept])
    trace_refuses(path, words=[str(path), "truncated or not a GGUF"])


def test_random_bytes_as_gguf(tmp_path, trace_refuses):
    path = tmp_path / "m.gguf"
    path.write_bytes(random.Random(0).randbytes(10_000))
    trace_refuses(path, words=[str(path), "not a GGUF"])


MAGIC = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"a"
ARRAY, UINT8, STRING = 9, 0, 8
HUGE = {
    "both counts": struct.pack("<QQ", 2**60, 2**60),
    "tensors": struct.pack("<QQ", 2**60, 0),
    "fields": struct.pack("<QQ", 0, 2**60),
    "string": struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", STRING, 2**60),
    "array": struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", ARRAY, UINT8, 2**60),
    "dimensions": struct.pack("<QQ", 1, 0) + KEY + struct.pack("<I", 2**32 - 1),
    "dimension": struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQIQ", 1, 2**60, 0, 0),
}


@pytest.mark.parametrize("name", HUGE)
def test_gguf_that_claims_to_be_huge(name, tmp_path, trace_refuses):
    path = tmp_path / "m.gguf"
    path.write_bytes(MAGIC + HUGE[name])
    with within(5):
        trace_refuses(path, words=[str(path), "truncated or not a GGUF"])


# ---------------------------------------------------------------- where the run goes


def test_run_that_is_there_needs_force(tmp_path, trace_refuses, capfd):
    traced("tiny", tmp_path / "out")
    trace_refuses("tiny", words=["out", "holds a run", "--force"])
    traced("tiny", tmp_path / "out", "--force", "--points", "v")
    assert manifest(tmp_path / "out")["requested"]["points"] == ["v"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("names", [["thesis.txt"], ["run.json", "thesis.txt"], ["tensors/thesis.txt"]])
def test_foreign_files_are_never_replaced(names, force, tmp_path, trace_refuses):
    for name in names:
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    trace_refuses("tiny", *force, words=["out", "not a run", "-o"])


def test_force_spares_what_is_not_the_runs(altered, trace_refuses):
    (altered / "thesis.txt").write_text("years of work")
    trace_refuses("tiny", "-o", altered, "--force", words=[str(altered), "thesis.txt"])


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_output_under_a_file(force, tmp_path, trace_refuses):
    (tmp_path / "file").write_text("x")
    trace_refuses("tiny", "-o", tmp_path / "file" / "out", *force, words=[str(tmp_path / "file")])
    trace_refuses("tiny", "-o", tmp_path / "file", *force, words=[str(tmp_path / "file")])


def test_output_not_writable(tmp_path, trace_refuses, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    trace_refuses("tiny", words=["out", "not writable"])


def test_output_that_cannot_be_made(tmp_path, trace_refuses, monkeypatch):
    def refuse(path, *rest, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    trace_refuses("tiny", words=["out", "Permission denied"])


def test_no_space_for_the_run(trace_refuses, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    trace_refuses("tiny", words=["no space", "MB", "--layers"])


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, FULL_RUST], ids=["python", "rust"])
@pytest.mark.parametrize("good", [0, 2])
def test_no_space_while_writing(good, error, tmp_path, monkeypatch, capfd):
    calls, real = [], store.save_file

    def save(tensors, path):
        calls.append(path)
        if len(calls) > good:
            path.write_bytes(b"half")
            raise error
        real(tensors, path)

    monkeypatch.setattr(store, "save_file", save)
    out = tmp_path / "out"
    assert run(["trace", "tiny", *TEXT, "--decode-steps", "2", "--device", "cpu", "-o", str(out)]) == 2
    message = capfd.readouterr().err
    assert "No space left" in message
    assert "partial" in message
    assert "Traceback" not in message
    check_partial(out, good, capfd)


def check_partial(out, tensors, capfd):
    """A run that was cut off says so, is refused without --partial, and what is there can be compared with it."""
    assert manifest(out)["finished"] is None
    assert not [p for p in out.rglob("*") if ".part" in p.name]
    assert len(list((out / "tensors").iterdir())) == tensors
    capfd.readouterr()
    assert run(["compare", str(out)]) == 2
    _, err = capfd.readouterr()
    assert "cut off" in err
    assert "--partial" in err
    assert len(err.splitlines()) == 1
    assert run(["compare", str(out), "--partial"]) == 0
    stdout, err = capfd.readouterr()
    assert "Traceback" not in err
    assert "missing" in stdout
    local = [e for e in records(out) if e["kind"] == "local"]
    assert any("missing" in e.get("unknown", "") for e in local)
    assert any("rel_l2" in e for e in local) == (tensors > 0)


def test_interrupted(tmp_path, monkeypatch, capfd):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", interrupt)
    out = tmp_path / "out"
    assert run(["trace", "tiny", *QUICK, *TEXT, "-o", str(out)]) == 130
    assert "interrupted" in capfd.readouterr().err
    check_partial(out, 0, capfd)


def test_no_space_for_references(altered, tmp_path, monkeypatch, capfd):
    def save(file, *rest, **more):
        file.write(b"half")
        raise FULL

    monkeypatch.setenv("PRECAUDIT_REFS", str(tmp_path / "refs"))
    monkeypatch.setattr(np, "save", save)
    assert run(["compare", str(altered)]) == 2
    assert "No space left" in capfd.readouterr().err
    assert not [p for p in tmp_path.rglob("*") if ".part" in p.name]
    assert not (altered / "errors.jsonl").exists()


# ---------------------------------------------------------------- runs that are not what they were


@pytest.mark.parametrize("command", [["compare"], ["report"]])
def test_folder_that_is_no_run(command, tmp_path, refuses):
    (tmp_path / "notes").mkdir()
    refuses(*command, tmp_path / "notes", words=["notes", "no run", "precaudit trace"])
    refuses(*command, tmp_path / "nowhere", words=["nowhere", "no run"])


def test_tokens_from_a_folder_that_is_no_run(model, trace_refuses):
    trace_refuses("tiny", "--tokens-from", model, words=[str(model), "no run", "run.json"])


def test_run_that_was_not_compared(altered, refuses):
    refuses("report", altered, words=[str(altered), "not compared", "precaudit compare"])


LOOKS = {
    "layer": (["--layers", "99"], ["layer 99", "out of range"]),
    "point not recorded": (["--points", "mlp_out"], ["'mlp_out'", "not recorded"]),
    "unknown point": (["--points", "atn_out"], ["'atn_out'", "did you mean 'attn_out'"]),
    "prompt": (["--prompt", "txt"], ["'txt'", "did you mean 'text'"]),
    "accumulation": (["--accum", "float17"], ["'float17'", "float16"]),
    "model": (["--model", "nowhere"], ["no model", "nowhere"]),
    "other model": (["--model", str(Path(__file__).parent.parent / "refs/fixtures/llama-gqa")], ["weights", "--model"]),
    "no other run": (["nowhere"], ["nowhere", "no run"]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_wrong_option_of_compare(name, altered, refuses):
    options, words = LOOKS[name]
    refuses("compare", altered, *options, words=words)


def test_newer_schema(altered, refuses):
    edit_json(altered / "run.json", schema=99)
    for command in ("compare", "report"):
        refuses(command, altered, words=["run.json", "schema 99", "newer", "upgrade"])


GARBAGE = [b"", b"\x00\xff garbage", b"null", b"[]", b"{}", b'{"schema": 1}', b'{"schema": "one"}', b"[" * 10**5]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(g[:12]))
def test_manifest_that_is_garbage(garbage, altered, refuses):
    (altered / "run.json").write_bytes(garbage)
    message = refuses("compare", altered, words=["run.json"])
    assert "newer" not in message


CONTRADICTIONS = {
    "no hashes": {"hashes": {}},
    "policy lacks a key": {"policy__scores": ...},
    "policy's format": {"policy__scores": "float33"},
    "config lacks layers": {"model__config__layers": ...},
    "config lacks width": {"model__config__width": ...},
    "config's kind": {"model__config__width": "wide"},
    "layers beyond the model": {"requested__layers": [0, 99]},
    "unknown point": {"requested__points": ["q", "qq"]},
    "unknown prompt": {"requested__prompts": ["other"]},
    "many steps": {"requested__decode_steps": 10**12},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_manifest_that_contradicts_itself(name, altered, refuses):
    edit_json(altered / "run.json", **CONTRADICTIONS[name])
    with within(5):
        refuses("compare", altered, words=[str(altered)])


def test_tensor_changed_by_one_byte(full, altered, refuses):
    path = altered / "tensors" / "text.prefill.0.safetensors"
    header, start = header_of(path)
    name, entry = next((k, v) for k, v in header.items() if k.endswith(".attn_out"))
    flip(path, start + entry["data_offsets"][0] + 5)
    refuses("compare", altered, words=[path.name, repr(name), "altered"])
    refuses("compare", altered, full, words=[path.name, repr(name), "altered"])
    refuses("compare", shutil.copytree(full, altered.parent / "b"), altered, words=[path.name, repr(name), "altered"])


def test_tensor_file_missing_or_truncated(altered, refuses):
    path = altered / "tensors" / "text.decode.1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refuses("compare", altered, words=[path.name, "truncated"])
    path.unlink()
    refuses("compare", altered, words=[path.name, "missing"])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("prompts.jsonl", '"tokens":[', '"tokens":[1,'),
        ("prompts.jsonl", '"tokens":[100,', '"tokens":[101,'),
        ("steps.jsonl", '"position":9', '"position":8'),
        ("points.jsonl", '"layer":1', '"layer":0'),
    ],
)
@pytest.mark.parametrize("command", ["compare", "tokens-from"])
def test_lines_changed(name, old, new, command, altered, refuses, trace_refuses):
    text = (altered / name).read_text()
    assert old in text
    (altered / name).write_text(text.replace(old, new, 1))
    words = [str(altered / name), "altered"]
    if command == "compare":
        refuses("compare", altered, words=words)
    else:
        trace_refuses("tiny", "--tokens-from", altered, words=words)


@pytest.mark.parametrize("name", ["prompts.jsonl", "steps.jsonl", "points.jsonl"])
def test_lines_missing(name, altered, refuses):
    (altered / name).unlink()
    refuses("compare", altered, words=[name, "missing", "trace again"])


@pytest.mark.parametrize("place", ["../other.safetensors", "tensors/../../other.safetensors", "{absolute}"])
def test_run_that_points_outside_itself(place, altered, refuses):
    real = altered / "tensors" / "text.prefill.0.safetensors"
    other = Path(shutil.copy(real, altered.parent / "other.safetensors"))
    place = place.format(absolute=other)
    text = (altered / "points.jsonl").read_text()
    (altered / "points.jsonl").write_text(text.replace('"tensors/text.prefill.0.safetensors"', json.dumps(place)))
    rehash(altered, "points.jsonl")
    refuses("compare", altered, words=["points.jsonl", "outside the run", place])


# ---------------------------------------------------------------- weights


@pytest.fixture
def own(model, tmp_path):
    """A run of the copied model that holds q and attn_out."""
    return traced(model, tmp_path / "run", "--points", "q,attn_out")


def local(folder):
    """The local records of a comparison by point."""
    return {e["point"]: e for e in records(folder) if e["kind"] == "local"}


def test_weights_changed_by_one_byte(model, own, refuses):
    flip(model / "model.safetensors", -2)
    refuses("compare", own, words=[str(model), "weights", "not those of this run", "--model"])


def test_weights_moved_away(model, own, capfd):
    model.rename(model.with_name("elsewhere"))
    assert run(["compare", str(own)]) == 0
    assert "no weights" in capfd.readouterr().out
    found = local(own)
    assert found["q"]["unknown"] == "weights"
    assert found["attn_out"]["rel_l2"] > 0
    assert "unknown" not in found["attn_out"]


@pytest.mark.parametrize("before", [False, True], ids=["first", "after a look without weights"])
def test_weights_elsewhere(before, model, own, capfd):
    moved = model.rename(model.with_name("elsewhere"))
    if before:
        assert run(["compare", str(own)]) == 0
    assert run(["compare", str(own), "--model", str(moved)]) == 0
    assert "no weights" not in capfd.readouterr().out.splitlines()[-20:]
    found = local(own)
    assert found["q"]["rel_l2"] > 0
    assert "unknown" not in found["q"]


def test_nan_in_a_weight(model, tmp_path, capfd):
    path = model / "model.safetensors"
    header, start = header_of(path)
    edit_bytes(path, start + header[Q_PROJ]["data_offsets"][0] + 64, b"\xc0\x7f")
    out = traced(model, tmp_path / "run", "--points", "q,attn_out")
    err = capfd.readouterr().err
    assert "warning" in err
    assert Q_PROJ in err
    assert "NaN" in err
    assert run(["compare", str(out)]) == 0
    found, err = capfd.readouterr()
    assert not err
    assert "NaN" in found
    assert all(e["nonfinite"] > 0 for e in records(out) if e["point"] == "q" and "unknown" not in e)
