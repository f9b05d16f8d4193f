"""Broken files of models, runs and users: each is an error that names the file, or read (``make fuzz``).

Bytes are flipped, cut, doubled and overwritten, values of JSON and TOML exchanged for others. A file may not crash the
reader, hang it, make it hold much more memory than the file has bytes, or make it write. Every file is read as the
commands read it: a run is opened, its tensors read, judged and reported. ``guided.py`` looks for files by coverage.
"""

import argparse
import copy
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from precaudit.errors import UserError
from precaudit.judging.baselines import freeze
from precaudit.judging.gate import gate
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.checkpoints.names import read_layout
from precaudit.numbers.arrays import widen
from precaudit.recording.dumps.importing import import_dump
from precaudit.recording.dumps.runs import open_imported
from precaudit.recording.runs.hashes import file_hash
from precaudit.recording.runs.reader import open_run
from precaudit.recording.runs.written import recall
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.reports.comparison import comparison_page
from precaudit.reports.judgement import verdict_message
from precaudit.reports.pages import as_markdown
from precaudit.schema.policies import load_policy
from precaudit.schema.prompts import Prompt, read_prompts
from precaudit.schema.selection import Selection
from precaudit.workflows.audit import read_config
from tests.helpers.gguf_files import write_gguf
from tests.helpers.paths import FIXTURES

TINY = Path("precaudit/bundled/tiny")
SECONDS = 20  # a reader that takes longer hangs
MEMORY = 1 << 30  # bytes of address space it may take beyond what it had
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 7, 2**31, 2**63, 1e308, -0.5, "", "x", "nan", [], [0], [-1], {}, {"a": 1}, "\ud800", 10**30,
)  # fmt: skip


def flipped(data: bytes, r: random.Random) -> bytes:
    """Change bytes: a few anywhere, or more at the front, where headers are."""
    out = bytearray(data)
    front = min(len(out), r.choice((16, 200, 4000, len(out))))
    for _ in range(r.choice((1, 1, 2, 8, 64))):
        out[r.randrange(front)] = r.choice((0, 0xFF, 0x80, r.randrange(256)))
    return bytes(out)


def cut(data: bytes, r: random.Random) -> bytes:
    """Leave out, double or insert a piece."""
    a, b = sorted((r.randrange(len(data)), r.randrange(len(data))))
    return r.choice((data[:a], data[:a] + data[b:], data[:b] + data[a:], data[:a] + r.randbytes(40) + data[a:]))


def exchanged(data: bytes, r: random.Random) -> bytes:
    """Replace, drop or rename a value somewhere in a JSON text."""
    tree = json.loads(data)
    for _ in range(r.choice((1, 1, 2, 4))):
        node: Any = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = r.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and r.random() < 0.7:
                node = node[key]
                continue
            if r.random() < 0.2:
                del node[key]
            elif r.random() < 0.1 and isinstance(node, dict):
                node[r.choice(("", "x", f"{key}s", "__proto__"))] = node.pop(key)
            else:
                node[key] = copy.deepcopy(r.choice(VALUES))
            break
    return json.dumps(tree).encode("utf-8", "replace")


def header(data: bytes, r: random.Random) -> bytes:
    """Exchange values in a safetensors header, its length kept true."""
    length = int.from_bytes(data[:8], "little")
    changed = exchanged(data[8 : 8 + length], r)
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


@contextmanager
def limited() -> Iterator[None]:
    """Bound time and address space."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, before[1]))
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def words(data: bytes, r: random.Random) -> bytes:
    """Exchange a number, name or word of a text for something else (TOML, and lines of JSON)."""
    text = data.decode("utf-8", "replace")
    found = list(re.finditer(r"[\w.+-]+", text)) or [re.match("", text)]
    for _ in range(r.choice((1, 1, 2))):
        at = r.choice(found)
        assert at is not None
        if at.end() <= len(text):
            text = text[: at.start()] + r.choice(WORDS) + text[at.end() :]
    return text.encode("utf-8", "replace")


def line(data: bytes, r: random.Random) -> bytes:
    """Exchange values in one line of JSON, or take, double or move the line."""
    lines = data.splitlines(keepends=True)
    i = r.randrange(len(lines))
    other = exchanged(lines[i], r) + b"\n"
    changed = r.choice(([other], [other], [other], [], [lines[i]] * 2, [other, lines[i]]))
    return b"".join([*lines[:i], *changed, *lines[i + 1 :]])


def read_model(path: Path) -> None:
    """Open a model, read every tensor and make its tokenizer."""
    opened = open_checkpoint(str(path))
    for name in opened.tensors.shapes():
        x = opened.tensors.read_tensor(name)
        assert x.shape == opened.tensors.shapes()[name]
        with np.errstate(all="ignore"):
            widen(x).sum()
    if (path / "tokenizer.json").is_file() if path.is_dir() else False:
        opened.make_tokenizer().encode("a b")


def sealed(folder: Path) -> None:
    """Set the hashes of a run's files to what they are now, as whoever altered them would."""
    hashed = {
        "run.json": ("hashes", ("prompts.jsonl", "steps.jsonl", "points.jsonl")),
        "compare.json": ("hashes", ("errors.jsonl", "prefill_decode.jsonl")),
    }
    for name, (key, files) in hashed.items():
        try:
            raw = json.loads((folder / name).read_bytes())
            raw[key] |= {file: file_hash(folder / file) for file in files}
            raw |= {"run": file_hash(folder / "run.json")} if name == "compare.json" else {}
            (folder / name).write_text(json.dumps(raw))
        except (ValueError, TypeError, KeyError, AttributeError):
            return


def read_run(path: Path) -> None:
    """Open a run whose hashes hold, read its tensors, judge it and render its report."""
    sealed(path)
    run = open_run(path)
    for point in run.points:
        run.tensor(point)
    as_markdown(comparison_page(recall(path)), 1, None)
    for verdict in gate(path).verdicts:
        verdict_message(verdict)


def read_baselined(path: Path) -> None:
    """Judge the run beside a baseline."""
    gate(path.parent / "run", baseline=path)


def read_budgeted(path: Path) -> None:
    """Judge the run beside budgets."""
    gate(path.parent / "run", budgets=path)


def read_policy(path: Path) -> None:
    """Read a policy file."""
    load_policy(str(path))


def read_dumped(path: Path) -> None:
    """Import a dump and read it again."""
    with tempfile.TemporaryDirectory() as name:
        read_imported(import_dump(path, Path(name) / "run", path / "names.toml").folder)


def read_imported(path: Path) -> None:
    """Open an imported run and read its tensors."""
    run = open_imported(path)
    for t in run.record.tensors:
        run.tensor(t)


def outcome(path: Path, named: str, read: Callable[[Path], object] = read_model) -> str:
    """Read what may be broken; return what happened: loaded, refused, or what went wrong."""
    listing = sorted(p.name for p in path.parent.rglob("*"))
    try:
        with limited():
            read(path)
        found = "loaded"
    except UserError as error:
        found = "refused" if named in str(error) or path.name in str(error) else f"does not name the file: {error}"
    except BaseException as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
    return found if sorted(p.name for p in path.parent.rglob("*")) == listing else "wrote a file"


Way = Callable[[bytes, random.Random], bytes]
Reader = Callable[[Path], object]
WORDS = ("", "0", "-1", "nan", "inf", "1e999", "true", "99999999999999999999", '"x"', "[", "]", "{", "=", "x", "..")
PROMPTS = """{"id": "a", "prompt": "x = 1"}
{"id": "b", "tokens": [1, 2, 3]}
{"id": "c", "messages": [{"role": "user", "content": "hi"}]}
"""
POLICY = """scores = "float32"
softmax = "float32"
matmul = "highest"
"""
BUDGETS = """[[budget]]
points = ["attn_out"]
layers = "0:2"
metric = "rel_l2"
limit = 0.5
why = "a reason"

[[budget]]
unknown = "allow"
points = ["logits"]
why = "another"
"""
CONFIG = """subject = "tiny"
policy = "bf16"
layers = "0"
decode_steps = 1

[set]
scores = "float32"
"""
NAMES = """checkpoint = "items"
layout = "maxtext-llama"

[config]
query_scale = 1.0

[tensors]
"model.norm.weight" = { path = "decoder/norm", axes = "d -> d" }
"""


MAP = """case = "a"
tokens = "ids"
ignore = ["names"]

[points]
q = { name = "layers/{i}", axes = "1 t (h k) -> t h k", sizes = { h = 2 }, dtype = "bfloat16" }
k = "more/{i}"
v = { name = "rest/{i}", axes = "h t k -> t h k" }
logits = "{case}/{call}/logits"
"""
DUMPS = 1_000_000  # the first seed of broken dumps: those of other files stay what they were


def sound_dump(folder: Path) -> None:
    """Write arrays of every kind that a dump may hold, and the map of their names."""
    draw = np.random.default_rng(0)
    (folder / "layers").mkdir(parents=True)
    for i in range(2):
        x = draw.standard_normal((1, 5, 8)).astype(np.float32).view(np.uint32) >> 16
        np.save(folder / "layers" / f"{i}.npy", x.astype(np.uint16))
    np.savez(folder / "more.npz", **{str(i): draw.standard_normal((5, 2, 4)) for i in range(2)})
    save_file({str(i): draw.standard_normal((2, 5, 4)) for i in range(2)}, folder / "rest.safetensors")
    np.save(folder / "ids.npy", np.arange(5))
    row = {"prompt": "a", "step": 0, "logits": draw.standard_normal((5, 7)).tolist(), "attn_ref_mae": 0.04}
    (folder / "audit.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "names.toml").write_text(MAP)


def sound_run(folder: Path) -> None:
    """Trace and compare two short prompts of a fixture."""
    prompts = [Prompt(id=name, tokens=tuple(range(1, n))) for name, n in (("a", 9), ("b", 5))]
    subject = load(str(FIXTURES / "llama-gqa"), "bf16", device="cpu")
    select = Selection.parse(points="attn_out,logits", phases="prefill,decode")
    run = trace(subject, folder, prompts, select, TraceOptions(decode_steps=1))
    compare(run, options=CompareOptions(accum=(), cache=folder.parent / "refs"))


class Corpus:
    """Sound files of every kind in a folder, mutated one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("llama-gqa", "gemma3-gqa", "phi3-partial"):
            shutil.copytree(FIXTURES / name, folder / name)
        shutil.copytree(TINY, folder / "tiny")
        write_gguf(folder / "llama.gguf", "llama", "llama-gqa")
        write_gguf(folder / "gemma.gguf", "gemma3", "gemma3-gqa")
        sound_run(folder / "run")
        (folder / "prompts.jsonl").write_text(PROMPTS)
        (folder / "policy.toml").write_text(POLICY)
        (folder / "budgets.toml").write_text(BUDGETS)
        (folder / "precaudit.toml").write_text(CONFIG)
        freeze(recall(folder / "run"), folder / "baseline.jsonl")
        (folder / "names").mkdir()
        (folder / "names" / "names.toml").write_text(NAMES)
        raw: tuple[Way, ...] = (flipped, cut)
        json_, lines, toml = (exchanged, *raw), (line, *raw), (words, *raw)
        runs = ("prompts.jsonl", "points.jsonl", "steps.jsonl", "errors.jsonl", "prefill_decode.jsonl", "compare.json")
        self.files: list[tuple[str, str, tuple[Way, ...], Reader]] = [
            *((name, "config.json", json_, read_model) for name in ("llama-gqa", "gemma3-gqa", "phi3-partial")),
            *((name, "model.safetensors", (header, *raw), read_model) for name in ("llama-gqa", "phi3-partial")),
            ("tiny", "tokenizer.json", json_, read_model), ("llama.gguf", "", raw, read_model),
            ("gemma.gguf", "", raw, read_model),
            *(("run", name, lines, read_run) for name in runs if (folder / "run" / name).is_file()),
            ("run", "run.json", json_, read_run),
            ("run", str(next((folder / "run" / "tensors").rglob("*.safetensors")).relative_to(folder / "run")),
             (header, *raw), read_run),
            ("prompts.jsonl", "", lines, read_prompts), ("policy.toml", "", toml, read_policy),
            ("budgets.toml", "", toml, read_budgeted), ("precaudit.toml", "", toml, read_config),
            ("baseline.jsonl", "", lines, read_baselined), ("names", "names.toml", toml, read_layout),
        ]  # fmt: skip

        sound_dump(folder / "dump")
        import_dump(folder / "dump", folder / "imported", folder / "dump" / "names.toml")
        self.dumps: list[tuple[str, str, tuple[Way, ...], Reader]] = [
            ("dump", "layers/0.npy", raw, read_dumped), ("dump", "more.npz", raw, read_dumped),
            ("dump", "rest.safetensors", (header, *raw), read_dumped), ("dump", "ids.npy", raw, read_dumped),
            ("dump", "audit.jsonl", lines, read_dumped), ("dump", "names.toml", toml, read_dumped),
            ("imported", "run.json", json_, read_imported),
            ("imported", "tensors/0.safetensors", (header, *raw), read_imported),
        ]  # fmt: skip

    def case(self, seed: int) -> tuple[str, str]:
        """Mutate one file, read what it belongs to, put it back; return (what was mutated, outcome)."""
        r = random.Random(seed)
        files = self.files if seed < DUMPS else self.dumps
        owner, name, ways, read = files[seed % len(files)]
        path = self.folder / owner / name if name else self.folder / owner
        way = r.choice(ways)
        with self.kept(owner, path):
            path.write_bytes(way(path.read_bytes(), r))
            short = f"{owner}/{Path(name).name}" if name else owner
            return f"{short} {way.__name__}", outcome(self.folder / owner, Path(name or owner).name, read)

    @contextmanager
    def kept(self, owner: str, path: Path) -> Iterator[None]:
        """Put a file, and the hashes of a run, back as they were."""
        beside = [path.parent / n for n in ("run.json", "compare.json")] if owner == "run" else []
        sound = {p: p.read_bytes() for p in (path, *beside) if p.is_file()}
        try:
            yield
        finally:
            for p, data in sound.items():
                p.write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(Path(name))
        dumps = range(DUMPS + given.first, DUMPS + given.first + given.count // 10)
        for seed in (*range(given.first, given.first + given.count), *dumps):
            what, found = corpus.case(seed)
            if found not in ("loaded", "refused"):
                print(f"seed {seed}, {what}: {found}")
                found = "WRONG"
            counts[what, found] += 1
    print(f"{'file and change':32} loaded refused wrong")
    for what in sorted({w for w, _ in counts}):
        print(f"{what:32} {counts[what, 'loaded']:6} {counts[what, 'refused']:7} {counts[what, 'WRONG']:5}")
    wrong = sum(n for (_, found), n in counts.items() if found == "WRONG")
    print(f"{counts.total()} files, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
