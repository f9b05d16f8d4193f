"""Measure what precaudit is for: capture, the FP64 reference, emulation, start-up, narrowing; each against its bound.

    python benchmarks/main_job.py [--quick] [--save]

Needs the model smollm2. What is compared alternates in one run (A B A B …); times are medians, ratios medians of the
pairs' ratios. transformers beside it needs ``pip install -e .[oracle]``. --save writes benchmarks/results/main_job.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from precaudit.checkpoints import Checkpoint, open_checkpoint
from precaudit.configs import DecoderConfig, expected_tensors
from precaudit.errors import UserError
from precaudit.formats import Array, rounder
from precaudit.numpy_decoder.forward import Wanted, forward
from precaudit.numpy_decoder.model import BLOCK, Model, attention
from precaudit.numpy_decoder.rounding import FP64, Rounding
from precaudit.numpy_decoder.threads import WORKERS, one_blas_thread
from precaudit.points import POINTS

LENGTH, DGEMM, COPY = 512, 2048, 512 << 20
SETTLE = 0.1  # seconds; BLAS and OpenMP threads spin that long after a call and would take a core from the next
CAPTURED = ("q", "k", "v", "attn_out", "logits")
ROWS = frozenset(p for p, x in POINTS.items() if not x.state and "S" not in x.axes)
EVERY = ROWS | {"scores", "probs"}
TEXT = "An audit asks of every number whether rounding explains it, and of every other number which operation made it. " * 8


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
        """ok, over (under, where the bound is a smallest value), or nothing."""
        if self.bound is None:
            return ""
        inside = self.value >= self.bound if self.least else self.value <= self.bound
        return "ok" if inside else "under" if self.least else "over"


Jobs = dict[str, Callable[[], object]]
Samples = dict[str, list[float]]


def seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    kept = job()
    took = time.perf_counter() - began
    del kept  # freeing the result is not the job
    return took


def alternated(jobs: Jobs, rounds: int) -> Samples:
    """Return each job's seconds: all jobs once unmeasured (compilation, page faults), then A B … ``rounds`` times."""
    found: Samples = {name: [] for name in jobs}
    for i in range(rounds + 1):
        for name, job in jobs.items():
            time.sleep(SETTLE)
            took = seconds(job)
            if i:
                found[name].append(took)
    return found


def ratio(samples: Samples, a: str, b: str) -> float:
    return median(x / y for x, y in zip(samples[a], samples[b], strict=True))


def versus(samples: Samples, a: str, b: str) -> str:
    return f"{median(samples[a]):.3f} s : {median(samples[b]):.3f} s"


def weights(checkpoint: Checkpoint) -> dict[str, Array]:
    return {name: np.asarray(checkpoint.tensors.read(name)) for name in expected_tensors(checkpoint.config)}


def token_ids(vocab: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab, LENGTH))


def run_writer(subject: Any, folder: Path, requested: Any, batch: Any) -> Callable[[], object]:
    """Return the job that records one prefill as ``precaudit.trace`` does, from call to closed files."""
    from precaudit.store import RunWriter
    from precaudit.tracing.manifest import begin
    from precaudit.tracing.session import Session
    from precaudit.tracing.writer import Background

    manifest = begin(subject, requested, "run", "benchmark")
    neutrality: list[Any] = []  # checked once a run of many prompts: here in the unmeasured first call

    def record() -> object:
        writer = RunWriter(Path(tempfile.mkdtemp(dir=folder)), manifest, batch.prompts)
        with Background() as background:
            session = Session(subject, requested, writer, background, neutrality=neutrality)
            session.run(batch, lambda what: None)
        return writer.finish(manifest)

    return record


def capture_jobs(subject: Any, folder: Path, support: tuple[str, ...], every: bool) -> Jobs:
    """Return the bare prefill, the same with taps, and the same recorded into a run, all with the same logits rows."""
    import jax

    from precaudit.prompts import Prompt, encode_prompt
    from precaudit.records import PromptRecord, Requested
    from precaudit.tracing.programs import Capture, prefill_program
    from precaudit.tracing.session import Batch

    text, tokens = encode_prompt(Prompt(id="p", tokens=token_ids(subject.config.vocab)), None)
    requested = Requested(
        prompts=("p",), layers=tuple(range(subject.config.layers)), points=CAPTURED, support=support,
        phases=("prefill",), positions=None, every_logit=every, decode_steps=0, batch=1, pad="right", tokens_from=None,
    )  # fmt: skip
    batch = Batch.of([PromptRecord(id="p", text=text, tokens=tokens)], requested)
    ids, starts = batch.arrays([tokens])
    rows = np.arange(LENGTH, dtype=np.int32)[None, 0 if every else -1 :]
    tapped = Capture(frozenset({*CAPTURED, *support} - {"logits"}), requested.layers)

    def run(capture: Capture | None) -> object:
        program = prefill_program(subject, capture)
        return jax.block_until_ready(
            program(subject.parameters, subject.tables(LENGTH), ids, starts, rows, None, None)
        )

    record = run_writer(subject, folder, requested, batch)
    return {"bare": partial(run, None), "tapped": partial(run, tapped), "recorded": record}


def llama(config: DecoderConfig, tensors: dict[str, Array], dtype: str) -> Any:
    """Return transformers' model with the same weights, on as many threads as the reference uses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(WORKERS)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.width, intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim, rms_norm_eps=config.norm_eps, max_position_embeddings=config.context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied, attention_bias=config.o_bias, mlp_bias=config.mlp_bias,
        )  # fmt: skip
    ).to(getattr(torch, dtype))
    state = {n: torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16) for n, x in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tied else set())
    return model.eval()


def torch_forward(model: Any, every: bool) -> Callable[[], object]:
    import torch

    ids = torch.tensor([token_ids(model.config.vocab_size)])

    @torch.inference_mode()
    def run() -> object:
        return model(ids, use_cache=False, logits_to_keep=0 if every else 1).logits

    return run


def hook_jobs(model: Any, folder: Path, every: bool) -> Jobs:
    """Return transformers' bare forward, and the same with hooks on q, k, v and attention's output, saved to a file."""
    import torch

    run, saved = torch_forward(model, every), folder / "hooks.pt"

    def record() -> None:
        kept: dict[str, Any] = {}
        hooks = []
        for i, layer in enumerate(model.model.layers):
            a = layer.self_attn
            for name, module in (("q", a.q_proj), ("k", a.k_proj), ("v", a.v_proj)):
                hooks.append(module.register_forward_hook(lambda m, x, y, key=f"{i}.{name}": kept.update({key: y})))
            hooks.append(a.o_proj.register_forward_pre_hook(lambda m, x, key=f"{i}.attn_out": kept.update({key: x[0]})))
        kept["logits"] = run()
        for hook in hooks:
            hook.remove()
        torch.save(kept, saved)

    return {"bare": run, "recorded": record}


def capture_lines(checkpoint: Checkpoint, tensors: dict[str, Array], rounds: int, folder: Path) -> Iterable[Line]:
    from precaudit.tracing.subject import load

    subject = load("smollm2", "bf16", device="cpu")
    model = llama(checkpoint.config, tensors, "bfloat16") if has_torch() else None
    cases = (("", (), False, 1.15), (", every logit", (), True, None), (", with support", ("attn_norm", "final_norm"), False, None))
    for text, support, every, bound in cases:
        found = alternated(capture_jobs(subject, folder, support, every), rounds)
        note = versus(found, "recorded", "bare")
        yield Line(f"capture to disk{text} / bare prefill", ratio(found, "recorded", "bare"), "x", bound, note=note)
        yield Line(f"  without writing{text}", ratio(found, "tapped", "bare"), "x", note=versus(found, "tapped", "bare"))
        if model is not None and not support:
            found = alternated(hook_jobs(model, folder, every), rounds)
            note = versus(found, "recorded", "bare")
            yield Line(f"  torch hooks + torch.save{text} / bare", ratio(found, "recorded", "bare"), "x", note=note)


def reference(config: DecoderConfig, read: Callable[[str], Array], points: Iterable[str]) -> dict[str, Array]:
    """Return the reference's points, of each the last layer's: what was emitted before is overwritten."""
    held: dict[str, Array] = {}
    wanted = Wanted(frozenset(points), None, [np.asarray([LENGTH - 1])])
    forward(
        Model(config, read), [np.asarray(token_ids(config.vocab))], FP64, wanted, lambda i, at, p, y: held.update({p: y})
    )
    return held


def reference_flops(c: DecoderConfig) -> int:
    """Return the flops of the reference's matrix products, a multiplication and an addition counting 2.

    Every row: the q, k, v and output projections and the MLP's three matrices. Attention: q · kᵀ and weights · v over
    the blocks that are computed, BLOCK rows with all keys up to the block's last row. One row of the output matrix.
    """
    row = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.width * c.mlp_width
    edges = [(a, min(a + BLOCK, LENGTH)) for a in range(0, LENGTH, BLOCK)]
    pairs = sum((b - a) * b for a, b in edges)
    return 2 * (c.layers * (LENGTH * row + 2 * pairs * c.heads * c.head_dim) + c.vocab * c.width)


def dgemm() -> Callable[[], object]:
    a, b = (np.random.default_rng(i).standard_normal((DGEMM, DGEMM)) for i in (0, 1))
    return lambda: a @ b


def reference_lines(config: DecoderConfig, tensors: dict[str, Array], rounds: int) -> Iterable[Line]:
    read = tensors.__getitem__
    jobs: Jobs = {"ours": partial(reference, config, read, ROWS)}
    if has_torch():
        jobs["torch"] = torch_forward(llama(config, tensors, "float64"), False)
    jobs |= {"dgemm": dgemm(), "every": partial(reference, config, read, EVERY)}
    found = alternated(jobs, rounds)
    if has_torch():
        what = "FP64 reference / torch float64"
        yield Line(what, ratio(found, "ours", "torch"), "x", 1.2, note=versus(found, "ours", "torch"))
        note = versus(found, "every", "torch")
        yield Line("  with scores and probs emitted / torch float64", ratio(found, "every", "torch"), "x", note=note)
    peak = 2 * DGEMM**3 / min(found["dgemm"])
    flops = reference_flops(config)
    note = f"{flops / 1e9:.1f} GFLOP in {median(found['ours']):.3f} s"
    yield Line("FP64 reference, share of DGEMM", 100 * flops / median(found["ours"]) / peak, "%", 65.0, True, note)
    yield Line("limit: DGEMM 2048³, NumPy, best", peak / 1e9, "GFLOP/s")


def copy_line(rounds: int) -> Line:
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    best = min(alternated({"copy": lambda: np.copyto(target, source)}, max(rounds, 3))["copy"])
    return Line("limit: memory copy of 512 MiB, read + write, best", 2 * COPY / best / 1e9, "GB/s")


def emulation_lines(config: DecoderConfig, tensors: dict[str, Array], rounds: int) -> Iterable[Line]:
    from precaudit.numpy_decoder.accumulation import FORMATS, accumulating

    kept: dict[tuple[int, str], Array] = {}
    rows, to_bfloat16 = np.arange(LENGTH), rounder("bfloat16")
    wanted = Wanted({"q", "k", "v"}, None, [rows[-1:]])

    def keep(i: int, layer: int | None, point: str, values: Array) -> None:
        kept[layer or 0, point] = to_bfloat16(values)

    forward(Model(config, tensors.__getitem__), [np.asarray(token_ids(config.vocab))], FP64, wanted, keep)

    def emulate(name: str) -> None:
        rounding = Rounding(dot=accumulating(name))
        with one_blas_thread():
            for i in range(config.layers):
                attention(kept[i, "q"], kept[i, "k"], kept[i, "v"], rows, rounding)

    found = alternated({name: partial(emulate, name) for name in FORMATS}, rounds)
    for name in FORMATS:
        bound = 5.0 if name == "float16" else None
        yield Line(f"{name} accumulation, attention of {config.layers} layers", median(found[name]), "s", bound)


def command(*words: str, folder: Path | None = None) -> str:
    """Run a command line of this Python's environment, references cached in ``folder``; return what it printed."""
    environment = os.environ | ({"PRECAUDIT_REFS": str(folder / "refs")} if folder else {})
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout


def command_lines(folder: Path) -> Iterable[Line]:
    precaudit = partial(command, "-m", "precaudit", folder=folder)
    helped = alternated({"help": partial(precaudit, "--help")}, 7)["help"]
    yield Line("precaudit --help", median(helped), "s", 0.25)
    precaudit("trace", "smollm2", "--text", TEXT, "--layers", "0:30", "-o", "run")
    whole = seconds(partial(precaudit, "compare", "run"))
    narrowed = alternated({"layer": partial(precaudit, "compare", "run", "--layers", "29")}, 3)["layer"]
    note = f"the whole comparison {whole:.1f} s"
    yield Line("narrowing a compared run to one layer", median(narrowed), "s", 1.0, note=note)


def peak_rss() -> None:
    """Print the peak resident bytes of this process after one reference from the model file (hidden option)."""
    checkpoint = open_checkpoint("smollm2")
    reference(checkpoint.config, checkpoint.tensors.read, ROWS)
    assert not {"jax", "torch"} & set(sys.modules)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def has_torch() -> bool:
    return find_spec("torch") is not None


def measure(checkpoint: Checkpoint, rounds: int, folder: Path) -> Iterable[Line]:
    # First, while this process is small: Linux counts what the parent held at the fork in the child's ru_maxrss.
    rss = int(command(str(Path(__file__).resolve()), "--peak-rss")) / 1e9
    yield Line("FP64 reference, peak memory of its process", rss, "GB", 1.0)
    yield from command_lines(folder)
    tensors = weights(checkpoint)
    yield copy_line(rounds)
    yield from reference_lines(checkpoint.config, tensors, rounds)
    yield from emulation_lines(checkpoint.config, tensors, rounds)
    yield from capture_lines(checkpoint, tensors, rounds, folder)


def show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("measurement", "value", "bound", "", "medians")
    for x in lines:
        bound = "" if x.bound is None else f"{'≥' if x.least else '≤'} {x.bound:g} {x.unit}"
        table.add_row(x.what, f"{x.value:.3g} {x.unit}", bound, x.verdict, x.note)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def save(lines: list[Line], rounds: int) -> None:
    versions = {n: metadata.version(n) for n in ("precaudit", "jax", "numpy", "numba", *(["torch"] if has_torch() else []))}
    content = {"pairs": rounds, "cores": WORKERS, "versions": versions}
    content["lines"] = [asdict(x) | {"verdict": x.verdict} for x in lines]
    path = Path(__file__).parent / "results" / "main_job.json"
    path.parent.mkdir(exist_ok=True)
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
        peak_rss()
        return 0
    if not has_torch():
        print("torch is not installed (pip install -e .[oracle]): its lines are left out", file=sys.stderr)
    rounds = 2 if args.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for line in measure(checkpoint, rounds, Path(folder)):
            print(f"{line.what}: {line.value:.3g} {line.unit} {line.verdict}", file=sys.stderr, flush=True)
            lines.append(line)
    show(lines)
    if args.save:
        save(lines, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
