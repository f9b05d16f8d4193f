"""Wrong use and bad input: exit code 2, a line or two that say what and where, no traceback, nothing half-written."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
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
from tests.conftest import FIXTURES

TINY = Path(precaudit.__file__).parent / "bundled" / "tiny"
TEXT = ("--text", "def f(x):")
WHOLE = ("tiny", *TEXT, "--decode-steps", "2", "--device", "cpu")
QUICK = ("--phases", "prefill", "--layers", "0", "--points", "q", "--device", "cpu")
Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
PREFILL = "tensors/text.prefill.0.safetensors"


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
def refuses(full, tmp_path, monkeypatch, capfd):
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


@pytest.fixture
def trace_refuses(refuses, tmp_path):
    """Return the check for a quick trace; later options replace earlier ones."""

    def check(subject, *options, **more):
        text = () if {"--prompts", "--tokens-from"} & set(options) else TEXT
        refuses("trace", subject, *QUICK, *text, "-o", tmp_path / "out", *options, **more)

    return check


@contextmanager
def within(seconds, megabytes=500):
    """Fail when the body takes longer, or grows the process by more."""

    def stop(signum, frame):
        pytest.fail(f"still busy after {seconds} s")  # no Exception: nothing under test swallows it

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes << 10


def files(folder):
    """Everything below a folder: names, and contents of files."""
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def halves(folder):
    return [p for p in folder.rglob("*") if ".part" in p.name]


def traced(subject, output, *options):
    assert run(["trace", str(subject), *QUICK, *TEXT, "-o", str(output), *options]) == 0
    return output


def local(folder):
    """The local records of a comparison."""
    found = [json.loads(line) for line in (folder / "errors.jsonl").read_text().splitlines()]
    return [e for e in found if e["kind"] == "local"]


def set_fields(path, changes):
    """Set fields of a JSON file (``a.b`` is b in table a); the value ``...`` deletes."""
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        *tables, key = name.split(".")
        table = raw
        for t in tables:
            table = table[t]
        table[key] = value
        if value is ...:
            del table[key]
    path.write_text(json.dumps(raw))


def header_of(data):
    """Return (header, offset of the data) of safetensors bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def patched(data, at, change):
    at %= len(data)
    return data[:at] + change + data[at + len(change) :]


def flipped(data, at):
    return patched(data, at, bytes([data[at] ^ 1]))


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def ids(table):
    return {"argnames": "name", "argvalues": list(table)}


# Each table: what is wrong → how, and the words the message must have.
OPTIONS = {
    "layer out of range": (["--layers", "99"], ["layer 99", "out of range", "5"]),
    "layer is no number": (["--layers", "abc"], ["layer", "'abc'"]),
    "point": (["--points", "atn_out"], ["unknown point", "'atn_out'", "did you mean 'attn_out'"]),
    "phase": (["--phases", "prefil"], ["unknown phase", "'prefil'", "did you mean 'prefill'"]),
    "policy": (["--policy", "bf61"], ["unknown policy", "'bf61'", "did you mean 'bf16'"]),
    "policy file": (["--policy", "mine.toml"], ["unknown policy", "mine.toml"]),
    "key": (["--set", "score=float32"], ["unknown policy key", "'score'", "did you mean 'scores'"]),
    "format": (["--set", "scores=float33"], ["unknown number format", "'float33'", "did you mean 'float32'"]),
    "word": (["--set", "excess_precision=on"], ["excess_precision", "'on'", "off"]),
    "no =": (["--set", "scores"], ["--set", "'scores'", "KEY=VALUE"]),
    "matmul on cpu": (["--set", "matmul=BF16_BF16_F32"], ["matmul", "BF16_BF16_F32", "cpu", "not honoured"]),
    "device": (["--device", "npu"], ["unknown device", "'npu'", "cpu"]),
    "empty text": (["--text", "  "], ["--text", "empty"]),
    "text too long": (["--text", "a " * 4096], ["longer", "context", "4096"]),
    "decode too long": (["--phases", "decode", "--decode-steps", "4096"], ["longer", "context", "4096"]),
    "negative steps": (["--decode-steps", "-1"], ["--decode-steps", "at least 0"]),
    "positions": (["--positions", "last:x"], ["position", "last:x"]),
    "prompt filter": (["--prompt", "txt"], ["unknown prompt", "'txt'", "did you mean 'text'"]),
    "text and prompts": ([*TEXT, "--prompts", "p.jsonl"], ["--text", "--prompts", "not both"]),
    "prompts missing": (["--prompts", "nowhere.jsonl"], ["no prompts file", "nowhere.jsonl"]),
    "tokens from nowhere": (["--tokens-from", "nowhere"], ["nowhere", "no run", "run.json"]),
}
PROMPTS = {
    "not JSON": (b"Hello\n", ["p.jsonl:1", "JSON"]),
    "second line": (b'{"id":"a","prompt":"x"}\n{"id":\n', ["p.jsonl:2"]),
    "not UTF-8": (b'{"id":"a","prompt":"\xff\xfe"}\n', ["p.jsonl:1"]),
    "twice": (b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}\n', ["p.jsonl:2", "'a'", "twice"]),
    "no content": (b'{"id":"a"}\n', ["p.jsonl:1", "'a'", "exactly one"]),
    "two contents": (b'{"id":"a","prompt":"x","tokens":[1]}\n', ["p.jsonl:1", "'a'", "exactly one"]),
    "unknown field": (b'{"id":"a","promt":"x"}\n', ["p.jsonl:1", "promt"]),
    "empty file": (b"\n\n", ["p.jsonl", "no prompt"]),
    "empty text": (b'{"id":"a","prompt":" "}\n', ["'a'", "empty"]),
    "no tokens": (b'{"id":"a","tokens":[]}\n', ["'a'", "empty"]),
    "token too large": (b'{"id":"a","tokens":[1,260]}\n', ["'a'", "token id 260", "position 1", "vocabulary of 260"]),
    "token negative": (b'{"id":"a","tokens":[-1]}\n', ["'a'", "token id -1", "position 0", "vocabulary"]),
    "long": (b'{"id":"a","tokens":[' + b"1," * 4096 + b"1]}", ["'a'", "4097", "longer", "context of 4096"]),
}


def config(**changes):
    return lambda m: set_fields(m / "config.json", changes)


def header(name, **changes):
    """Change a tensor's entry, make it, or (no change) drop it."""

    def edit(data):
        table, start = header_of(data)
        table[name] = table.get(name, {}) | changes
        text = json.dumps({k: v for k, v in table.items() if k != name or changes}).encode()
        return len(text).to_bytes(8, "little") + text + data[start:]

    return blob(edit)


def blob(change):
    return lambda m: rewrite(m / "model.safetensors", change)


def index(name):
    table = json.dumps({"weight_map": {Q_PROJ: name}})
    return lambda m: (m / "model.safetensors.index.json").write_text(table)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
MODELS = {
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json"]),
    "config not JSON": (lambda m: (m / "config.json").write_text("{"), ["config.json", "not JSON"]),
    "architecture": (config(model_type="gpt2"), ["unknown architecture", "'gpt2'", "llama"]),
    "scaled RoPE": (config(rope_scaling=LLAMA3), ["rope_scaling", "llama3"]),
    "scaled RoPE, new style": (config(rope_parameters=LLAMA3), ["rope_parameters", "llama3"]),
    "sliding window": (config(sliding_window=128), ["sliding_window", "128"]),
    "sliding layers": (config(layer_types=["sliding_attention"] * 5), ["layer_types", "sliding_attention"]),
    "activation": (config(hidden_act="gelu"), ["hidden_act", "'gelu'"]),
    "unknown field": (config(attn_logit_softcapping=30.0), ["'attn_logit_softcapping'", "30.0"]),
    "missing field": (config(hidden_size=...), ["'hidden_size'", "missing"]),
    "wrong kind": (config(hidden_size="wide"), ["wrong kind", "wide"]),
    "heads": (config(num_attention_heads=3), ["3", "2", "heads"]),
    "no layers": (config(num_hidden_layers=0), ["layers", "at least 1"]),
    "more layers": (config(num_hidden_layers=6), ["model.layers.5.", "missing"]),
    "fewer layers": (config(num_hidden_layers=4), ["model.layers.4."]),
    "a thousand million layers": (config(num_hidden_layers=10**9), ["layers"]),
    "other vocabulary": (config(vocab_size=261), ["embed_tokens", "[260, 128]", "[261, 128]"]),
    "truncated": (blob(lambda data: data[:-1000]), ["model.safetensors", "truncated"]),
    "truncated header": (blob(lambda data: data[:100]), ["model.safetensors", "truncated"]),
    "three bytes": (blob(lambda data: data[:3]), ["model.safetensors", "truncated"]),
    "huge header": (blob(lambda data: struct.pack("<Q", 2**60) + data[8:]), ["model.safetensors", str(2**60)]),
    "header not JSON": (blob(lambda data: patched(data, 8, b"x")), ["model.safetensors", "header", "not JSON"]),
    "header a list": (blob(lambda data: struct.pack("<Q", 2) + b"[]"), ["model.safetensors", "header", "table"]),
    "deep header": (blob(lambda data: struct.pack("<Q", 10**6) + b"[" * 10**6), ["header", "not JSON"]),
    "offsets outside": (header(NORM, data_offsets=[10**9, 10**9 + 256]), [NORM, "1000000000"]),
    "offsets reversed": (header(NORM, data_offsets=[256, 0]), [NORM, "256"]),
    "offsets negative": (header(NORM, data_offsets=[-256, 0]), [NORM, "malformed"]),
    "shape against bytes": (header(NORM, shape=[127]), [NORM, "254"]),
    "shape against config": (header(NORM, shape=[64, 2]), [NORM, "[64, 2]", "[128]"]),
    "integers": (header(NORM, dtype="I16"), [NORM, "I16", "not supported"]),
    "missing tensor": (header(Q_PROJ), [Q_PROJ, "missing"]),
    "extra tensor": (header(Q_NORM, dtype="BF16", shape=[32], data_offsets=[0, 64]), [Q_NORM, "not part of", "llama"]),
    "index leads outside": (index("../other.safetensors"), ["'../other.safetensors'", "index"]),
    "index leads to the root": (index("/etc/hostname"), ["'/etc/hostname'", "index"]),
    "index leads nowhere": (index("absent.safetensors"), ["'absent.safetensors'", "index"]),
}
GGUF, KEY, ARRAY, UINT8, STRING = b"GGUF" + struct.pack("<I", 3), struct.pack("<Q", 1) + b"a", 9, 0, 8
GGUFS = {
    **{f"the first {n} bytes": lambda sound, n=n: sound[:n] for n in (0, 3, 23, 100, 600, 5000)},
    "all but 40 bytes": lambda sound: sound[:-40],
    "random bytes": lambda sound: random.Random(0).randbytes(10_000),
    "huge counts": lambda sound: GGUF + struct.pack("<QQ", 2**60, 2**60),
    "huge tensor count": lambda sound: GGUF + struct.pack("<QQ", 2**60, 0),
    "huge string": lambda sound: GGUF + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", STRING, 2**60),
    "huge array": lambda sound: GGUF + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", ARRAY, UINT8, 2**60),
    "huge tensor": lambda sound: GGUF + struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQIQ", 1, 2**60, 0, 0),
}


def manifest(**changes):
    return lambda r: set_fields(r / "run.json", {k.replace("__", "."): v for k, v in changes.items()})


def garbage(data):
    return lambda r: (r / "run.json").write_bytes(data)


def line(name, old, new):
    def edit(data):
        assert old in data
        return data.replace(old, new, 1)

    return lambda r: rewrite(r / name, edit)


def attn_out(r):
    """Change one byte inside the tensor 2.attn_out."""
    data = (r / PREFILL).read_bytes()
    table, start = header_of(data)
    (r / PREFILL).write_bytes(flipped(data, start + table["2.attn_out"]["data_offsets"][0] + 5))


def outside(place):
    """Make points.jsonl name a sound file elsewhere, and run.json agree with it."""

    def edit(r):
        other = shutil.copy(r / PREFILL, r.parent / "other.safetensors")
        points = (r / "points.jsonl").read_bytes().replace(PREFILL.encode(), place.format(other=other).encode())
        (r / "points.jsonl").write_bytes(points)
        set_fields(r / "run.json", {"hashes": manifest_of(r)["hashes"] | {"points.jsonl": xxh3(points)}})

    return edit


def manifest_of(folder):
    return json.loads((folder / "run.json").read_text())


def xxh3(data):
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


RUNS = {
    "newer schema": (manifest(schema=99), ["run.json", "schema 99", "newer", "upgrade"]),
    "schema is no number": (manifest(schema="one"), ["run.json", "not a run manifest"]),
    "empty": (garbage(b""), ["run.json", "not a run manifest"]),
    "binary": (garbage(b"\x00\xff garbage"), ["run.json", "not a run manifest"]),
    "list": (garbage(b"[]"), ["run.json", "not a run manifest"]),
    "deep": (garbage(b"[" * 10**5), ["run.json", "not a run manifest"]),
    "nothing but schema": (garbage(b'{"schema": 1}'), ["run.json", "missing required field"]),
    "no hashes": (manifest(hashes={}), ["prompts.jsonl", "altered"]),
    "policy lacks a key": (manifest(policy__scores=...), ["run.json", "scores"]),
    "policy's format": (manifest(policy__scores="float33"), ["run.json", "float33"]),
    "config lacks layers": (manifest(model__config__layers=...), ["run.json", "layers"]),
    "config's kind": (manifest(model__config__width="wide"), ["run.json", "width"]),
    "unknown point": (manifest(requested__points=["q", "qq"]), ["run.json", "qq"]),
    "a tensor's byte": (attn_out, [PREFILL, "'2.attn_out'", "altered"]),
    "tensor file cut": (lambda r: rewrite(r / PREFILL, lambda data: data[:-1]), [PREFILL, "truncated"]),
    "tensor file gone": (lambda r: (r / PREFILL).unlink(), [PREFILL, "missing"]),
    "token id": (line("prompts.jsonl", b'"tokens":[100,', b'"tokens":[101,'), ["prompts.jsonl", "altered"]),
    "step": (line("steps.jsonl", b'"position":9', b'"position":8'), ["steps.jsonl", "altered"]),
    "point": (line("points.jsonl", b'"layer":1', b'"layer":0'), ["points.jsonl", "altered"]),
    "steps gone": (lambda r: (r / "steps.jsonl").unlink(), ["steps.jsonl", "missing"]),
    "leads outside": (outside("../other.safetensors"), ["points.jsonl", "outside the run", "../other.safetensors"]),
    "leads outside later": (outside("tensors/../../other.safetensors"), ["points.jsonl", "outside the run"]),
    "leads to the root": (outside("{other}"), ["points.jsonl", "outside the run"]),
}
LOOKS = {
    "layer": (["--layers", "99"], ["layer 99", "out of range"]),
    "point not recorded": (["--points", "mlp_out"], ["'mlp_out'", "not recorded"]),
    "prompt": (["--prompt", "txt"], ["'txt'", "did you mean 'text'"]),
    "accumulation": (["--accum", "float17"], ["'float17'", "float16"]),
    "no model": (["--model", "nowhere"], ["no model", "nowhere"]),
    "other model": (["--model", FIXTURES / "llama-gqa"], ["weights", "not those", "--model"]),
    "no other run": (["nowhere"], ["nowhere", "no run"]),
}


@pytest.mark.parametrize(**ids(OPTIONS))
def test_wrong_option_of_trace(name, trace_refuses):
    trace_refuses("tiny", *OPTIONS[name][0], words=OPTIONS[name][1])


@pytest.mark.parametrize(("typed", "meant"), [("comprae", "compare"), ("traec", "trace"), ("reprot", "report")])
def test_unknown_command(typed, meant, refuses):
    refuses(typed, words=["no command", repr(typed), f"did you mean {meant!r}"])


@pytest.mark.parametrize(**ids(PROMPTS))
def test_broken_prompts_file(name, tmp_path, trace_refuses):
    (tmp_path / "p.jsonl").write_bytes(PROMPTS[name][0])
    trace_refuses("tiny", "--prompts", "p.jsonl", words=PROMPTS[name][1])


def test_no_model_there(tmp_path, trace_refuses):
    trace_refuses(tmp_path / "nowhere", words=["no model", "nowhere", "tiny", ".gguf"])
    trace_refuses(TINY / "model.safetensors", words=["model.safetensors", "not a .gguf"])


@pytest.mark.parametrize(**ids(MODELS))
def test_broken_model(name, model, trace_refuses):
    shutil.copy(TINY / "model.safetensors", model.parent / "other.safetensors")
    MODELS[name][0](model)
    trace_refuses(model, words=[str(model), *MODELS[name][1]], seconds=3)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a sound GGUF of one layer."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    w = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    for key, n in {**sizes, "attention.head_count": 2}.items():
        w.add_uint32(f"llama.{key}", n)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_token_list([chr(97 + i) for i in range(16)])
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32)) | {"ffn_down": (32, 64)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "attn_norm": (32,), "ffn_norm": (32,)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    for name, shape in {"token_embd": (16, 32), **shapes, "output_norm": (32,)}.items():
        w.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    assert open_checkpoint(str(path)).config.layers == 1
    return path.read_bytes()


@pytest.mark.parametrize(**ids(GGUFS))
def test_broken_gguf(name, sound, tmp_path, trace_refuses):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUFS[name](sound))
    trace_refuses(path, words=[str(path), "truncated or not a GGUF"], seconds=5)


def test_run_that_is_there_needs_force(altered, trace_refuses):
    trace_refuses("tiny", "-o", altered, words=[str(altered), "holds a run", "--force"])
    traced("tiny", altered, "--force", "--points", "v")
    assert manifest_of(altered)["requested"]["points"] == ["v"]
    assert [p.name for p in (altered / "tensors").iterdir()] == [Path(PREFILL).name]


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("names", [["thesis.txt"], ["run.json", "thesis.txt"], ["tensors/thesis.txt"]])
def test_foreign_files_are_never_replaced(names, force, tmp_path, trace_refuses):
    for path in (tmp_path / "out" / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    trace_refuses("tiny", *force, words=[str(tmp_path / "out"), "choose another -o"])


def test_foreign_files_beside_a_run_are_never_replaced(altered, trace_refuses):
    (altered / "thesis.txt").write_text("years of work")
    trace_refuses("tiny", "-o", altered, "--force", words=[str(altered), "thesis.txt"])


@pytest.mark.parametrize("place", ["file", "file/out", "file/further/out"])
def test_output_under_a_file(place, tmp_path, trace_refuses):
    (tmp_path / "file").write_text("x")
    trace_refuses("tiny", "-o", tmp_path / place, "--force", words=[str(tmp_path / place)])


def test_output_not_writable(tmp_path, trace_refuses, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)  # root may write anywhere
    trace_refuses("tiny", words=["out", "not writable"])


def test_no_space_for_the_run(trace_refuses, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    trace_refuses("tiny", words=["no space", "MB", "--layers"])


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, FULL_RUST], ids=["python", "rust"])
@pytest.mark.parametrize("good", [0, 2])
def test_no_space_while_writing(good, error, tmp_path, monkeypatch, capfd):
    calls, save_file = [], store.save_file

    def save(tensors, path):
        calls.append(path)
        if len(calls) > good:
            path.write_bytes(b"half")
            raise error
        save_file(tensors, path)

    monkeypatch.setattr(store, "save_file", save)
    assert run(["trace", *WHOLE, "-o", str(tmp_path / "out")]) == 2
    message = capfd.readouterr().err
    assert "No space left" in message
    assert "partial" in message
    assert "Traceback" not in message
    check_partial(tmp_path / "out", good, capfd)


def test_interrupted(tmp_path, monkeypatch, capfd):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", interrupt)
    assert run(["trace", *WHOLE, "-o", str(tmp_path / "out")]) == 130
    assert "interrupted" in capfd.readouterr().err
    check_partial(tmp_path / "out", 0, capfd)


def check_partial(out, tensors, capfd):
    """A run that was cut off is refused without --partial; with it, what is there is compared and the rest missing."""
    assert manifest_of(out)["finished"] is None
    assert not halves(out)
    assert len(list((out / "tensors").iterdir())) == tensors
    assert run(["compare", str(out)]) == 2
    err = capfd.readouterr().err
    assert "cut off" in err
    assert "--partial" in err
    assert run(["compare", str(out), "--partial"]) == 0
    assert "missing" in capfd.readouterr().out
    assert any("missing" in e.get("unknown", "") for e in local(out))
    assert any("rel_l2" in e for e in local(out)) == (tensors > 0)


def test_no_space_for_references(altered, tmp_path, monkeypatch, capfd):
    def save(file, *rest, **more):
        file.write(b"half")
        raise FULL

    monkeypatch.setenv("PRECAUDIT_REFS", str(tmp_path / "refs"))
    monkeypatch.setattr(np, "save", save)
    assert run(["compare", str(altered)]) == 2
    assert "No space left" in capfd.readouterr().err
    assert not (altered / "errors.jsonl").exists()
    assert not halves(tmp_path)


@pytest.mark.parametrize("command", ["compare", "report"])
def test_folder_that_is_no_run(command, model, refuses):
    refuses(command, model, words=[str(model), "no run", "precaudit trace"])
    refuses(command, "nowhere", words=["nowhere", "no run"])


def test_run_that_was_not_compared(altered, refuses):
    refuses("report", altered, words=[str(altered), "not compared", "precaudit compare"])


@pytest.mark.parametrize(**ids(LOOKS))
def test_wrong_option_of_compare(name, altered, refuses):
    refuses("compare", altered, *LOOKS[name][0], words=LOOKS[name][1])


@pytest.mark.parametrize(**ids(RUNS))
def test_run_that_was_altered(name, altered, refuses):
    RUNS[name][0](altered)
    refuses("compare", altered, words=[str(altered), *RUNS[name][1]])


def test_other_run_that_was_altered(full, altered, tmp_path, refuses, trace_refuses):
    attn_out(altered)
    refuses("compare", shutil.copytree(full, tmp_path / "sound"), altered, words=[PREFILL, "'2.attn_out'", "altered"])
    RUNS["token id"][0](altered)
    trace_refuses("tiny", "--tokens-from", altered, words=["prompts.jsonl", "altered"])


@pytest.fixture
def own(model, tmp_path):
    """A run of the copied model that holds q and attn_out."""
    return traced(model, tmp_path / "run", "--points", "q,attn_out")


def test_weights_changed_by_one_byte(model, own, refuses):
    rewrite(model / "model.safetensors", lambda data: flipped(data, -2))
    refuses("compare", own, words=[str(model), "weights", "not those of this run", "--model"])


def test_weights_moved_away(model, own, capfd):
    moved = model.rename(model.with_name("elsewhere"))
    assert run(["compare", str(own)]) == 0
    assert "no weights" in capfd.readouterr().out
    found = {e["point"]: e for e in local(own)}
    assert found["q"]["unknown"] == "weights"
    assert found["attn_out"]["rel_l2"] > 0
    assert "unknown" not in found["attn_out"]
    assert run(["compare", str(own), "--model", str(moved)]) == 0
    assert "no weights" not in capfd.readouterr().out
    assert not [e for e in local(own) if "unknown" in e]


def test_weights_elsewhere(model, own, capfd):
    assert run(["compare", str(own), "--model", str(model.rename(model.with_name("elsewhere")))]) == 0
    assert "no weights" not in capfd.readouterr().out
    assert all(e["rel_l2"] > 0 for e in local(own))


def test_nan_in_a_weight(model, tmp_path, capfd):
    table, start = header_of((model / "model.safetensors").read_bytes())
    at = start + table[Q_PROJ]["data_offsets"][0] + 64
    rewrite(model / "model.safetensors", lambda data: patched(data, at, b"\xc0\x7f"))
    traced(model, tmp_path / "run", "--points", "q,attn_out", "--layers", "0,1")
    warned = capfd.readouterr().err
    assert "warning" in warned
    assert Q_PROJ in warned
    assert "NaN" in warned
    assert run(["compare", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert not err
    assert "NaN" in out
    assert "Rounding accounts for all" not in out  # NaN never passes (docs/design.md §6)
    assert "exact" not in out
