"""Measure what precaudit is for (capture, FP64 reference, emulation, start-up, narrowing), each against its bound.

    python benchmarks/main_job.py [--quick] [--save]

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from precaudit.checkpoints import open_checkpoint
from precaudit.configs import DecoderConfig, expected_tensors
from precaudit.errors import UserError
from precaudit.formats import Array, rounder
from precaudit.numpy_decoder.forward import Wanted, forward
from precaudit.numpy_decoder.model import BLOCK, Model, attention
from precaudit.numpy_decoder.rounding import FP64, Rounding
from precaudit.numpy_decoder.threads import WORKERS, one_blas_thread
from precaudit.points import POINTS

LENGTH, ORDER, COPY = 512, 2048, 512 << 20  # prompt tokens, rows of DGEMM's matrices, bytes copied
SETTLE = 0.1  # seconds: BLAS and OpenMP threads spin on after a call and would take a core from the next
CAPTURED = ("q", "k", "v", "attn_out", "logits")
ROWS = {p for p, x in POINTS.items() if not x.state and "S" not in x.axes}
TEXT = "An audit asks of every number whether rounding explains it, and of the others which operation made them. " * 8
TORCH = find_spec("torch") is not None

Jobs = dict[str, Callable[[], object]]
Samples = dict[str, list[float]]
Weights = dict[str, Array]


@dataclass(frozen=True)
class Line:
    """A measured value and its bound: a largest value, or with ``least`` a smallest one; None where it only informs."""

    what: str
    value: float
    unit: str
    bound: float | None = None
    least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Empty without a bound; ``over`` is past a largest value, ``under`` below a smallest one."""
        if self.bound is None:
            return ""
        inside = self.value >= self.bound if self.least else self.value <= self.bound
        return "ok" if inside else "under" if self.least else "over"


def seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    kept = job()
    took = time.perf_counter() - began
    del kept  # freeing the result is not the job
    return took


def alternated(jobs: Jobs, rounds: int) -> Samples:
    """Return each job's seconds: every job once unmeasured (compilation, page faults), then A B … ``rounds`` times."""
    found: Samples = {name: [] for name in jobs}
    for i in range(rounds + 1):
        for name, job in jobs.items():
            time.sleep(SETTLE)
            took = seconds(job)
            found[name] += [took] if i else []
    return found


def compared(what: str, found: Samples, a: str, b: str, bound: float | None = None) -> Line:
    value = median(x / y for x, y in zip(found[a], found[b], strict=True))
    return Line(what, value, "x", bound, note=f"{median(found[a]):.3f} s : {median(found[b]):.3f} s")


def token_ids(vocab: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab, LENGTH))


def recording(subject: Any, folder: Path, requested: Any, batch: Any) -> Callable[[], object]:
    """Return the job that records one prefill the way ``precaudit.trace`` does, from call to closed files."""
    from precaudit.store import RunWriter
    from precaudit.tracing.manifest import begin
    from precaudit.tracing.session import Session
    from precaudit.tracing.writer import Background

    manifest = begin(subject, requested, "run", "benchmark")
    neutrality: list[Any] = []  # checked once a run however many prompts it has: here in the unmeasured call

    def job() -> object:
        writer = RunWriter(Path(tempfile.mkdtemp(dir=folder)), manifest, batch.prompts)
        with Background() as background:
            Session(subject, requested, writer, background, neutrality=neutrality).run(batch, lambda what: None)
        return writer.finish(manifest)

    return job


def capture_jobs(subject: Any, folder: Path, support: tuple[str, ...], every: bool) -> Jobs:
    """Return the bare prefill, the same with taps, and the same recorded into a run, all with the same logits rows."""
    import jax

    from precaudit.prompts import Prompt, encode_prompt
    from precaudit.records import PromptRecord, Requested
    from precaudit.tracing.programs import Capture, prefill_program
    from precaudit.tracing.session import Batch

    text, tokens = encode_prompt(Prompt(id="p", tokens=token_ids(subject.config.vocab)), None)
    requested = Requested(
        prompts=("p",), layers=tuple(range(subject.config.layers)), points=CAPTURED, support=support, batch=1, pad="right",
        phases=("prefill",), positions=None, every_logit=every, decode_steps=0, tokens_from=None,
    )  # fmt: skip
    batch = Batch.of([PromptRecord(id="p", text=text, tokens=tokens)], requested)
    ids, starts = batch.arrays([tokens])
    rows = np.arange(LENGTH, dtype=np.int32)[None, 0 if every else -1 :]

    def run(capture: Capture | None) -> object:
        program, tables = prefill_program(subject, capture), subject.tables(LENGTH)
        return jax.block_until_ready(program(subject.parameters, tables, ids, starts, rows, None, None))

    tapped = Capture(frozenset({*CAPTURED, *support} - {"logits"}), requested.layers)
    record = recording(subject, folder, requested, batch)
    return {"bare": partial(run, None), "tapped": partial(run, tapped), "recorded": record}


def llama(c: DecoderConfig, weights: Weights, dtype: str) -> Any:
    """Return transformers' model with the same weights, on as many threads as the reference uses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(WORKERS)
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context, tie_word_embeddings=c.tied, rope_theta=c.rope_theta,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    tensors = {n: torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16) for n, x in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)  # noqa: PT018
    return model.eval()


def torch_forward(model: Any, every: bool) -> Callable[[], object]:
    import torch

    ids = torch.tensor([token_ids(model.config.vocab_size)])
    call = partial(model, ids, use_cache=False, logits_to_keep=0 if every else 1)
    return torch.inference_mode()(lambda: call().logits)


def hook_jobs(model: Any, folder: Path, every: bool) -> Jobs:
    """Return transformers' bare forward, and the same with hooks on q, k, v and attention's output, saved to a file."""
    import torch

    run = torch_forward(model, every)

    def record() -> None:
        kept, hooks = {}, []
        for i, layer in enumerate(model.model.layers):
            for name in ("q_proj", "k_proj", "v_proj"):
                keep = partial(lambda key, m, x, y: kept.update({key: y}), f"{i}.{name}")
                hooks.append(getattr(layer.self_attn, name).register_forward_hook(keep))
            keep = partial(lambda key, m, x: kept.update({key: x[0]}), f"{i}.attn_out")
            hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(keep))
        kept["logits"] = run()
        for hook in hooks:
            hook.remove()
        torch.save(kept, folder / "hooks.pt")

    return {"bare": run, "recorded": record}


def capture_lines(config: DecoderConfig, weights: Weights, rounds: int, folder: Path) -> Iterator[Line]:
    from precaudit.tracing.subject import load

    subject = load("smollm2", "bf16", device="cpu")
    model = llama(config, weights, "bfloat16") if TORCH else None
    support = ("attn_norm", "final_norm")
    for text, more, every, bound in (
        ("", (), False, 1.15),
        (" with every logit", (), True, None),
        (" with support", support, False, None),
    ):
        found = alternated(capture_jobs(subject, folder, more, every), rounds)
        yield compared(f"capture{text} to disk / bare prefill", found, "recorded", "bare", bound)
        yield compared("  not written", found, "tapped", "bare")
        if model is not None and not more:
            found = alternated(hook_jobs(model, folder, every), rounds)
            yield compared("  torch: hooks and torch.save / bare", found, "recorded", "bare")


def reference(config: DecoderConfig, read: Callable[[str], Array], points: Iterable[str]) -> Weights:
    """Return the reference's points, of each the last layer's: what was emitted before is overwritten."""
    held: Weights = {}
    wanted = Wanted(set(points), None, [np.asarray([LENGTH - 1])])
    ids = np.asarray(token_ids(config.vocab))
    forward(Model(config, read), [ids], FP64, wanted, lambda i, layer, point, x: held.update({point: x}))
    return held


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
    jobs: Jobs = {"ours": partial(reference, config, weights.__getitem__, ROWS)}
    jobs |= {"torch": torch_forward(llama(config, weights, "float64"), False)} if TORCH else {}
    jobs |= {
        "every": partial(reference, config, weights.__getitem__, ROWS | {"scores", "probs"}),
        "dgemm": lambda: a @ b,
    }
    found = alternated(jobs, rounds)
    if TORCH:
        yield compared("FP64 reference / torch float64", found, "ours", "torch", 1.2)
        yield compared("  with scores and probs / torch float64", found, "every", "torch")
    took, flops, peak = median(found["ours"]), reference_flops(config), 2 * ORDER**3 / min(found["dgemm"])
    note = f"{flops / 1e9:.1f} GFLOP in {took:.3f} s"
    yield Line("FP64 reference, share of DGEMM", 100 * flops / took / peak, "%", 65.0, True, note)
    yield Line("limit: DGEMM, best", peak / 1e9, "GFLOP/s", note=f"NumPy, {ORDER} rows")


def copy_line(rounds: int) -> Line:
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    best = min(alternated({"copy": partial(np.copyto, target, source)}, max(rounds, 3))["copy"])
    return Line("limit: memory copy, best", 2 * COPY / best / 1e9, "GB/s", note=f"{COPY >> 20} MiB, read and write")


def emulation_lines(config: DecoderConfig, weights: Weights, rounds: int) -> Iterator[Line]:
    from precaudit.numpy_decoder.accumulation import FORMATS, accumulating

    kept: dict[tuple[int | None, str], Array] = {}
    rows, narrow = np.arange(LENGTH), rounder("bfloat16")
    wanted, ids = Wanted({"q", "k", "v"}, None, [rows[-1:]]), np.asarray(token_ids(config.vocab))
    model = Model(config, weights.__getitem__)
    forward(model, [ids], FP64, wanted, lambda i, layer, point, x: kept.update({(layer, point): narrow(x)}))

    def emulate(name: str) -> None:
        with one_blas_thread():
            for i in range(config.layers):
                attention(kept[i, "q"], kept[i, "k"], kept[i, "v"], rows, Rounding(dot=accumulating(name)))

    found = alternated({name: partial(emulate, name) for name in FORMATS}, rounds)
    for name, bound in zip(FORMATS, (5.0, None, None), strict=True):
        yield Line(f"{name} accumulation, attention of {config.layers} layers", median(found[name]), "s", bound)


def command(*words: str, folder: Path | None = None) -> str:
    """Run Python with ``words``, FP64 references cached in ``folder``; return what it printed."""
    environment = os.environ | ({"PRECAUDIT_REFS": str(folder / "refs")} if folder else {})
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout


def command_lines(folder: Path) -> Iterator[Line]:
    run = partial(command, "-m", "precaudit", folder=folder)
    helped = alternated({"help": partial(run, "--help")}, 7)["help"]
    yield Line("precaudit --help", median(helped), "s", 0.25)
    run("trace", "smollm2", "--text", TEXT, "--layers", "0:30", "-o", "run")
    note = f"the whole comparison {seconds(partial(run, 'compare', 'run')):.1f} s"
    narrowed = alternated({"layer": partial(run, "compare", "run", "--layers", "29")}, 3)["layer"]
    yield Line("narrowing a compared run to one layer", median(narrowed), "s", 1.0, note=note)


def measure(config: DecoderConfig, read: Callable[[str], Array], rounds: int, folder: Path) -> Iterator[Line]:
    # First, while this process is small: Linux lets a child's ru_maxrss begin at what its parent held.
    peak = int(command(str(Path(__file__).resolve()), "--peak-rss")) / 1e9
    yield Line("FP64 reference, peak memory of its process", peak, "GB", 1.0)
    yield from command_lines(folder)
    yield copy_line(rounds)
    weights = {name: read(name) for name in expected_tensors(config)}
    yield from reference_lines(config, weights, rounds)
    yield from emulation_lines(config, weights, rounds)
    yield from capture_lines(config, weights, rounds, folder)


def show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("measurement", "value", "bound", "", "medians")
    for x in lines:
        bound = "" if x.bound is None else f"{'≥' if x.least else '≤'} {x.bound:g} {x.unit}"
        table.add_row(x.what, f"{x.value:.3g} {x.unit}", bound, x.verdict, x.note)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def save(lines: list[Line], rounds: int) -> None:
    versions = {n: metadata.version(n) for n in ("precaudit", "jax", "numpy", "numba", *(["torch"] if TORCH else []))}
    found = [asdict(x) | {"verdict": x.verdict} for x in lines]
    path = Path(__file__).parent / "results" / "main_job.json"
    path.parent.mkdir(exist_ok=True)
    content = {"pairs": rounds, "cores": WORKERS, "versions": versions, "lines": found}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        reference(checkpoint.config, checkpoint.tensors.read, ROWS)
        assert not {"jax", "torch"} & set(sys.modules)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return 0
    if not TORCH:
        print("torch is not installed (pip install -e .[oracle]): its lines are left out", file=sys.stderr)
    lines, rounds = [], 2 if args.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(checkpoint.config, checkpoint.tensors.read, rounds, Path(folder)):
            print(f"{line.what}: {line.value:.3g} {line.unit} {line.verdict}", file=sys.stderr, flush=True)
            lines.append(line)
    show(lines)
    if args.save:
        save(lines, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
