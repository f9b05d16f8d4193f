"""Measure capture, the FP64 reference, emulation, start-up and narrowing, each against its bound.

Needs the model smollm2. What is compared alternates in one run (A B A B …): times are medians, ratios medians of the
pairs' ratios. torch beside it needs ``pip install -e .[oracle]``. --save writes benchmarks/results/main_job.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from precaudit.caching import cache_folder
from precaudit.errors import UserError
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs import DecoderConfig, model_tensors
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import BLOCK, Model, attention
from precaudit.models.numpy_decoder.operators import AttentionRule
from precaudit.models.numpy_decoder.rounding import FP64, Rounding
from precaudit.numbers.arrays import Array, rounder
from precaudit.numbers.threads import WORKERS, one_blas_thread
from precaudit.recording.runs.writer import RunWriter
from precaudit.schema.graphs.decoder import POINTS, present
from precaudit.schema.prompts import Prompt, encode_prompt
from precaudit.schema.records.runs import PromptRecord, Requested

LENGTH, ORDER, COPY = 512, 2048, 512 << 20  # prompt tokens, rows of DGEMM's matrices, bytes copied
SETTLE = 0.1  # seconds: BLAS and OpenMP threads spin on after a call and would take a core from the next
ROWS = {p for p in present(False) if not POINTS[p].state and "S" not in POINTS[p].axes}
TEXT = "An audit asks of every number whether rounding explains it, and of the others which operation made them. " * 8
TORCH = find_spec("torch") is not None
Jobs = dict[str, Callable[[], object]]
Samples = dict[str, list[float]]
Weights = dict[str, Array]


class Line(NamedTuple):
    """A measured value and its bound: a largest value, or with ``least`` a smallest one; None where it only informs."""

    what: str
    value: float
    unit: str
    bound: float | None = None
    least: bool = False
    note: str = ""

    def verdict(self) -> str:
        """Return ok, over a largest value, under a smallest one, or nothing."""
        if self.bound is None:
            return ""
        inside = self.value >= self.bound if self.least else self.value <= self.bound
        return "ok" if inside else "under" if self.least else "over"


def seconds(job: Callable[[], object]) -> float:
    time.sleep(SETTLE)
    began = time.perf_counter()
    kept = job()  # noqa: F841 - freeing the result is not the job
    return time.perf_counter() - began


def alternated(jobs: Jobs, rounds: int) -> Samples:
    """Return each job's seconds: every job once unmeasured (compilation, page faults), then A B … ``rounds`` times."""
    found = [{name: seconds(job) for name, job in jobs.items()} for _ in range(rounds + 1)]
    return {name: [times[name] for times in found[1:]] for name in jobs}


def compared(what: str, found: Samples, a: str, b: str, bound: float | None = None) -> Line:
    value = median(x / y for x, y in zip(found[a], found[b], strict=True))
    return Line(what, value, "x", bound, note=f"{median(found[a]):.3f} s : {median(found[b]):.3f} s")


def token_ids(vocab: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(0).integers(0, vocab, LENGTH).tolist())


def capture_jobs(subject: Any, folder: Path, every: bool) -> Jobs:
    """Return the bare prefill, the same with taps, and the same recorded as ``precaudit.trace`` does."""
    import jax

    from precaudit.recording.tracing.manifest import begin
    from precaudit.recording.tracing.programs import Capture, prefill_program
    from precaudit.recording.tracing.session import Batch, Session
    from precaudit.recording.tracing.writer import Background

    points, layers = ("q", "k", "v", "attn_out", "logits"), tuple(range(subject.config.layers))
    requested = Requested(
        prompts=("p",), layers=layers, points=points, support=(), phases=("prefill",), positions=None,
        every_logit=every, decode_steps=0, batch=1, pad="right", tokens_from=None,
    )  # fmt: skip
    text, tokens = encode_prompt(Prompt(id="p", tokens=token_ids(subject.config.vocab)), None)
    batch = Batch.of([PromptRecord(id="p", text=text, tokens=tokens)], requested)
    manifest, rows = begin(subject, requested, "run", "benchmark"), np.arange(0 if every else LENGTH - 1, LENGTH)
    checked: set[Any] = set()  # once a compiled program however many prompts it runs: here in the unmeasured call

    def run(capture: Capture | None) -> object:
        program, tables = prefill_program(subject, capture), subject.tables(LENGTH)
        where = (*batch.arrays([tokens]), rows[None].astype(np.int32))
        return jax.block_until_ready(program(subject.parameters, tables, *where, None, None))

    def record() -> object:
        place = tempfile.TemporaryDirectory(dir=folder)
        writer = RunWriter(Path(place.name), manifest, batch.prompts)
        with Background() as background:
            Session(subject, requested, writer, background, checked=checked).run(batch, lambda *_: None)
        writer.finish(manifest)
        return place  # freed, and so deleted, after the time was taken: every round finds the disk as the first did

    tapped = Capture(frozenset(points[:-1]), layers)
    return {"bare": partial(run, None), "tapped": partial(run, tapped), "recorded": record}


def llama(c: DecoderConfig, weights: Weights, dtype: str) -> Any:
    """Return transformers' model with the same weights, on as many threads as the reference uses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(WORKERS)
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context, tie_word_embeddings=c.tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    tensors = {n: torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16) for n, x in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert {*missing, *unexpected} <= {"lm_head.weight"}  # tied to the embedding
    return model


def torch_forward(model: Any, every: bool) -> Callable[[], object]:
    import torch

    ids = torch.tensor([token_ids(model.config.vocab_size)])
    return torch.inference_mode()(lambda: model(ids, use_cache=False, logits_to_keep=0 if every else 1).logits)


def hook_jobs(model: Any, folder: Path, every: bool) -> Jobs:
    """Return transformers' bare forward, and the same with hooks on q, k, v and attention's output, saved to a file."""
    import torch

    run = torch_forward(model, every)

    def record() -> object:
        place, kept, hooks = tempfile.TemporaryDirectory(dir=folder), {}, []
        for i, layer in enumerate(model.model.layers):
            for name in "qkvo":
                keep = partial(lambda key, _m, x, y: kept.update({key: x[0] if key[0] == "o" else y}), f"{name}.{i}")
                hooks.append(getattr(layer.self_attn, f"{name}_proj").register_forward_hook(keep))
        torch.save(kept | {"logits": run()}, Path(place.name) / "hooks.pt")
        for hook in hooks:
            hook.remove()
        return place

    return {"bare": run, "recorded": record}


def capture_lines(config: DecoderConfig, weights: Weights, rounds: int, folder: Path) -> Iterator[Line]:
    from precaudit.recording.tracing.subject import load

    subject = load("smollm2", "bf16", device="cpu")
    model = llama(config, weights, "bfloat16") if TORCH else None
    for every, bound in ((False, 1.15), (True, None)):
        text = "capture with every logit" if every else "capture"
        found = alternated(capture_jobs(subject, folder, every), rounds)
        yield compared(f"{text}, written / bare prefill", found, "recorded", "bare", bound)
        yield compared("  not written / bare prefill", found, "tapped", "bare")
        if model is not None:
            found = alternated(hook_jobs(model, folder, every), rounds)
            yield compared("  torch: hooks and torch.save / bare", found, "recorded", "bare")


def reference(config: DecoderConfig, read: Callable[[str], Array], more: tuple[str, ...] = ()) -> Weights:
    """Return the reference's points, of each the last layer's: what was emitted before is overwritten."""
    held: Weights = {}
    wanted, ids = Wanted({*ROWS, *more}, None, [np.asarray([LENGTH - 1])]), np.asarray(token_ids(config.vocab))
    forward(Model(config, read), Sequences([ids]), [FP64], wanted, lambda _i, _layer, point, x: held.update({point: x}))
    return held


def reference_parts(config: DecoderConfig, read: Callable[[str], Array]) -> dict[str, float]:
    """Return the threads' seconds by what they do: products with weights, attention's, widening weights, the rest."""
    taken: dict[str, list[float]] = {"weights": [], "attention": [], "widening": []}

    def dot(a: Array, b: Array) -> Array:
        began = time.perf_counter()
        found: Array = a @ b
        # a weight's transpose is no row-major matrix, nor are keys: these have one head's dimension
        kind = "attention" if min(b.shape) <= config.head_dim else "weights"
        taken[kind].append(time.perf_counter() - began)
        return found

    model = Model(config, read)
    wanted, ids = Wanted(ROWS, None, [np.asarray([LENGTH - 1])]), np.asarray(token_ids(config.vocab))
    warm = model.warm

    def warmed(layer: int) -> None:
        began = time.perf_counter()
        warm(layer)
        taken["widening"].append(WORKERS * (time.perf_counter() - began))

    model.warm = warmed  # type: ignore[method-assign]
    began = time.perf_counter()
    forward(model, Sequences([ids]), [Rounding(dot=dot)], wanted, lambda *_place: None)
    whole = WORKERS * (time.perf_counter() - began)
    sums = {name: sum(each) for name, each in taken.items()}
    return sums | {"rest": whole - sum(sums.values())}


def reference_flops(c: DecoderConfig) -> int:
    """Return the flops of the reference's matrix products; a multiplication and an addition are 2.

    Every row: the q, k, v and output projections and the MLP's three matrices. Attention: q · kᵀ and weights · v over
    what is computed, blocks of BLOCK rows by all keys up to the block's last row. One row of the output matrix.
    """
    row = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.width * c.mlp_width
    pairs = sum((min(a + BLOCK, LENGTH) - a) * min(a + BLOCK, LENGTH) for a in range(0, LENGTH, BLOCK))
    return 2 * (c.layers * (LENGTH * row + 2 * pairs * c.heads * c.head_dim) + c.vocab * c.width)


def reference_lines(config: DecoderConfig, weights: Weights, rounds: int) -> Iterator[Line]:
    a, b = np.random.default_rng(0).standard_normal((2, ORDER, ORDER))
    ours = partial(reference, config, weights.__getitem__)
    jobs: Jobs = {"ours": ours, "every": partial(ours, ("scores", "probs")), "dgemm": lambda: a @ b}
    if TORCH:
        jobs = {"torch": torch_forward(llama(config, weights, "float64"), False)} | jobs
    found = alternated(jobs, rounds)
    if TORCH:
        yield compared("FP64 reference / torch float64", found, "ours", "torch", 1.0)
        yield compared("  with scores and probs / torch float64", found, "every", "torch")
    flops, dgemm = reference_flops(config), 2 * ORDER**3
    pairs = zip(found["ours"], found["dgemm"], strict=True)
    share = median(100 * (flops / ours_s) / (dgemm / dgemm_s) for ours_s, dgemm_s in pairs)
    took, rate = median(found["ours"]), dgemm / median(found["dgemm"])
    note = f"{flops / 1e9:.1f} GFLOP in {took:.3f} s"
    yield Line("FP64 reference, share of DGEMM", share, "%", 70.0, True, note)
    parts = reference_parts(config, weights.__getitem__)
    told = ", ".join(f"{name} {100 * x / sum(parts.values()):.0f} %" for name, x in parts.items())
    yield Line("  where its threads' time goes", sum(parts.values()), "s", note=told)
    yield Line("limit: DGEMM, median", rate / 1e9, "GFLOP/s", note=f"NumPy, {ORDER} rows")


def copy_line(rounds: int) -> Line:
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    best = min(alternated({"copy": partial(np.copyto, target, source)}, max(rounds, 3))["copy"])
    return Line("limit: memory copy, best", 2 * COPY / best / 1e9, "GB/s", note=f"{COPY >> 20} MiB, read and write")


def emulation_lines(config: DecoderConfig, weights: Weights, rounds: int) -> Iterator[Line]:
    from precaudit.models.numpy_decoder.accumulation import accumulating
    from precaudit.numbers.formats import ACCUMULATIONS

    kept: dict[tuple[int | None, str], Array] = {}
    rows, narrow, ids = np.arange(LENGTH), rounder("bfloat16"), np.asarray(token_ids(config.vocab))
    rule = AttentionRule.of(config, None)
    model, wanted = Model(config, weights.__getitem__), Wanted({"q", "k", "v"}, None, [rows[-1:]])
    forward(
        model, Sequences([ids]), [FP64], wanted, lambda _i, layer, point, x: kept.update({(layer, point): narrow(x)})
    )

    def emulate(name: str) -> None:
        with one_blas_thread():
            for i in range(config.layers):
                attention(kept[i, "q"], kept[i, "k"], kept[i, "v"], rows, rule, Rounding(dot=accumulating(name)))

    found = alternated({name: partial(emulate, name) for name in ACCUMULATIONS}, rounds)
    for name, bound in zip(ACCUMULATIONS, (5.0, None, None), strict=True):
        yield Line(f"{name} accumulation, attention of {config.layers} layers", median(found[name]), "s", bound)


def command(*words: str, folder: Path | None = None) -> str:
    """Run Python with ``words``, FP64 references cached in ``folder``; return what it printed."""
    own = {} if folder is None else {"PRECAUDIT_CACHE": str(folder / "cache")}
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache_folder("xla"))} | own
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout


def command_lines(folder: Path) -> Iterator[Line]:
    run = partial(command, "-m", "precaudit", folder=folder)
    yield Line("precaudit --help", median(alternated({"": partial(run, "--help")}, 7)[""]), "s", 0.25)
    run("trace", "smollm2", "--text", TEXT, "--layers", "0:30", "-o", "run")
    note = f"the whole comparison {seconds(partial(run, 'compare', 'run')):.1f} s"
    narrowed = alternated({"": partial(run, "compare", "run", "--layers", "29")}, 3)[""]
    yield Line("narrowing a compared run to one layer", median(narrowed), "s", 1.0, note=note)


def measure(config: DecoderConfig, read: Callable[[str], Array], rounds: int) -> Iterator[Line]:
    # First, while this process is small: Linux lets a child's ru_maxrss begin at what its parent held.
    peak = int(command(str(Path(__file__).resolve()), "--peak-rss")) / 1e9
    yield Line("FP64 reference, peak memory of its process", peak, "GB", 0.7)
    with tempfile.TemporaryDirectory() as folder:
        yield from command_lines(Path(folder))
        yield copy_line(rounds)
        weights = {name: read(name) for name in model_tensors(config)}
        yield from reference_lines(config, weights, rounds)
        yield from emulation_lines(config, weights, rounds)
        yield from capture_lines(config, weights, rounds, Path(folder))


def show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("measurement", "value", "bound", "", "medians")
    for x in lines:
        bound = "" if x.bound is None else f"{'≥' if x.least else '≤'} {x.bound:g} {x.unit}"
        table.add_row(x.what, f"{x.value:.3g} {x.unit}", bound, x.verdict(), x.note)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def save(lines: list[Line], rounds: int) -> None:
    path = Path(__file__).parent / "results" / "main_job.json"
    path.parent.mkdir(exist_ok=True)
    versions = {n: metadata.version(n) for n in ("precaudit", "jax", "numpy", "numba", *(["torch"] if TORCH else []))}
    found = [x._asdict() | {"verdict": x.verdict()} for x in lines]
    content = {"pairs": rounds, "cores": WORKERS, "versions": versions, "lines": found}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 pairs instead of 5")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/main_job.json")
    parser.add_argument("--peak-rss", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        checkpoint = open_checkpoint("smollm2")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if args.peak_rss:
        reference(checkpoint.config, checkpoint.tensors.read_tensor)
        assert not {"jax", "torch"} & set(sys.modules)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return 0
    if not TORCH:
        print("torch is not installed (pip install -e .[oracle]): its lines are left out", file=sys.stderr)
    rounds = 2 if args.quick else 5
    lines = list(measure(checkpoint.config, checkpoint.tensors.read_tensor, rounds))
    show(lines)
    if args.save:
        save(lines, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
