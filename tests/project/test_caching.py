"""Cached references: damaged ones are computed again and said, what computed them is in the key."""

import ast
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from precaudit import caching
from precaudit.caching import COMPARES, DIAGNOSES, NO_NUMBERS, READS, TRACES, cache_folder, computed_by
from precaudit.cli import run
from precaudit.diagnosis.evidence import kept
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions as TraceOptions
from precaudit.recording.tracing.trace import trace
from precaudit.references.cache import References
from precaudit.references.comparison.compare import CompareOptions, compare
from precaudit.references.textbook import pieces
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.lines import encode
from precaudit.schema.selection import Selection

TEXT = "def f(x):\n    return x + 1"


def recorded(folder, prompts=(TEXT,)):
    given = [Prompt(id=f"p{i}", prompt=text) for i, text in enumerate(prompts)]
    select = Selection.parse(layers="1", points="v,logits", phases="prefill,decode")
    return trace(load("tiny", "bf16", None, "cpu"), folder / "run", given, select, TraceOptions(1, force=True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caching")
    made = recorded(folder)
    return folder, made, compare(made, options=CompareOptions(cache=folder / "cache", fresh=True))


def lines(found):
    return [encode(e) for e in found.errors]


def altered(path, change):
    """Write what ``change`` makes of a file's values under an honest header, and the digest that was there."""
    data = path.read_bytes()
    line, rest = data.split(b"\n", 1)
    header = msgspec.json.decode(line)
    x = change(np.frombuffer(rest[:-16], header["dtype"]).reshape(header["shape"]))
    line = msgspec.json.encode(header | {"dtype": x.dtype.str, "shape": x.shape})
    path.write_bytes(line + b"\n" + x.tobytes() + data[-16:])


def scaled(path):
    altered(path, lambda x: x * 1.01)


def narrowed(path):
    altered(path, lambda x: x.astype(np.float16).astype(np.float64))


def reshaped(path):
    altered(path, lambda x: x[:1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("damage", [scaled, narrowed, reshaped, flipped, cut])
def test_a_damaged_reference_is_computed_again_and_said(compared, damage):
    folder, made, first = compared
    files = sorted((folder / "cache").glob("*/*.fp64"))
    assert {p.name.split(".")[-2 if "logits" not in p.name else 0] for p in files} == {"v", "logits"}
    for path in files:
        damage(path)
    again = compare(made, options=CompareOptions(cache=folder / "cache", fresh=True))
    assert lines(again) == lines(first)
    assert any("was damaged and is computed again" in n for n in again.notes)
    healed = compare(made, options=CompareOptions(cache=folder / "cache", fresh=True))
    assert not [n for n in healed.notes if "damaged" in n]


def test_the_key_holds_what_reads_and_computes(tmp_path, monkeypatch):
    root = tmp_path / "precaudit"
    for name in ("models/checkpoints/gguf_files.py", "models/configs/huggingface.py", "models/numpy_decoder/model.py",
                 "numbers/formats.py", "references/textbook/local.py", "schema/limits/limits.toml",
                 "schema/policies/bf16.toml", "reports/tables.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one")
    monkeypatch.setattr(caching.resources, "files", lambda _: root)

    def keys():
        computed_by.cache_clear()
        return computed_by(READS), computed_by(COMPARES)

    before = keys()
    for name, changes in (
        ("models/checkpoints/gguf_files.py", (True, True)), ("models/configs/huggingface.py", (True, True)),
        ("models/numpy_decoder/model.py", (True, True)), ("numbers/formats.py", (True, True)),
        ("schema/policies/bf16.toml", (True, True)),
        ("references/textbook/local.py", (False, True)), ("schema/limits/limits.toml", (False, True)),
        ("reports/tables.py", (False, False)),
    ):  # fmt: skip
        (root / name).write_text("two")
        after = keys()
        assert tuple(a != b for a, b in zip(before, after, strict=True)) == changes, name
        before = after
    monkeypatch.setattr(caching, "numerics", lambda: ("another BLAS",))
    assert all(a != b for a, b in zip(before, keys(), strict=True))
    computed_by.cache_clear()


@cache
def imported(path, root):
    """Return the files of the package that a file imports, those of functions too; not the package's own first file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("precaudit."):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom) and node.module == "precaudit":
            names |= {f"precaudit.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("precaudit.")}
    places = [root.joinpath(*name.split(".")[1:]) for name in names]
    files = [file for at in places for file in (at.with_suffix(".py"), at / "__init__.py")]
    return {file for file in files if file.is_file()}


@pytest.mark.parametrize("sources", [READS, TRACES, COMPARES, DIAGNOSES])
def test_a_key_holds_all_that_its_source_imports(sources):
    root = Path(caching.__file__).parent
    assert all((root / name).exists() for name in sources)
    own = [file for name in sources for file in ((root / name).rglob("*.py") if "." not in name else [root / name])]
    free = {root / name for name in NO_NUMBERS}
    lacks = {
        f"{file.relative_to(root)}, of {path.relative_to(root)}"
        for path in own for file in imported(path, root) - set(own) - free
    }  # fmt: skip
    assert not lacks


def test_the_key_holds_the_libraries_that_compile(monkeypatch):
    before = computed_by(READS)
    real = caching.metadata.version
    for changed in ("jax", "numba"):
        computed_by.cache_clear()
        monkeypatch.setattr(caching.metadata, "version", lambda name, c=changed: "9" if name == c else real(name))
        assert computed_by(READS) != before
    computed_by.cache_clear()


def test_records_of_other_code_are_not_reused(compared, monkeypatch):
    folder, made, _ = compared
    options = CompareOptions(cache=folder / "cache")
    computed = []
    monkeypatch.setattr(
        "precaudit.references.comparison.compare._compute",
        lambda *a, real=compare.__wrapped__.__globals__["_compute"]: computed.append(1) or real(*a),
    )
    compare(made, options=options)
    assert not computed
    monkeypatch.setattr("precaudit.recording.runs.written.computed_by", lambda _: "0" * 64)
    compare(made, options=options)
    assert computed


def test_what_diagnosis_kept_holds_only_as_it_was(compared, monkeypatch):
    _, made, _ = compared
    one = [kept.Kept(run="a", code="b", files={})]
    kept.write_kept(made.folder, "shares.jsonl", one)
    assert kept.read_kept(made.folder, "shares.jsonl", kept.Kept) == tuple(one)
    path = made.folder / "shares.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"'))
    assert kept.read_kept(made.folder, "shares.jsonl", kept.Kept) is None
    kept.write_kept(made.folder, "shares.jsonl", one)
    monkeypatch.setattr(kept, "computed_by", lambda _: "other")
    assert kept.read_kept(made.folder, "shares.jsonl", kept.Kept) is None


def test_the_cache_is_where_the_user_says_or_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path))
    assert cache_folder("references") == tmp_path / "references"
    monkeypatch.delenv("PRECAUDIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    assert cache_folder("references") == tmp_path / "own" / "precaudit" / "references"


def test_the_least_recently_used_go_first(tmp_path):
    import os

    for i, letter in enumerate("abc"):
        folder = tmp_path / (letter * 32)
        folder.mkdir()
        (folder / "x").write_bytes(b"0" * 100)
        os.utime(folder, (i, i))
    caching.prune(tmp_path, {tmp_path / ("a" * 32)}, limit=250)
    assert sorted(p.name[0] for p in tmp_path.iterdir()) == ["a", "c"]


@pytest.mark.turn  # 4 s
def test_without_a_cache_nothing_is_kept(compared, tmp_path, monkeypatch, capfd):
    _, made, _ = compared
    monkeypatch.setenv("PRECAUDIT_CACHE", str(tmp_path / "cache"))
    assert run(["compare", str(made.folder), "--no-cache", "--layers", "1"]) == 0
    assert not (tmp_path / "cache" / "references").exists()
    assert "references are not kept" not in capfd.readouterr().out
    settings = 'subject = "tiny"\nprompts = "p.jsonl"\npoints = "v,logits"\nphases = "prefill"\nformula = false\n'
    (tmp_path / "precaudit.toml").write_text(settings)
    (tmp_path / "p.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    audit = ["audit", "--config", str(tmp_path / "precaudit.toml")]
    assert run([*audit, "--no-cache"]) == 0
    assert not (tmp_path / "cache" / "references").exists()
    assert run(audit) == 0
    assert (tmp_path / "cache" / "references").exists()


def test_many_threads_may_write_one_reference(tmp_path):
    config = load("tiny", device="cpu").config
    place = References.of(tmp_path, "w", config, (1, 2, 3))
    x, rows = np.random.default_rng(0).normal(size=(3, 512)), np.arange(3)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: place.save(0, "v", rows, x), range(200)))
    np.testing.assert_array_equal(place.load(0, "v", rows), x)
    assert [p.name for p in place.folder.iterdir()] == ["0.v.fp64"]
    assert not place.said


def test_a_reference_is_read_as_no_other_s(tmp_path):
    """Files that changed places, between layers or between sequences, are whole and of something else."""
    config = load("tiny", device="cpu").config
    here, there = (References.of(tmp_path, "w", config, tokens) for tokens in ((1, 2, 3), (1, 2, 4)))
    rows = np.arange(3)
    for place in (here, there):
        for layer in (0, 1):
            place.save(layer, "v", rows, np.full((3, 2), float(layer)))
    first, second = here.folder / "0.v.fp64", here.folder / "1.v.fp64"
    first.rename(tmp_path / "held")
    second.rename(first)
    (tmp_path / "held").rename(second)
    shutil.copy(here.folder / "0.v.fp64", there.folder / "1.v.fp64")
    assert all(here.load(layer, "v", rows) is None for layer in (0, 1))
    assert there.load(1, "v", rows) is None
    np.testing.assert_array_equal(there.load(0, "v", rows), np.zeros((3, 2)))
    assert [text.endswith("was damaged and is computed again") for text in (*here.said, *there.said)] == [True] * 3


def test_references_are_read_without_parsing_python(tmp_path, monkeypatch):
    # CPython 3.11 cannot do that in two threads at once: a compare of SmolLM2 ended with a SystemError of ast's
    config = load("tiny", device="cpu").config
    place = References.of(tmp_path, "w", config, (1, 2, 3))
    rows = np.arange(3)
    stored = {"q": np.arange(6.0).reshape(3, 1, 2), "v": np.arange(6, dtype=np.float32), "k": np.zeros((0, 4))}
    for point, x in stored.items():
        place.save(0, point, rows, x)
    monkeypatch.setattr(ast, "parse", None)
    for point, x in stored.items():
        found = place.load(0, point, rows)
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(found, x)
    assert not place.said


def test_prompts_of_the_same_tokens_are_computed_once(tmp_path, monkeypatch):
    made = recorded(tmp_path, (TEXT, "import os", TEXT, TEXT))
    sequences = []
    real = pieces.forward

    def counted(model, given, *rest, **more):
        sequences.append(len(given.ids))
        return real(model, given, *rest, **more)

    for module in ("pieces", "pooled"):
        monkeypatch.setattr(f"precaudit.references.textbook.{module}.forward", counted)
    found = compare(made, options=CompareOptions(cache=tmp_path / "cache"))
    assert set(sequences) == {2}
    by = {p: [re.sub(rb'"prompt":"p\d"', b"", encode(e)) for e in found.errors if e.prompt == p] for p in ("p0", "p3")}
    assert by["p0"] == by["p3"]


def keeping(folder):
    """Return the environment of a process that keeps all it compiles in a folder."""
    return {k: x for k, x in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"PRECAUDIT_CACHE": str(folder)}


def test_what_numba_compiles_is_kept_in_the_users_cache_folder(tmp_path):
    """Beside the source it outlives an uninstall, and Python takes what is left of the folder for the package."""
    code = (
        "import numba\n"
        "from precaudit.numbers import rounding_kernels\n"
        "from precaudit.schema.metrics import _moments_kernel, _residue_kernel\n"
        "from precaudit.models.numpy_decoder import stepwise\n"
        "for module in (rounding_kernels, _moments_kernel, _residue_kernel, stepwise):\n"
        "    for made in vars(module).values():\n"
        "        if hasattr(made, 'stats') and made.__module__ == module.__name__ and made.stats.cache_path:\n"
        "            print(made.stats.cache_path)\n"
        "assert not numba.config.CACHE_DIR\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=keeping(tmp_path), check=True, capture_output=True, text=True
    )
    paths = found.stdout.split()
    assert len(paths) >= 15
    assert all(Path(path).is_relative_to(tmp_path / "numba") for path in paths)


KERNEL = """
import resource, signal, sys
import numpy as np
from precaudit.numbers.rounding_kernels import bfloat16
if sys.argv[1:] == ["full"]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write to a file fails
out = np.empty(2)
bfloat16(np.array([1 / 3, 1.0]), out)
print(*out)
"""


def kernel(folder, *arguments):
    """Round 1/3 to bfloat16 in a process whose compiled functions are kept in a folder; return what it said."""
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, *arguments], env=keeping(folder), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0.333984375", "1.0"]  # 171 · 2^-9
    return done.stderr


def test_a_disk_that_takes_no_compiled_function_is_named_and_stops_nobody(tmp_path):
    said = kernel(tmp_path, "full")
    assert f"RuntimeWarning: {tmp_path / 'numba'}: compiled functions are not kept: File too large" in said
    assert said.count("are not kept") == 1
    assert not list(tmp_path.rglob("*.nbi"))


def test_a_damaged_compiled_function_is_compiled_again(tmp_path):
    assert not kernel(tmp_path)
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:9])
    assert f"{tmp_path / 'numba'}: a compiled function was damaged and is compiled again" in kernel(tmp_path)
    assert not kernel(tmp_path)
