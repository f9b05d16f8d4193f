"""Broken model files: each is an error that names the file, or a correct load (``make fuzz``: ten thousand of them).

Bytes are flipped, cut, doubled and overwritten, JSON values exchanged for others. A file may not crash the reader, hang
it, make it hold much more memory than the file has bytes, or make it write.
"""

import argparse
import json
import random
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

from precaudit.checkpoints import open_checkpoint
from precaudit.errors import UserError
from precaudit.formats import widen
from tests.conftest import FIXTURES
from tests.test_files import write_gguf

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
                node[key] = r.choice(VALUES)
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


def read(path: Path) -> None:
    """Open a model, read every tensor and make its tokenizer."""
    opened = open_checkpoint(str(path))
    for name in opened.tensors.shapes():
        x = opened.tensors.read(name)
        assert x.shape == opened.tensors.shapes()[name]
        with np.errstate(all="ignore"):
            widen(x).sum()
    if (path / "tokenizer.json").is_file() if path.is_dir() else False:
        opened.make_tokenizer().encode("a b")


def outcome(path: Path, named: str) -> str:
    """Read a model that may be broken; return what happened: loaded, refused, or what went wrong."""
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


class Corpus:
    """Sound files of every kind in a folder, mutated one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("llama-gqa", "gemma3-gqa", "phi3-partial"):
            shutil.copytree(FIXTURES / name, folder / name)
        shutil.copytree(TINY, folder / "tiny")
        write_gguf(folder / "llama.gguf", "llama", "llama-gqa")
        write_gguf(folder / "gemma.gguf", "gemma3", "gemma3-gqa")
        any_bytes: tuple[Callable[..., bytes], ...] = (flipped, cut)
        self.files = [
            *((name, "config.json", (exchanged, *any_bytes)) for name in ("llama-gqa", "gemma3-gqa", "phi3-partial")),
            *((name, "model.safetensors", (header, *any_bytes)) for name in ("llama-gqa", "phi3-partial")),
            ("tiny", "tokenizer.json", (exchanged, *any_bytes)),
            ("llama.gguf", "", any_bytes), ("gemma.gguf", "", any_bytes),
        ]  # fmt: skip

    def case(self, seed: int) -> tuple[str, str]:
        """Mutate one file, read the model, put the file back; return (what was mutated, outcome)."""
        r = random.Random(seed)
        model, name, ways = self.files[seed % len(self.files)]
        path = self.folder / model / name if name else self.folder / model
        sound = path.read_bytes()
        way = r.choice(ways)
        path.write_bytes(way(sound, r))
        try:
            return f"{name or model} {way.__name__}", outcome(self.folder / model, name or model)
        finally:
            path.write_bytes(sound)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(Path(name))
        for seed in range(given.first, given.first + given.count):
            what, found = corpus.case(seed)
            if found not in ("loaded", "refused"):
                print(f"seed {seed}, {what}: {found}")
                found = "WRONG"
            counts[what, found] += 1
    print(f"{'file and change':32} loaded refused wrong")
    for what in sorted({w for w, _ in counts}):
        print(f"{what:32} {counts[what, 'loaded']:6} {counts[what, 'refused']:7} {counts[what, 'WRONG']:5}")
    wrong = sum(n for (_, found), n in counts.items() if found == "WRONG")
    print(f"{given.count} files, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
