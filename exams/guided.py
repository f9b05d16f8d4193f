"""Broken files found by coverage (atheris, libFuzzer): ``make fuzz`` reads a hundred thousand of them.

The first byte of an input chooses a file of the corpus (exams/fuzz.py), the rest is what it holds; sound files
are the seeds. An input that is neither read nor refused by a message that names the file ends the run, and is kept.
"""

import argparse
import atexit
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["precaudit"]):
    from exams.fuzz import Corpus, outcome

SKIPPED = ("model.safetensors", "tokenizer.json")  # the readers of libraries, which are not instrumented
LARGEST = 1 << 16  # bytes of an input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after so long; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="exams/results/fuzz-", help="where a file that is read wrongly is kept")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    corpus = Corpus(folder)
    files = [f for f in corpus.files if f[1] not in SKIPPED]
    (folder / "seeds").mkdir()
    for i, (owner, name, _, _) in enumerate(files):
        data = (folder / owner / name if name else folder / owner).read_bytes()
        if len(data) < LARGEST:
            (folder / "seeds" / str(i)).write_bytes(bytes([i]) + data)

    def one(data: bytes) -> None:
        if not data:
            return
        owner, name, _, read = files[data[0] % len(files)]
        path = folder / owner / name if name else folder / owner
        with corpus.kept(owner, path):
            path.write_bytes(data[1:])
            found = outcome(folder / owner, Path(name or owner).name, read)
        if found not in ("loaded", "refused"):
            raise AssertionError(f"{owner} {name}: {found}")

    Path(given.keep).parent.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={given.runs}", f"-max_total_time={given.seconds}", f"-seed={given.seed}", f"-max_len={LARGEST}"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={given.keep}", str(folder / "seeds")], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
