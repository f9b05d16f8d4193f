"""What to change, and what it buys: the program run again with one part of its policy raised to float32 (JAX)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from precaudit.diagnosis.evidence.records import Remedy
from precaudit.diagnosis.evidence.shares import own_errors
from precaudit.errors import UserError
from precaudit.interpreters.jaxpr import CannotLift
from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder.kernels import check_config
from precaudit.models.numpy_decoder.forward import Sequences, Wanted, forward
from precaudit.models.numpy_decoder.model import Model
from precaudit.models.numpy_decoder.rounding import FP64
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.progress import Advance
from precaudit.recording.tracing.programs import decode_program, prefill_program
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.graphs.decoder import LOGITS, POINTS
from precaudit.schema.lengths import bucket, row_lengths
from precaudit.schema.metrics.logits import kl, top_ids
from precaudit.schema.policies import KERNELS, Policy, apply_settings, check_kernel, kernel_formats
from precaudit.schema.records.base import json_number

RUNS = 5  # paired timed calls; the median counts
ROWS = 64  # positions of each prompt whose logits are compared: the last ones
FLOOR = 0.02  # share of time below which a price is not told from noise
# How a part is raised in a program of one's own.
CODE = {
    "scores": 'jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=jnp.float32)',
    "probs": "jax.nn.softmax(scores.astype(jnp.float32), axis=-1)  # not cast back before · v",
    "attn_out": 'jnp.einsum("bgrts,bsgk->btgrk", p, v, preferred_element_type=jnp.float32)',
    "residual": "x = x.astype(jnp.float32)  # before the layers; x + out.astype(jnp.float32) in them",
    "activations": "lax.dot_general(x, w, …, preferred_element_type=jnp.float32)  # not cast back",
    "mlp": "jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)",
    "router": "lax.dot_general(x, router, …, preferred_element_type=jnp.float32)",
    "logits": "lax.dot_general(x, head, …, preferred_element_type=jnp.float32)",
    "norm": "y = x.astype(jnp.float32)  # inside the norm",
    "rope": "cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)",
    "softmax": "jax.nn.softmax(scores.astype(jnp.float32), axis=-1)",
    "attention": "jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)  # float32 scores, never stored",
    "mask": "mask = (keys <= rows) & (keys >= starts)  # every key before a row",
    "all": "every part in jnp.float32, lax.Precision.HIGHEST",
}
FLASH = "scores of a block of keys in jnp.float32 under a running maximum  # never stored"


SHOWN = {key: p.name for p in POINTS.values() for key in p.shows}


@dataclass(frozen=True)
class LogitsDistance:
    """Logits of one policy against FP64: mean KL in nats, rms logit error, margin error, top-1 flips.

    ``memory``: temporary bytes of a call; ``local``: own error by point, empty where it cannot be told.
    """

    kl: float
    rms: float
    margin: float
    flips: int
    memory: int
    local: dict[str, float]


def candidates(policy: Policy, config: DecoderConfig, platform: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (name, settings): each part below float32 raised to it, an attention kernel, then all parts.

    Parts that the policy's own kernel decides cannot be raised. Where a mask leaves out keys: all keys, first.
    """
    if policy.mask != "full":
        yield "mask", {"mask": "full"}
    parts = [k for k in CODE if k not in ("all", "attention", "mask") and (k != "router" or config.sparse)]
    narrow = [k for k in parts if FORMATS[policy.format_of(k)].unit_roundoff > 2.0**-24]
    for key in narrow:
        if key not in kernel_formats(policy):
            yield key, {key: "float32"}
    if "scores" in narrow and (kernel := kernel_for(policy, config, platform)) is not None:
        yield "attention", {"attention": kernel}
    if len(narrow) > 1 or policy.matmul != "highest":
        yield "all", {**dict.fromkeys(narrow, "float32"), "matmul": "highest"}


def kernel_for(policy: Policy, config: DecoderConfig, platform: str) -> str | None:
    """Return the first attention kernel that keeps scores in float32 and stores nothing else in fewer bits."""
    for kernel in KERNELS:
        try:
            made = apply_settings(policy, {"attention": kernel})
            check_config(made, config)
            check_kernel(made, platform)
        except UserError:
            continue
        changed = [k for k in kernel_formats(made) if getattr(made, k) != getattr(policy, k)]
        if changed and all(getattr(made, k) == "float32" for k in changed):
            return kernel
    return None


def remedies(
    subject: Subject, model: Model, run: str, prompts: Sequence[Array], tell: Advance, layer: int | None = None
) -> list[Remedy]:
    """Return what raising each part of the policy gains in logits and costs, best gain for its price first.

    ``prompts``: token ids; ``run``: what the records are marked with; ``layer``: one to raise alone. The price is that
    of prefill and of a decode step on this device. None where FP64's own logits are not finite: no format mends these.
    """
    exact: dict[int, Array] = {}
    rows = [np.arange(max(0, len(t) - ROWS), len(t)) for t in prompts]
    wanted = Wanted({LOGITS}, None, rows)
    forward(model, Sequences(list(prompts)), [FP64], wanted, lambda i, _at, _p, x: exact.update({i: np.array(x)}))
    if not all(np.isfinite(x).all() for x in exact.values()):
        return []
    before = _measure(subject, prompts, rows, exact)
    found: list[tuple[float, Remedy]] = []
    options = list(candidates(subject.policy, subject.config, subject.platform))
    if layer is not None and len(options) > 1:
        options.insert(len(options) - 1, (f"layer {layer}", options[-1][1]))
    held = {subject.policy.activations: subject}  # one program of each format of weights: others share its arrays
    for i, (name, settings) in enumerate(options):
        tell(i, len(options), "trying other policies")
        try:
            raised = _raise_part(held, subject, name, settings, layer)
            after = _measure(raised, prompts, rows, exact)
        except UserError:
            continue
        gain = 1.0 - after.kl / before.kl if before.kl > 0 else 0.0
        ratios = _price(subject, raised, prompts[-1], rows[-1])
        prefill, step = (median(ratios[kind]) for kind in ("prefill", "decode"))
        point = SHOWN.get(name, SHOWN["activations"])
        known = point in before.local and point in after.local
        remedy = Remedy(
            run=run,
            part=name,
            settings=settings,
            command=_words(name, settings),
            code=_code(name, settings),
            kl=(json_number(before.kl), json_number(after.kl)),
            rms=(json_number(before.rms), json_number(after.rms)),
            margin=(json_number(before.margin), json_number(after.margin)),
            point=point,
            local=(json_number(before.local[point]), json_number(after.local[point])) if known else None,
            flips=(before.flips, after.flips),
            positions=sum(map(len, rows)),
            gain=json_number(gain),
            time=json_number(prefill),
            decode_time=json_number(step),
            memory=json_number(after.memory / before.memory if before.memory else 1.0),
            ranges={kind: (json_number(min(x)), json_number(max(x))) for kind, x in ratios.items()},
            device=str(subject.device),
        )
        found.append((gain / max(prefill - 1.0, step - 1.0, FLOOR), remedy))
    return [r for _, r in sorted(found, key=lambda x: -x[0])]


def _raise_part(
    held: dict[str, Subject], subject: Subject, name: str, settings: dict[str, str], layer: int | None
) -> Subject:
    """Return the program with a part of its policy, or one layer, in float32; ``held`` gains it where none is like it.

    A second copy of weights in float32 would be four times a bfloat16 model.
    """
    wide = apply_settings(subject.policy, settings)
    if name.startswith("layer") and layer is not None:
        return subject.under(subject.policy, ((layer,), wide))
    found = held.get(wide.activations, subject).under(wide)
    held.setdefault(wide.activations, found)
    return found


def _words(name: str, settings: dict[str, str]) -> str:
    """Return what to give precaudit to try it; one layer alone has no setting."""
    if name.startswith("layer"):
        return f"{name} alone in float32"
    return "--policy fp32-highest" if name == "all" else f"--set {name}={settings[name]}"


def _code(name: str, settings: dict[str, str]) -> str:
    if settings.get("attention") == "flash":
        return FLASH
    return CODE[name] if name in CODE else f"lax.cond(i == {name.split()[1]}, block_in_float32, block, x)"


def _call(subject: Subject, tokens: Array, rows: Array) -> tuple[Any, tuple[Any, ...]]:
    """Return prefill's program and its arguments for one prompt."""
    size = bucket(len(tokens))
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    wanted = rows[None].astype(np.int32)
    starts = np.zeros(1, np.int32)
    return prefill_program(subject, None), (
        subject.parameters,
        subject.tables(size, row_lengths("prefill", len(tokens), size, size)[None]),
        padded,
        starts,
        wanted,
        None,
        None,
    )


def _step(subject: Subject, tokens: Array) -> tuple[Any, tuple[Any, ...]]:
    """Return decode's program and its arguments for the step after a prompt; the cache is used up by the call."""
    size = bucket(len(tokens) + 1)
    cache = jax.device_put(subject.decoder.init_cache(1, size), subject.device)
    at = np.asarray([len(tokens)], np.int32)
    return decode_program(subject, None), (
        subject.parameters,
        subject.tables(size, row_lengths("prefill", len(tokens), size, size)[None]),
        tokens[-1:],
        np.zeros(1, np.int32),
        at,
        cache,
        None,
    )


def _measure(
    subject: Subject, prompts: Sequence[Array], rows: Sequence[Array], exact: dict[int, Array]
) -> LogitsDistance:
    kls: list[float] = []
    margins: list[float] = []
    squares, count, flips, memory = 0.0, 0, 0, 0
    for i, tokens in enumerate(prompts):
        program, args = _call(subject, tokens, rows[i])
        logits = np.asarray(program(*args)[0], np.float64)[0]
        memory = max(memory, program.lower(*args).compile().memory_analysis().temp_size_in_bytes)
        kls += [kl(r, c) for r, c in zip(exact[i], logits, strict=True)]
        squares += float(((logits - exact[i]) ** 2).sum())
        count += logits.size
        flips += int((logits.argmax(axis=1) != exact[i].argmax(axis=1)).sum())
        best, second = top_ids(exact[i][-1], 2)
        error = logits[-1] - exact[i][-1]
        margins.append(abs(float(error[best] - error[second])))
    try:
        local = {} if subject.raised is not None else own_errors(subject, min(prompts, key=len))
    except CannotLift:
        local = {}
    rms = float(np.sqrt(squares / count))
    return LogitsDistance(float(np.mean(kls)), rms, float(np.mean(margins)), flips, memory, local)


def _price(base: Subject, raised: Subject, tokens: Array, rows: Array) -> dict[str, list[float]]:
    """Return the times of prefill and of a decode step, raised over base, of every pair of calls."""
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    for attempt in range(RUNS + 1):  # the first call compiles
        for kind, ratios in found.items():
            seconds = []
            for subject in (base, raised):
                program, args = _call(subject, tokens, rows) if kind == "prefill" else _step(subject, tokens)
                start = time.perf_counter()
                program(*args)[0].block_until_ready()
                seconds.append(time.perf_counter() - start)
            if attempt:
                ratios.append(seconds[1] / seconds[0])
    return found
