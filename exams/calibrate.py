"""Derive the default limits: run honest programs, print what they leave and 1.5 × the largest (``make calibrate``).

Policies, models (those of exams/traits and every fixture among them), other ways to write the operations, devices,
prompts (texts, random, repeated, up to 4,096 tokens), batches, padding and excess precision vary. Prompts are none of
the exam's nor of the shipped ones. Held out: prompts are halved, and the largest value of either half is given over 1.5
× the other half's largest (1.5² where it is a square, as KL is): at most 1 where the margin is enough. Then the rate of
false alarms under the shipped limits with its Clopper-Pearson interval, and the smallest faults of the last exam. Under
another JAX, run it with that; on another device, with --device.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as dc_replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace
from scipy.stats import beta

from exams.cut import Cut, add_part
from exams.rewrites import DEVICES, REWRITES, points, rewritten
from exams.traits import models, prompts
from precaudit.judging.pooled import METRICS, ForwardPool
from precaudit.judging.rules import judge
from precaudit.recording.tracing.subject import Subject, load
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.references.comparison.compare import CompareOptions as CompareOptions
from precaudit.references.comparison.compare import compare
from precaudit.schema.limits import Limits, Local, default_limits
from precaudit.schema.limits.checks import Check, forward_checks, local_checks, sum_checks
from precaudit.schema.prompts import Prompt
from precaudit.schema.records.errors import ErrorRecord
from precaudit.schema.selection import Selection

MARGIN = 1.5
REFS = Path(__file__).parent.parent / "refs" / "fixtures"
RESULTS = Path(__file__).parent / "results" / "calibrate.jsonl"
SUBJECTS = {
    "tiny": (("bf16", "bf16-fp32-scores", "fp32-cast-decode", "fp32-highest"), "all", "0,-1", 8),
    "smollm2": (("bf16", "fp32-highest"), "q,k,v,attn_out,mlp_norm,mlp_out,logits", "0,15,-1", 4),
}
LOGITS = {"tiny": 120, "smollm2": 16}  # prompts of random tokens of which logits alone are judged
FIXTURES = tuple(sorted(p.parent.name for p in REFS.glob("*/config.json")))
TEXTS = (
    "Der Ausschuss tagte am Donnerstag; größere Änderungen wurden nicht beschlossen. ",
    "委员会于星期四开会，审议了十七项提案。",
    "def f(x):\n    return [y * 2 for y in x if y > 0]\n\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The committee met on Thursday to consider 17 proposals; of these, nine were adopted, and the rest deferred. ",
)  # fmt: skip
TEXT = "The committee met on Thursday to consider 17 proposals; of these, nine were adopted, and the rest deferred. "


@dataclass(frozen=True)
class Honest:
    """One honest run: ``make`` makes it, of a selection, and compares it."""

    name: str
    select: Selection
    make: Callable[[Path, Selection], list[ErrorRecord]]

    def errors(self, folder: Path, points: str | None) -> list[ErrorRecord]:
        """Return its records; ``points``: as ``--points`` takes them, None its own."""
        chosen = (
            self.select if points is None else dc_replace(self.select, points=Selection.parse(points=points).points)
        )
        return self.make(folder, chosen)


def honest(folder: Path, device: str = "cpu") -> Iterator[Honest]:
    """Yield every honest run of the calibration."""
    yield from _bundled(device)
    paths = models(folder / "models")
    for policy in ("bf16", "bf16-fp32-scores", "fp32-highest"):
        for name in (n for n in REWRITES if device == "cpu" or n not in DEVICES):
            yield _run(
                f"tiny {policy}, {name}", lambda n=name, p=policy: rewritten(n, p, device), _texts(2), points(name)
            )
        for trait, path in paths.items():
            for seed in (5, 6):
                given = prompts(512 if "tiny" not in trait else 250, seed)
                yield _run(f"{trait}, {policy}, {seed}", lambda m=path, p=policy: load(str(m), p, None, device), given)
        for name in FIXTURES:
            given = prompts(96, 7)
            short = [replace(p, tokens=(p.tokens or ())[:30]) for p in given]  # one bucket: half the programs
            opened = str(REFS / name)
            yield _run(f"{name}, {policy}", lambda m=opened, p=policy: load(m, p, None, device), short)
    for trait, path in paths.items():
        strict = {"excess_precision": "off"}
        given = prompts(250, 8)
        yield _run(f"{trait}, excess off", lambda m=path, s=strict: load(str(m), "bf16", s, device), given)
    for length in (1, 7, 33, 129, 700, 4096):
        given = [Prompt(id="c0", tokens=tuple(int(t) for t in np.random.default_rng(length).integers(1, 250, length)))]
        make = partial(load, str(paths["massive activations"]), "bf16", None, device)
        yield _run(f"length {length}", make, given, "q,k,v,attn_out,logits", "0,-1")


def _bundled(device: str) -> Iterator[Honest]:
    draw = np.random.default_rng(7)
    for subject, (policies, seen, layers, count) in SUBJECTS.items():
        for policy in policies:
            make = partial(load, subject, policy, None, device)
            for batch, pad in ((1, "right"), (4, "left"), (4, "right")):
                yield _run(
                    f"{subject} {policy} batch {batch} {pad}", make, _texts(count, draw), seen, layers, batch, pad
                )
            given = [Prompt(id=f"r{i}", tokens=random_tokens(draw)) for i in range(LOGITS[subject])]
            yield _run(f"{subject} {policy} random tokens", make, given, "logits", None, 4)


def _texts(count: int, draw: np.random.Generator | None = None) -> list[Prompt]:
    if draw is None:
        return [Prompt(id=f"c{i}", prompt=(TEXT[i:] * 5)[: 30 + 60 * i]) for i in range(count)]
    lengths = [int(n) for n in np.exp(draw.uniform(np.log(8), np.log(420), count))]
    return [Prompt(id=f"c{i}", prompt=(TEXTS[i % len(TEXTS)][i:] * 9)[:n]) for i, n in enumerate(lengths)]


def _run(
    name: str, make: Callable[[], Subject], given: list[Prompt], seen: str = "all", layers: str | None = None,
    batch: int = 1, pad: str = "right",
) -> Honest:  # fmt: skip
    select = Selection.parse(layers=layers, points=seen, phases="prefill,decode")
    options = TraceOptions(force=True, decode_steps=2, batch=batch, pad=pad)
    return Honest(name, select, lambda folder, chosen: run(folder, make(), given, chosen, options))


def random_tokens(draw: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(t) for t in draw.integers(1, 250, int(draw.integers(3, 90))))


def run(
    folder: Path, subject: Subject, prompts: list[Prompt], select: Selection, options: TraceOptions
) -> list[ErrorRecord]:
    traced = trace(subject, folder / "run", prompts, select, options)
    return compare(traced, options=CompareOptions(accum=(), cache=folder / "refs")).errors


def name_of(e: ErrorRecord, metric: str, scope: str) -> tuple[str, str]:
    """Return (table, key) of a check in limits.toml."""
    if e.kind == "forward":
        return "forward", "kl" if metric == "kl" else "ratio" if scope == "tensor" else scope
    table = "float32" if e.dtype == "float32" else "narrow"
    if metric in ("gain", "mean"):
        return table, metric if scope == "tensor" else f"head_{metric}"
    return table, "componentwise" if scope == "element" else scope


def made(one: Honest, folder: Path, device: str, points: str | None = None) -> dict[str, Any]:
    """Make a run; return what the table needs of it: by check and half of the prompts a histogram and the largest."""
    began = time.monotonic()
    errors = one.errors(folder, points)
    judged, alarms = 0, []
    checks: dict[str, dict[str, Any]] = {}
    for e in errors:
        verdict = judge(e, default_limits())
        judged += verdict is not None
        if verdict is not None and verdict.status != "pass":
            alarms.append(f"{verdict.status} {verdict.place.text} {verdict.metric} {verdict.scope} {verdict.value}")
        for group, key, found in ratios(e):
            half = int(e.prompt[1:].split("-")[0]) % 2
            c = checks.setdefault(f"{group}.{key}.{half}", {"bins": defaultdict(int), "top": 0.0, "at": e.point})
            c["bins"][round(20 * math.log10(max(found, 1e-3)))] += 1
            if not found <= c["top"]:
                c["top"], c["at"] = found, e.point
    pool = ForwardPool()
    medians: dict[str, float] = defaultdict(float)
    for e in errors:
        pool.add(e)
        for metric, scope, found, limit, _ in sum_checks(e, default_limits()) if e.kind == "sums" else ():
            medians[f"{metric} of {scope}"] = max(medians[f"{metric} of {scope}"], found / limit)
    for v in pool.medians(default_limits()):
        medians[v.metric] = max(medians[v.metric], float(v.value or 0.0) / float(v.limit or 1.0))
        if v.status == "fail":
            alarms.append(f"{v.status} {v.place.text} {v.metric} {v.value} {v.text}")
    seconds = time.monotonic() - began
    return {"name": one.name, "jax": jax.__version__, "device": device, "records": len(errors), "judged": judged,
            "alarms": alarms, "seconds": round(seconds, 1), "checks": checks, "medians": medians}  # fmt: skip


def ratios(e: ErrorRecord) -> Iterator[tuple[str, str, float]]:
    """Yield table and key of each check with its value over the growth of its limit with n."""
    limits = unit_limits()
    found: Iterable[Check] = ()
    if e.kind == "local" and e.unknown is None:
        found = local_checks(e, limits.local(e.dtype))
    elif e.kind == "forward" and e.unknown is None:
        found = forward_checks(e, limits)
    for metric, scope, size, growth, _ in found:
        yield *name_of(e, metric, scope), min(size / growth, 1e9) if size == size else 1e9


@cache
def unit_limits() -> Limits:
    """Return the shipped limits with every value 1: how they grow with n."""
    shipped = default_limits()
    local: dict[str, Local] = {
        name: Local(**{k: dc_replace(v, value=1.0) for k, v in vars(getattr(shipped, name)).items()})
        for name in ("narrow", "float32")
    }
    forward = {k: dc_replace(getattr(shipped, k), value=1.0) for k in ("ratio", "token", "head", "kl")}
    return dc_replace(shipped, **local, **forward)


def main() -> int:
    """Make the runs and print the table; return 1 where an honest run in it raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_part(parser)
    parser.add_argument("--anew", action="store_true", help="runs that were made before, too; keep none of them")
    parser.add_argument("--points", help="of every run in place of its own, with --anew: q,k,v,attn_out,logits")
    parser.add_argument("--table", action="store_true", help="make no run, print the table of those made")
    parser.add_argument("--device", default="cpu", choices=("cpu", "gpu", "tpu"))
    given = parser.parse_args()
    if given.points and not given.anew:
        parser.error("--points needs --anew: what is kept is of the runs' own points")
    here = []
    if not given.table:
        with tempfile.TemporaryDirectory() as name:
            here = list(made_here(Path(name), given.part, given.device, given.anew, given.points))
    told = here if given.anew else lines()
    table(told)
    smallest_faults()
    print(f"part {given.part}: {len(here)} runs made")
    return 1 if not told or any(line["alarms"] for line in told) else 0


def made_here(
    folder: Path, part: Cut, device: str, anew: bool, points: str | None = None
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Make a part of the runs; ``anew``: keep nothing, and skip none; ``points``: in place of their own."""
    runs = list(honest(folder, device))
    known = (jax.__version__, device)
    done = set() if anew else {x["name"] for x in lines() if (x["jax"], x.get("device", "cpu")) == known}
    for one in (r for r in part.of(runs) if r.name not in done):
        line = made(one, folder, device, points)
        if not anew:
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as f:
                f.write(json.dumps(line) + "\n")
        told = f"{line['name']}: {line['records']} records, {line['seconds']} s"
        print(told, *line["alarms"], sep="\n  ALARM ", flush=True)
        yield line


def lines() -> list[dict[str, Any]]:
    """Return what was made so far."""
    return [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def table(made: list[dict[str, Any]]) -> None:
    """Print every limit beside what honest programs leave, and the rate of false alarms."""
    shipped = default_limits()
    print(
        f"{'limit':22} {'n':>7} {'median':>7} {'99 %':>7} {'largest':>7} {'margin':>7} {'held out':>8} {'shipped':>7}"
        "  largest at"
    )
    names = sorted({key.rsplit(".", 1)[0] for x in made for key in x["checks"]})
    for name in names:
        group, key = name.split(".")
        cells = [
            (x["checks"][f"{name}.{half}"], half, x["name"])
            for x in made
            for half in (0, 1)
            if f"{name}.{half}" in x["checks"]
        ]
        bins: Counter[int] = Counter()
        for c, _, _ in cells:
            bins.update({int(k): v for k, v in c["bins"].items()})
        sizes = np.repeat(10 ** (np.array(sorted(bins)) / 20), [bins[k] for k in sorted(bins)])
        top, where = max((c["top"], f"{c['at']}, {run}") for c, _, run in cells)
        halves = [max((c["top"] for c, half, _ in cells if half == side), default=0.0) for side in (0, 1)]
        limit = getattr(shipped if group == "forward" else getattr(shipped, group), key)
        margin, kept = MARGIN**limit.power, limit.value
        held_out = max(halves) / (margin * min(halves)) if min(halves) else float("nan")
        print(
            f"{name:22} {len(sizes):7} {np.median(sizes):7.2g} {np.quantile(sizes, 0.99):7.2g} {top:7.2g} "
            f"{math.ceil(margin * top * 10) / 10:7.2g} {held_out:8.2f} {kept:7.2g}  {where}"
        )
    for metric in (*METRICS, "sums of tensor", "sums of token"):
        top, where = max(((x.get("medians", {}).get(metric, 0.0), x["name"]) for x in made), default=(0.0, ""))
        print(f"{metric}: at most {top:.2f} of its limit: {where}")
    judged, alarms = sum(x["judged"] for x in made), sum(len(x["alarms"]) for x in made)
    low = float(beta.ppf(0.025, alarms, judged - alarms + 1)) if alarms else 0.0
    high = float(beta.ppf(0.975, alarms + 1, judged - alarms))
    rate = f"rate {alarms / max(judged, 1):.1e} (95 %: {low:.1e} to {high:.1e})"
    seconds = sum(x["seconds"] for x in made)
    print(f"{len(made)} runs, {judged} records judged, {alarms} alarms: {rate}; {seconds:.0f} s")


def smallest_faults() -> None:
    """Print the smallest counted faults of the last exam: what the limits must stay below."""
    path = Path(__file__).parent / "results" / "exam.jsonl"
    if not path.is_file():
        print("no exam was run here: make exam prints the margin to the smallest fault")
        return
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [c for c in cells if "size" in c]
    flagged = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "fail")
    missed = sorted((float(c["size"]), c["fault"], c["point"], c["policy"]) for c in cells if c["status"] == "pass")
    print("smallest faults flagged (× honest error):", *flagged[:3], sep="\n  ")
    print("largest faults not flagged:", *missed[::-1][:3], sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
