"""Programs that others wrote, each watched by its own unedited command line (``make watch``).

Every row is ``precaudit watch --gate --function NAME -o RUN -- python exams/watched/SCRIPT.py``: a script that knows
nothing of precaudit, on small random weights, in an environment made of ``exams/watched/ENVIRONMENT.txt``. Prints
docs/watched.md, and writes it with --write; exit 1 unless every row ends as it is known to.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from precaudit import gate
from precaudit.judging.verdicts import Verdict
from precaudit.recording.runs.programs import open_program_run

ROOT = Path(__file__).parent.parent
WATCHED = ROOT / "exams" / "watched"
FOLDER = ROOT / "build" / "watched"
PYTHON = {"maxtext": "python3.12"}  # it asks for 3.12; of the others this one
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@dataclass(frozen=True)
class Row:
    """A watched command: the script, its environment, which calls of which function, and what is known of them.

    ``code``: the exit code that is known; ``says``: what a reader should know of it.
    """

    script: str
    environment: str
    function: str
    calls: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    code: int = 0
    says: str = ""

    @property
    def name(self) -> str:
        """The row's name: its script and function."""
        return f"{self.script}.{self.function}"

    def options(self) -> list[str]:
        """Return what is given to ``watch`` but for the folder of the run."""
        return ["--gate", "--function", self.function, *(("--calls", self.calls) if self.calls else ())]

    def command(self) -> str:
        """Return the command line, as it is typed."""
        words = ["precaudit", "watch", *self.options(), "-o", "RUN", "--", "python", f"exams/watched/{self.script}.py"]
        return " ".join([*(f"{k}={v}" for k, v in self.variables.items()), *words])


ZERO = "a gradient that is 0 in exact arithmetic is rounding alone here, and Adam divides it by its size"
ROWS = (
    Row("equinox_training", "light", "train_step", "1:3"),
    Row("nnx_training", "light", "train_step", "1:3", says=f"the largest size is Adam's: {ZERO} (keys' biases)"),
    Row("nnx_devices", "light", "train_step", "1:3", DEVICES),
    Row("optax_scan", "light", "epoch", "1:3"),
    Row("optax_lbfgs", "light", "step", "1:3", code=3, says="a line search has branches that these calls do not take"),
    Row("tunix_sampler", "tunix", "_prefill_fn"),
    Row("tunix_sampler", "tunix", "_decode_fn"),
    Row("tunix_peft", "tunix", "_train_step", "1"),
    Row("tunix_grpo", "tunix", "_train_step", "1",
        says="the largest size is a loss that is 0 in exact arithmetic: advantages of a group add up to 0"),
    Row("keras_generate", "keras", "compiled_generate_function"),
    Row("keras_fit", "keras", "train_step", "1"),
    Row("maxtext_train", "maxtext", "train_step", "1"),
    Row("maxtext_decode", "maxtext", "_generate_jit", "2:5"),
)  # fmt: skip


class Result(msgspec.Struct):
    """What was seen of a row; ``unknown``: {why: records}, ``failing``: verdicts in words."""

    name: str
    functions: int = 0
    points: int = 0
    records: int = 0
    verdicts: dict[str, int] = {}
    code: int = 0
    seconds: float = 0.0
    gigabytes: float = 0.0
    size: str = ""
    unknown: dict[str, int] = {}
    failing: tuple[str, ...] = ()
    versions: str = ""
    error: str = ""


def environment(name: str, folder: Path) -> Path:
    """Return the Python of an environment, made of its list where that is another than it was made of."""
    wanted, place = WATCHED / f"{name}.txt", folder / name
    mark, said = place / "made", hashlib.sha256(wanted.read_bytes()).hexdigest()
    python = place / "bin" / "python"
    if mark.is_file() and mark.read_text() == said:
        return python
    base = shutil.which(PYTHON[name]) if name in PYTHON else sys.executable
    if base is None:
        raise FileNotFoundError(f"{name} needs {PYTHON[name]}, which is not on PATH")
    subprocess.run([base, "-m", "venv", "--clear", place], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", ROOT, "-r", wanted]
    subprocess.run(pip, check=True)
    mark.write_text(said)
    return python


def watched(row: Row, python: Path, folder: Path) -> Result:
    """Watch a row's command; return what was seen."""
    run, seen, log = folder / "run", folder / "functions.jsonl", folder / "log.txt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [str(python), "-m", "precaudit", "watch", *row.options(), "--functions", str(seen), "-o", str(run), "--"]
    words += [str(python), f"exams/watched/{row.script}.py"]
    began = time.perf_counter()
    with log.open("wb") as out:
        child = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **row.variables})
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    found = Result(row.name, code=child.returncode, seconds=time.perf_counter() - began, gigabytes=used.ru_maxrss / 1e6)
    if seen.is_file():
        each = [msgspec.json.decode(line) for line in seen.read_bytes().splitlines()]
        found.functions = sum(f["calls"] > 0 for f in each)
    if not (run / "compared.json").is_file():
        found.error = next((x for x in reversed(log.read_text().splitlines()) if "precaudit" in x), "nothing was said")
        return found
    judged, opened = gate(run), open_program_run(run)
    broken, lines = list(judged.verdicts), log.read_text().splitlines()
    found.points = len(opened.record.points)
    found.verdicts = said_verdicts(lines)
    found.records = sum(found.verdicts.values())
    found.size = next((x.removeprefix("size: ") for x in lines if x.startswith("size: ")), "")
    found.unknown = dict(Counter(_why(v) for v in broken if v.status == "unknown"))
    found.failing = tuple(
        f"{v.status}: {_place(v)} [{v.kind}] {v.text or v.metric}" for v in broken if v.status not in KNOWN
    )[:5]
    found.versions = ", ".join(f"{n} {v}" for n, v in opened.record.versions.items() if n == "jax")
    return found


def _place(verdict: Verdict) -> str:
    return verdict.point if verdict.layer is None else f"layer {verdict.layer} {verdict.point}"


def said_verdicts(lines: Sequence[str]) -> dict[str, int]:
    """Return {status: how many} that ``gate`` said last of a run."""
    told = [x.removeprefix("verdicts: ") for x in lines if x.startswith("verdicts: ")][-1:]
    each = (part.split(" ", 1) for text in told for part in text.split(", "))
    return {status: int(n.replace(",", "")) for n, status in each}


KNOWN = ("pass", "unknown", "not run")


def _why(verdict: Verdict) -> str:
    return re.sub(r" \(\d+ such\)$", "", verdict.text or "")


def page(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of docs/watched.md."""
    yield from HEAD.splitlines()
    rows = {r.name: r for r in ROWS}
    for x in results:
        told = x.error or ", ".join(f"{n} {s}" for s, n in x.verdicts.items() if n)
        of = f"| {rows[x.name].script} | `{rows[x.name].function}` | {x.functions} | {x.points} | {x.records} "
        yield of + f"| {told} | {x.code} | {x.seconds:.0f} | {x.gigabytes:.1f} |"
    yield from ("", "Their commands, in the order of the table:", "", "```sh")
    yield from (rows[x.name].command() for x in results)
    yield from ("```", "", "What is unknown, or fails, and what else is to be said:", "")
    for x in results:
        name = f"{rows[x.name].script}, `{rows[x.name].function}`"
        for why, n in x.unknown.items():
            yield f"- {name}: {n} unknown: {why}"
        yield from (f"- {name}: {line}" for line in x.failing)
        if x.size:
            yield f"- {name}: " + " ".join(_sentences(x.size, rows[x.name].says))
    made = {rows[x.name].environment: x.versions for x in results if x.versions}
    yield from ("", "Made with: " + "; ".join(f"{name}.txt: {what}" for name, what in made.items()) + ".", *ABSENT)


def _sentences(size: str, says: str) -> Iterator[str]:
    """Yield what is said of sizes, and of the row, as sentences."""
    for part in filter(None, (*size.split("; "), says)):
        yield f"{part[0].upper() if part.startswith(('the ', 'a ')) else part[0]}{part[1:]}."


ABSENT = (
    "",
    "Not here: MaxText's `decode.py`. It imports `TokenizerType` of JetStream, and google-jetstream 0.2.2 has none.",
    "Its engine is called instead. transformers' `generate` is not here either: from 5.0 on it has no models in JAX,",
    "and precaudit needs 5.0.",
    "",
)
HEAD = """# Programs that others wrote, watched

`make watch` runs each by its own unedited command line, in an environment of its own (`exams/watched/*.txt`). The
weights are small and random, the device is a CPU.

- *Functions*: the jitted functions that were called.
- *Points*, *records* and *verdicts*: those in the run of the function's calls.
- *Exit*: the exit code of `precaudit watch --gate`.
- *s* and *GB*: for the whole command, recording, comparing and judging included, beside whatever else the machine did.

How to do it: [recipes](watch-recipes.md).

| script | function | functions | points | records | verdicts | exit | s | GB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> int:
    """Watch the rows that were asked for, print the page of all that were watched; 1 unless these end as known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose names hold this")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments and runs go")
    parser.add_argument("--write", type=Path, help="write the page here, too")
    parser.add_argument("--page", action="store_true", help="watch nothing: the page of what was watched last")
    asked = parser.parse_args()
    folder, right = asked.folder.resolve(), []
    for row in ROWS if not asked.page else ():
        if asked.only not in row.name:
            continue
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        try:
            found = watched(row, environment(row.environment, folder), folder / "rows" / row.name)
        except (OSError, subprocess.CalledProcessError) as error:
            found = Result(row.name, code=-1, error=str(error).splitlines()[0])
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        kept(folder, row).write_bytes(msgspec.json.encode(found))
        right.append(found.code == row.code)
        print(f"{row.name}: exit {found.code}, {found.verdicts} {found.error}", file=sys.stderr, flush=True)
    every = [kept(folder, row) for row in ROWS]
    text = "\n".join(page([msgspec.json.decode(p.read_bytes(), type=Result) for p in every if p.is_file()]))
    print(text)
    if asked.write is not None:
        asked.write.write_text(text)
    return 0 if (asked.page or right) and all(right) else 1


def kept(folder: Path, row: Row) -> Path:
    """Return the file that a row's result is kept in."""
    return folder / "rows" / f"{row.name}.json"


if __name__ == "__main__":
    sys.exit(main())
