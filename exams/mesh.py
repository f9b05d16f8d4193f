"""Programs on several devices: honest ones in every form that JAX has must pass, and mistakes of meshes be named.

Eight devices of one host's CPU. Honest: each form × format × mesh is traced, compared and gated. Mistakes: ``same``
holds a sharded program with a mistake against the program of one device. Run: python -m exams.mesh [--only NAME]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from exams.cut import add_part
from precaudit import Program
from precaudit.judging.gate import gate
from precaudit.workflows.same import same
from precaudit.workflows.verbs import compare, trace

MESHES = {"2": (1, 2), "4": (1, 4), "8": (1, 8), "2 × 4": (2, 4)}
FORMATS = ("bfloat16", "float16", "float32")
LAYERS, WIDTH, HEADS, HEAD, INNER, BATCH, TOKENS = 2, 64, 8, 16, 128, 2, 12
Layer = Callable[[Any, Any], Any]


def mesh_of(name: str, axes: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of (data, model) devices."""
    return jax.make_mesh(MESHES[name], ("data", "model"), axis_types=(axes, axes))


def weights(dtype: str) -> tuple[dict[str, Any], Any]:
    """Return the decoder's weights, stacked over layers, and its input [B, T, D]."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (WIDTH, HEADS * HEAD), "k": (WIDTH, HEADS * HEAD), "v": (WIDTH, HEADS * HEAD), "o": (HEADS * HEAD, WIDTH),
        "up": (WIDTH, INNER), "down": (INNER, WIDTH),
    }  # fmt: skip
    made = {n: jnp.asarray(rng.standard_normal((LAYERS, *s)) / s[0] ** 0.5, dtype) for n, s in shapes.items()}
    return made, jnp.asarray(rng.standard_normal((BATCH, TOKENS, WIDTH)), dtype)


def norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def attention(x: Any, w: Mapping[str, Any]) -> Any:
    """Return what heads attend to, [B, T, heads · K], of the heads that these weights have."""
    n = norm(x)
    q, k, v = (jnp.reshape(n @ w[c], (*x.shape[:2], -1, HEAD)) for c in "qkv")
    s = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) * HEAD**-0.5
    p = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), s, -jnp.inf)).astype(x.dtype)
    return jnp.einsum("bhts,bshk->bthk", p, v).reshape(*x.shape[:2], -1)


def layer(x: Any, w: Mapping[str, Any], out: Callable[[Any], Any] = lambda x: x, **how: Any) -> Any:
    """Return a layer of the decoder; ``out``: of what is added to the stream."""
    x = x + out(jnp.einsum("btf,fd->btd", attention(x, w), w["o"], **how))
    return x + out(jnp.einsum("btf,fd->btd", jax.nn.silu(norm(x) @ w["up"]), w["down"], **how))


def forward(params: Any, x: Any, body: Layer = layer) -> Any:
    return norm(lax.scan(lambda x, w: (body(x, w), None), x, params)[0])


SPECS = {n: P(None, None, "model") for n in ("q", "k", "v", "up")} | {n: P(None, "model", None) for n in ("o", "down")}
BY_ROWS = dict.fromkeys(SPECS, P(None, "model", None))


def placed(mesh: Mesh, params: Mapping[str, Any], specs: Mapping[str, P]) -> dict[str, Any]:
    return {n: jax.device_put(w, NamedSharding(mesh, specs[n])) for n, w in params.items()}


def program(call: Callable[..., Any], params: Any, x: Any) -> Program:
    return Program(call, params, {"a": (x,)}, outputs="out")


def tensor_parallel(mesh: str, dtype: str) -> Program:
    """Megatron's layout by the arguments' shardings alone (Shoeybi et al. 2019)."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    return program(forward, placed(m, params, SPECS), jax.device_put(x, NamedSharding(m, P("data"))))


def in_shardings(mesh: str, dtype: str) -> Program:
    """The same by ``jit``'s ``in_shardings``."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    given = {n: NamedSharding(m, s) for n, s in SPECS.items()}
    return program(jax.jit(forward, in_shardings=(given, NamedSharding(m, P("data")))), params, x)


def constrained(mesh: str, dtype: str) -> Program:
    """The same with constraints inside, on the stream and before each sum."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    whole = NamedSharding(m, P("data", None, None))
    body = partial(layer, out=lambda y: lax.with_sharding_constraint(y, whole))
    return program(partial(forward, body=body), placed(m, params, SPECS), x)


def by_rows(mesh: str, dtype: str) -> Program:
    """Weights cut by their first axis, as FSDP holds them (Zhao et al. 2023)."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    return program(forward, placed(m, params, BY_ROWS), jax.device_put(x, NamedSharding(m, P("data"))))


def explicit(mesh: str, dtype: str) -> Program:
    """Shardings in types: ``AxisType.Explicit``."""
    m, (params, x) = mesh_of(mesh, AxisType.Explicit), weights(dtype)
    how = {"out_sharding": NamedSharding(m, P("data", None, None))}

    def body(x: Any, w: Any) -> Any:
        return layer(x, w, **how)

    with jax.set_mesh(m):
        return program(partial(forward, body=body), placed(m, params, SPECS), jax.device_put(x, how["out_sharding"]))


def mapped(mesh: str, dtype: str, body: Layer | None = None) -> Program:
    """Each device's part written out: ``shard_map`` with ``psum``."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    own = body or partial(layer, out=partial(lax.psum, axis_name="model"))
    how = {"mesh": m, "in_specs": (SPECS, P("data")), "out_specs": P("data"), "check_vma": False}
    return program(jax.shard_map(partial(forward, body=own), **how), placed(m, params, SPECS), x)


def by_sequence(mesh: str, dtype: str) -> Program:
    """The stream cut by tokens between sums: ``psum_scatter`` and ``all_gather`` (Korthikanti et al. 2022)."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    how = {"axis_name": "model", "tiled": True}

    def body(x: Any, w: Any) -> Any:
        gather = partial(lax.all_gather, axis=1, **how)
        scatter = partial(lax.psum_scatter, scatter_dimension=1, **how)
        x = x + scatter(attention(gather(x), w) @ w["o"])
        return x + scatter(jax.nn.silu(norm(gather(x)) @ w["up"]) @ w["down"])

    spec = P("data", "model")
    call = jax.shard_map(partial(forward, body=body), mesh=m, in_specs=(SPECS, spec), out_specs=spec, check_vma=False)
    tokens = MESHES[mesh][1] * 4
    return program(call, placed(m, params, SPECS), jnp.tile(x, (1, 3, 1))[:, :tokens])


def by_expert(mesh: str, dtype: str) -> Program:
    """An expert a device, each given its tokens by ``all_to_all``."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    n = MESHES[mesh][1]
    ups, downs = (jnp.stack([params[name][0] * (1 + i / 8) for i in range(n)]).astype(dtype) for name in ("up", "down"))

    def call(w: Any, x: Any) -> Any:
        sent = lax.all_to_all(x, "model", split_axis=0, concat_axis=0, tiled=True)
        made = jax.nn.silu(norm(sent) @ w["up"][0]) @ w["down"][0]
        return x + lax.all_to_all(made, "model", split_axis=0, concat_axis=0, tiled=True)

    tokens = jnp.tile(x.reshape(-1, WIDTH), (6, 1))[: n * n * 2]
    specs = {"up": P("model"), "down": P("model")}
    f = jax.shard_map(call, mesh=m, in_specs=(specs, P("model")), out_specs=P("model"), check_vma=False)
    return program(f, {"up": ups, "down": downs}, tokens)


def pipelined(mesh: str, dtype: str) -> Program:
    """A stage a device: each hands the stream on by ``ppermute``."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    n = MESHES[mesh][1]
    stages = {k: jnp.concatenate([w] * n)[:n] for k, w in params.items()}

    def call(w: Any, x: Any) -> Any:
        own = jax.tree.map(lambda a: a[0], w)
        for _ in range(n):
            x = lax.ppermute(layer(x, own), "model", [(i, (i + 1) % n) for i in range(n)])
        return norm(x)[None]

    specs = dict.fromkeys(stages, P("model"))
    f = jax.shard_map(call, mesh=m, in_specs=(specs, P()), out_specs=P("model"), check_vma=False)
    return program(f, stages, x)


def batch(x: Any) -> Any:
    """Return sequences of which no two are alike, as many as the most devices."""
    return jnp.concatenate([x * (1 + i / 8) for i in range(4)]).astype(x.dtype)


def trained(mesh: str, dtype: str) -> Program:
    """A gradient, tokens cut over devices: its products have their terms on all of them."""
    m, (params, x) = mesh_of(mesh), weights(dtype)
    given = batch(x)

    def call(params: Any, x: Any) -> Any:
        return jax.grad(lambda p: jnp.mean(forward(p, x).astype(jnp.float32) ** 3))(params)["down"]

    return program(call, params, jax.device_put(given, NamedSharding(m, P("model"))))


HONEST: dict[str, Callable[[str, str], Program]] = {
    "tensor parallel": tensor_parallel, "in_shardings": in_shardings, "constraints": constrained, "rows": by_rows,
    "explicit": explicit, "shard_map": mapped, "sequence": by_sequence, "experts": by_expert, "pipeline": pipelined,
    "gradient": trained,
}  # fmt: skip


def summed(x: Any) -> Any:
    return lax.psum(x, "model")


def part_left_out(y: Any) -> Any:
    return summed(jnp.where(lax.axis_index("model") == 0, 0, y).astype(y.dtype))


def of_another_rank(y: Any) -> Any:
    n = lax.axis_size("model")
    return lax.ppermute(y, "model", [(i, (i + 1) % n) for i in range(n)])


def own_columns(x: Any) -> Any:
    """Return the columns that a device would hold of a stream cut by columns."""
    size = x.shape[-1] // lax.axis_size("model")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("model") * size, size, axis=-1)


def own_statistics(x: Any) -> Any:
    """Return a norm whose mean square is of a device's columns."""
    wide = x.astype(jnp.float32)
    own = own_columns(wide)
    return (wide * lax.rsqrt(jnp.mean(own * own, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def by_maximum(x: Any, of: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return rows over their largest element, as a row is scaled for integers; ``of``: what the largest is of."""
    wide = x.astype(jnp.float32)
    return (wide / jnp.max(jnp.abs(of(wide)), -1, keepdims=True)).astype(x.dtype)


def round_the_ring(y: Any) -> Any:
    """Return a sum that goes round the ranks, without the last part."""
    n, total, part = lax.axis_size("model"), y, y
    for _ in range(n - 2):
        part = lax.ppermute(part, "model", [(i, (i + 1) % n) for i in range(n)])
        total = total + part
    return total


def biased(y: Any) -> Any:
    return y + jnp.asarray(0.1, y.dtype)


def attended(x: Any, w: Mapping[str, Any]) -> Any:
    return x + summed(attention(x, w) @ w["o"])


def fed(
    x: Any, w: Mapping[str, Any], normed: Callable[[Any], Any] = norm, summed: Callable[[Any], Any] = summed
) -> Any:
    return x + summed(jax.nn.silu(normed(x) @ w["up"]) @ w["down"])


def with_weight_of_another(name: str, x: Any, w: Mapping[str, Any]) -> Any:
    return fed(attended(x, other := {**w, name: of_another_rank(w[name])}), other)


def scaled(x: Any, w: Mapping[str, Any]) -> Any:
    """Return a layer whose MLP reads rows over their largest element."""
    return fed(layer_of_attention(x, w), w, by_maximum, lambda y: y)


def layer_of_attention(x: Any, w: Mapping[str, Any]) -> Any:
    return x + attention(x, w) @ w["o"]


class Mistake(NamedTuple):
    """A layer with a mistake, the name of its cause, and the layer that is meant."""

    body: Layer
    name: str
    meant: Layer = layer


MISTAKES: dict[str, Mistake] = {
    "no sum": Mistake(partial(layer, out=lambda y: y), "sum missing"),
    "no sum after the MLP": Mistake(lambda x, w: fed(attended(x, w), w, summed=lambda y: y), "sum missing"),
    "summed twice": Mistake(partial(layer, out=lambda y: summed(y) + summed(y)), "added twice"),
    "a sum summed": Mistake(partial(layer, out=lambda y: summed(summed(y))), "summed again"),
    "own part once more": Mistake(partial(layer, out=lambda y: summed(y) + y), "added twice"),
    "mean for sum": Mistake(partial(layer, out=lambda y: lax.pmean(y, "model")), "mean for sum"),
    "over the other axis": Mistake(partial(layer, out=lambda y: lax.psum(y, "data")), "sum over another axis"),
    "a shard omitted": Mistake(partial(layer, out=part_left_out), "shard omitted"),
    "a ring too short": Mistake(lambda x, w: fed(attended(x, w), w, summed=round_the_ring), "shard omitted"),
    "bias on each shard": Mistake(
        partial(layer, out=lambda y: summed(biased(y))), "term on each shard", partial(layer, out=biased)
    ),
    "stream on each shard": Mistake(lambda x, w: fed(summed(x + attention(x, w) @ w["o"]), w), "term on each shard"),
    "heads of another rank": Mistake(
        lambda x, w: fed(x + summed(of_another_rank(attention(x, w)) @ w["o"]), w), "shard of another rank"
    ),
    "keys of another rank": Mistake(partial(with_weight_of_another, "k"), "shard of another rank"),
    "up of another rank": Mistake(partial(with_weight_of_another, "up"), "shard of another rank"),
    "statistics of one shard": Mistake(lambda x, w: fed(attended(x, w), w, own_statistics), "statistics of one shard"),
    "scale of one shard": Mistake(
        lambda x, w: fed(attended(x, w), w, partial(by_maximum, of=own_columns)), "statistics of one shard", scaled
    ),
}


def gradient_of_rows(mesh: str, averaged: bool) -> Program:
    """Return a gradient of tokens that devices share, averaged over them or each device's own."""
    m, (params, x) = mesh_of(mesh), weights("bfloat16")

    def call(params: Any, x: Any) -> Any:
        found = jax.grad(lambda p: jnp.mean(forward(p, x).astype(jnp.float32) ** 3))(params)["down"]
        return lax.pmean(found, "model") if averaged else found

    how = {"mesh": m, "in_specs": (P(), P("model")), "out_specs": P(), "check_vma": False}
    return program(jax.shard_map(call, **how), params, batch(x))


def honest_cells() -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    """Yield (what, what makes (whether the gate passes it, counts)): bfloat16 on every mesh, others on the last."""
    for name, make in HONEST.items():
        for dtype in FORMATS:
            for mesh in MESHES if dtype == "bfloat16" else ("2 × 4",):
                yield f"{name}, {dtype}, {mesh}", partial(judged_cell, make, mesh, dtype)


def judged_cell(make: Callable[[str, str], Program], mesh: str, dtype: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        made = make(mesh, dtype)
        run = trace(made, Path(folder) / "run")
        compare(run, made)
        judged = gate(run.folder)
    first = next((f"{v.point} of {v.layer}: {v.text}" for v in judged.verdicts), "")
    return judged.exit_code == 0, f"{dict(judged.counts)} {first if judged.exit_code else ''}"


def mistaken_cells() -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    """Yield (what, what makes (whether ``same`` names it, what it says))."""
    for mesh in MESHES:
        for name, mistake in MISTAKES.items():
            if (name, mesh) != ("a ring too short", "2"):  # there it is no sum
                yield f"{name}, {mesh}", partial(mistaken_cell, mesh, mistake)
        yield f"gradient not averaged, {mesh}", partial(gradient_cell, mesh)


def mistaken_cell(mesh: str, mistake: Mistake) -> tuple[bool, str]:
    params, x = weights("bfloat16")
    meant = program(partial(forward, body=mistake.meant), params, x)
    return told(same(meant, mapped(mesh, "bfloat16", mistake.body)), mistake.name)


def gradient_cell(mesh: str) -> tuple[bool, str]:
    honest, wrong = (gradient_of_rows(mesh, averaged) for averaged in (True, False))
    if same(trained(mesh, "bfloat16"), honest).exit_code != 0:
        return False, "the averaged one is not the same either"
    return told(same(trained(mesh, "bfloat16"), wrong), "not averaged")


def told(found: Any, name: str) -> tuple[bool, str]:
    (case,) = found.cases
    said = "; ".join(f"{m.name} ({m.source})" for m in case.causes) or f"no cause: {case.says}"
    return found.exit_code == 1 and {m.name for m in case.causes} == {name}, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    add_part(parser)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    kinds = {"honest": list(honest_cells()), "mistake": list(mistaken_cells())}
    some = {kind: args.part.of([cell for cell in cells if args.only in cell[0]]) for kind, cells in kinds.items()}
    asked = [(kind, cell) for kind, cells in some.items() for cell in cells]
    began, wrong = time.monotonic(), dict.fromkeys(kinds, 0)
    for kind, (what, ask) in asked:
        try:
            right, text = ask()
        except Exception as error:
            right, text = False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        wrong[kind] += not right
        print("right" if right else "WRONG", f"{kind:7} {what:32}", text[:170], flush=True)
    for kind, off in wrong.items():
        print(f"{sum(k == kind for k, _ in asked)} {kind} cells, {off} wrong")
    print(f"{time.monotonic() - began:,.0f} s")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
