"""Programs that others wrote, unedited, under audit: trace, compare, gate (``make programs``).

google-tunix's Llama 3 (prefill, decode with its cache, rematerialised, gradient), Qwen 3 and Gemma 3, small and with
random weights, none of them zero or one; and the examples. Prints docs/programs.md; exit 1 unless rounding explains
all, and the textbook of a known family finds what is known to be there (``FOUND``) and nothing else.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from exams.cut import add_part
from precaudit import Program, gate
from precaudit.diagnosis.programs import diagnose_program
from precaudit.interpreters.jaxpr.plan import PRODUCTS, WRITES
from precaudit.models.configs import model_tensors
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.tracing import trace_program
from precaudit.recording.runs.programs import Opened, ProgramPoint
from precaudit.references.comparison.programs import compare_program
from precaudit.references.mapped import textbook_of
from precaudit.references.names_map import Names
from precaudit.schema.limits import default_limits
from precaudit.schema.limits.checks import local_checks
from precaudit.schema.records.base import value
from precaudit.schema.records.errors import ErrorRecord
from precaudit.workflows.verbs import compare

EXAMPLES = Path(__file__).parent.parent / "examples"
OF_OURS = ("own_decoder", "tapped_decoder", "equinox_decoder", "linen_decoder", "nnx_decoder", "training_step")
TOKENS, VOCAB, LAYERS = 32, 256, 3
SUMS = {"reduce_sum", "cumsum", "add_any"}
SMALL = {"num_layers": LAYERS, "vocab_size": VOCAB, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16,
         "num_kv_heads": 2, "norm_eps": 1e-5}  # fmt: skip


def drawn(tree: Any) -> Any:
    """Return random bfloat16 weights in the place of a model's: norms around one, nothing zero."""
    draw = np.random.default_rng(0)

    def one(x: Any) -> Any:
        noise = draw.standard_normal(x.shape)
        near = 1 + 0.1 * noise if x.ndim <= 1 else noise / np.sqrt(np.prod(x.shape[:-1]))
        return jnp.asarray(near, jnp.bfloat16)

    return jax.tree.map(one, tree)


def of_nnx(model: Any) -> tuple[Callable[..., Any], Any]:
    """Return an NNX model as a function of its weights, and weights."""
    from flax import nnx

    graph, state = nnx.split(model)
    return lambda state, *given: nnx.merge(graph, state)(*given), drawn(state)


def prefilled(model: Any) -> Program:
    """Return a model's prefill."""
    call, params = of_nnx(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, TOKENS)), jnp.int32)
    seen = jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
    positions = jnp.arange(TOKENS)[None]
    return Program(
        lambda p, tokens, positions, seen: call(p, tokens, positions, None, seen)[0],
        params, {"a": (tokens, positions, seen)}, outputs="logits",
    )  # fmt: skip


def llama(**more: Any) -> Any:
    """Return tunix's Llama 3."""
    from flax import nnx
    from tunix.models.llama3 import model

    return model.Llama3(model.ModelConfig(rope_theta=500_000, **SMALL, **more), rngs=nnx.Rngs(0))


def llama_remat() -> Program:
    """Return Llama 3 with rematerialised blocks."""
    from tunix.models.llama3 import model

    return prefilled(llama(remat_config=model.RematConfig.BLOCK))


def llama_decode() -> Program:
    """Return four greedy steps of Llama 3 through its cache."""
    call, params = of_nnx(llama())
    empty = {"k": jnp.zeros((1, TOKENS, 2, 16), jnp.bfloat16), "v": jnp.zeros((1, TOKENS, 2, 16), jnp.bfloat16)}
    cache = {f"layer_{i}": {**empty, "end_index": jnp.zeros((1,), jnp.int32)} for i in range(LAYERS)}

    def step(p: Any, token: Any, position: Any, cache: Any) -> Any:
        return call(p, token, position, cache, (jnp.arange(TOKENS) <= position)[None])

    def advance(inputs: Any, outputs: Any) -> Any:
        logits, cache = outputs
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), inputs[1] + 1, cache

    first = (jnp.full((1, 1), 17, jnp.int32), jnp.zeros((1, 1), jnp.int32), cache)
    return Program(step, params, {"a": first}, 3, advance, ("logits", "cache"))


def llama_gradient() -> Program:
    """Return the gradients of Llama 3's loss."""
    whole = prefilled(llama())

    def loss(p: Any, tokens: Any, positions: Any, seen: Any) -> Any:
        found = jax.nn.log_softmax(whole.call(p, tokens, positions, seen).astype(jnp.float32))
        return -jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], -1).mean()

    return Program(jax.grad(loss), whole.params, whole.cases)


def qwen() -> Program:
    """Return tunix's Qwen 3."""
    from flax import nnx
    from tunix.models.qwen3 import model

    return prefilled(model.Qwen3(model.ModelConfig(rope_theta=1_000_000, **SMALL), rngs=nnx.Rngs(0)))


def gemma() -> Program:
    """Return tunix's Gemma 3: six layers, five of them with a window."""
    from flax import nnx
    from tunix.models.gemma3 import model

    small = {"num_layers": 6, "num_embed": VOCAB, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16,
             "num_kv_heads": 1}  # fmt: skip
    config = dataclasses.replace(model.ModelConfig.gemma3_270m(), **small)
    return prefilled(model.Gemma3(config, rngs=nnx.Rngs(0)))


TUNIX: dict[str, Callable[[], Program]] = {
    "tunix Llama 3": lambda: prefilled(llama()), "tunix Llama 3, decode": llama_decode,
    "tunix Llama 3, remat": llama_remat, "tunix Llama 3, gradient": llama_gradient, "tunix Qwen 3": qwen,
    "tunix Gemma 3": gemma,
}  # fmt: skip


EXAMPLE = "examples/own_decoder.py"
MAPS = Path(__file__).parent / "maps"
TEXTBOOK = {
    EXAMPLE: EXAMPLES / "own_decoder.toml", "examples/nnx_decoder.py": EXAMPLES / "nnx_decoder.toml",
    "tunix Llama 3": MAPS / "tunix_llama3.toml",
    "tunix Qwen 3": MAPS / "tunix_qwen3.toml", "tunix Gemma 3": MAPS / "tunix_gemma3.toml",
}  # fmt: skip
# What these programs compute otherwise than their configuration says, by cause
FOUND = {
    "tunix Llama 3": {"RoPE base 1e6"},
    "tunix Gemma 3": {"activation's constants in bfloat16"},
}  # fmt: skip


def worst(errors: list[ErrorRecord]) -> tuple[float, str]:
    """Return the largest of a run's local numbers over its limit, and the point it is at."""
    sizes = [
        (max(found / limit for _, _, found, limit, _ in checks), e.point)
        for e in errors
        if e.kind == "local" and (checks := list(local_checks(e, default_limits().local(e.dtype))))
    ]
    return max(sizes, default=(float("nan"), ""))


def kind_of(p: ProgramPoint) -> str:
    """Return what kind of segment ends in a point: a product, a write, a sum, or what goes into a product."""
    if p.primitive in PRODUCTS:
        return "product"
    return "write" if p.primitive in WRITES else "sum" if p.primitive in SUMS else "operand or result"


def by_kind(opened: Opened, errors: list[ErrorRecord]) -> Iterator[tuple[tuple[str, str], float, bool]]:
    """Yield every segment's (kind, format), its largest number over its limit, and whether it came out bit for bit."""
    kinds = {p.name: kind_of(p) for p in opened.record.points}
    for e in errors:
        if e.kind == "local" and e.unexplained is not None and e.dtype is not None:
            checks = local_checks(e, default_limits().local(e.dtype))
            size = max(found / limit for _, _, found, limit, _ in checks)
            yield (kinds[e.point], e.dtype), size, value(e.unexplained.rel_l2) == 0.0


def kinds_table(found: Mapping[tuple[str, str], list[tuple[float, bool]]]) -> str:
    """Return the table of segment kinds."""
    head = "| kind of segment | format | segments | bit for bit | worst |\n| --- | --- | --- | --- | --- |"
    rows = (
        f"| {kind} | {dtype} | {len(each)} | {sum(equal for _, equal in each)} | {max(size for size, _ in each):.2f} |"
        for (kind, dtype), each in sorted(found.items())
    )
    return "\n".join([head, *rows])


def row(
    name: str, program: Program, folder: Path, kinds: dict[tuple[str, str], list[tuple[float, bool]]]
) -> tuple[str, list[str], bool]:
    """Audit a program; return its row of the table, what the textbook says of it, and whether all is as known.

    ``kinds`` takes in its segments by kind.
    """
    start = time.perf_counter()
    opened = trace_program(program, folder)
    names = Names(TEXTBOOK[name], TEXTBOOK[name].with_suffix(".json")) if name in TEXTBOOK else None
    errors = compare_program(opened, program, names)
    judged = gate(folder)
    found = diagnose_program(opened, program).findings if names is not None else ()
    alone = set() if names is None else causes_by_values(opened, program, names)
    broken = [v for v in judged.verdicts if v.kind != "formula"]
    counts = Counter(v.status for v in broken) + Counter(
        {"pass": sum(e.kind != "formula" for e in errors) - len(broken)}
    )
    agree = "" if names is None else formula(errors, bool(found))
    local = [e for e in errors if e.kind == "local" and e.unexplained is not None]
    equal = sum(value(e.unexplained.rel_l2) == 0.0 for e in local if e.unexplained is not None)
    size, point = worst(errors)
    ratio = max(value(e.ratio) for e in errors if e.kind == "forward" and e.ratio is not None)
    told = ", ".join(f"{n} {status}" for status, n in counts.items())
    for kind, over_limit, bitwise in by_kind(opened, errors):
        kinds.setdefault(kind, []).append((over_limit, bitwise))
    neutral = "yes" if all(n.bitwise for n in opened.record.neutrality) else "no"
    text = (
        f"| {name} | {len(opened.record.points)} | {len(local)} | {equal} | {size:.2f} at {point} | {ratio:.2f} | "
        f"{neutral} | {told} | {agree} | {time.perf_counter() - start:.0f} |"
    )
    said = [f"- {name}: {f.kind}: {f.says}; error {value(f.rel_l2 or 0.0):.1e} at {f.point}" for f in found]
    if alone != {f.cause for f in found}:
        said.append(f"- {name}: by the model alone, without a map: {', '.join(sorted(alone)) or 'nothing'}")
    return text, said, not broken and {f.cause for f in found} == FOUND.get(name, set()) == alone


def causes_by_values(opened: Opened, program: Program, names: Names) -> set[str]:
    """Return what the textbook finds with a checkpoint of the same weights in place of the map (``--model``)."""
    book = textbook_of(names, program, opened)
    folder = opened.folder.parent / "model"
    folder.mkdir()
    tensors = {name: np.ascontiguousarray(book.model.read(name)) for name in model_tensors(book.config)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes(names.config.read_bytes())
    compare(opened, program, model=str(folder))
    return {f.cause for f in diagnose_program(opened, program).findings}


def formula(errors: list[ErrorRecord], found: bool) -> str:
    """Return the largest distance from the textbook; where something is found, that there is."""
    return "below" if found else f"{max(value(e.rel_l2) for e in errors if e.kind == 'formula'):.0e}"


def programs(which: str) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Yield (name, what makes the program) of those whose names hold ``which``."""
    every = {f"examples/{n}.py": lambda n=n: load_program(f"{EXAMPLES / n}.py:program") for n in OF_OURS} | TUNIX
    yield from ((name, make) for name, make in every.items() if which in name)


HEAD = """# Programs that others wrote, unedited

`make programs` records these programs at automatic points. It recomputes every operation between two points (a
*segment*) in FP64 and as its equations round. Forward errors go through the program's own state.

- *worst*: the largest local number over its limit. 1 fails; above ½ it is compared with sampled noise.
- *ratio*: the largest forward error over the error of the program's rounding.
- *neutral*: taps changed no bit of the outputs.
- *reference*: how far the program in FP64 is from its family's formulas, at the farthest point, if there is a map.

| program | points | segments | bit for bit | worst | ratio | neutral | verdicts | reference | s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> int:
    """Print the table; 1 unless every gate passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose names hold this")
    add_part(parser)
    asked = parser.parse_args()
    print(HEAD)
    passed, findings = [], []
    kinds: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for i, (name, make) in enumerate(asked.part.of(list(programs(asked.only)))):
        with tempfile.TemporaryDirectory() as folder:
            text, said, ok = row(name, make(), Path(folder) / str(i), kinds)
        print(text, flush=True)
        passed.append(ok)
        findings += said
    told = (
        "*Worst* is over the limits of [limits.toml](../precaudit/schema/limits/limits.toml), which are the decoder's:"
    )
    print(f"\nAll their segments, by what they end in. {told}\n\n" + kinds_table(kinds))
    if findings:
        print("\nWhat the textbook finds, as `precaudit diagnose` says it:\n\n" + "\n".join(findings))
    where = f"jax {jax.__version__}, {jax.devices()[0].platform}, part {asked.part}"
    print(f"\n{where}: {sum(passed)} of {len(passed)} are as known.")
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
