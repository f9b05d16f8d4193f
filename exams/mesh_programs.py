"""Correct programs on several devices, in every form of sharding that JAX has: a decoder of two layers, and others.

Each form is a function of a mesh, by its name, a format, and whether its layers attend. Widths and lengths are small:
what is judged is how a program is cut over devices, and that does not depend on them.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from precaudit import Program

MESHES = {"2": (1, 2), "4": (1, 4), "8": (1, 8), "2 × 4": (2, 4)}
FORMATS = ("bfloat16", "float16", "float32")
LAYERS, WIDTH, HEADS, HEAD, INNER, BATCH, TOKENS = 2, 64, 8, 16, 128, 2, 12
Layer = Callable[[Any, Any], Any]


def mesh_of(name: str, axes: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of (data, model) devices."""
    return jax.make_mesh(MESHES[name], ("data", "model"), axis_types=(axes, axes))


def weights(dtype: str, attends: bool = True) -> tuple[dict[str, Any], Any]:
    """Return the decoder's weights, stacked over layers, and its input [B, T, D]; ``attends``: with attention's."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (WIDTH, HEADS * HEAD), "k": (WIDTH, HEADS * HEAD), "v": (WIDTH, HEADS * HEAD), "o": (HEADS * HEAD, WIDTH),
        "up": (WIDTH, INNER), "down": (INNER, WIDTH),
    }  # fmt: skip
    made = {n: jnp.asarray(rng.standard_normal((LAYERS, *s)) / s[0] ** 0.5, dtype) for n, s in shapes.items()}
    if not attends:
        made = {n: made[n] for n in ("up", "down")}
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
    """Return a layer of the decoder, without attention where it has no weights of it; ``out``: of what is added."""
    if "o" in w:
        x = x + out(jnp.einsum("btf,fd->btd", attention(x, w), w["o"], **how))
    return x + out(jnp.einsum("btf,fd->btd", jax.nn.silu(norm(x) @ w["up"]), w["down"], **how))


def forward(params: Any, x: Any, body: Layer = layer) -> Any:
    return norm(lax.scan(lambda x, w: (body(x, w), None), x, params)[0])


SPECS = {n: P(None, None, "model") for n in ("q", "k", "v", "up")} | {n: P(None, "model", None) for n in ("o", "down")}
BY_ROWS = dict.fromkeys(SPECS, P(None, "model", None))


def specs_of(params: Mapping[str, Any]) -> dict[str, P]:
    """Return how Megatron cuts weights: products into heads and the MLP by columns, those back by rows."""
    return {n: SPECS[n] for n in params}


def placed(mesh: Mesh, params: Mapping[str, Any], specs: Mapping[str, P]) -> dict[str, Any]:
    return {n: jax.device_put(w, NamedSharding(mesh, specs[n])) for n, w in params.items()}


def program(call: Callable[..., Any], params: Any, x: Any) -> Program:
    return Program(call, params, {"a": (x,)}, outputs="out")


def tensor_parallel(mesh: str, dtype: str, attends: bool = True) -> Program:
    """Megatron's layout by the arguments' shardings alone (Shoeybi et al. 2019)."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    return program(forward, placed(m, params, SPECS), jax.device_put(x, NamedSharding(m, P("data"))))


def in_shardings(mesh: str, dtype: str, attends: bool = True) -> Program:
    """The same by ``jit``'s ``in_shardings``."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    given = {n: NamedSharding(m, s) for n, s in specs_of(params).items()}
    return program(jax.jit(forward, in_shardings=(given, NamedSharding(m, P("data")))), params, x)


def constrained(mesh: str, dtype: str, attends: bool = True) -> Program:
    """The same with constraints inside, on the stream and before each sum."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    whole = NamedSharding(m, P("data", None, None))
    body = partial(layer, out=lambda y: lax.with_sharding_constraint(y, whole))
    return program(partial(forward, body=body), placed(m, params, SPECS), x)


def by_rows(mesh: str, dtype: str, attends: bool = True) -> Program:
    """Weights cut by their first axis, as FSDP holds them (Zhao et al. 2023)."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    return program(forward, placed(m, params, BY_ROWS), jax.device_put(x, NamedSharding(m, P("data"))))


def explicit(mesh: str, dtype: str, attends: bool = True) -> Program:
    """Shardings in types: ``AxisType.Explicit``."""
    m, (params, x) = mesh_of(mesh, AxisType.Explicit), weights(dtype, attends)
    how = {"out_sharding": NamedSharding(m, P("data", None, None))}

    def body(x: Any, w: Any) -> Any:
        return layer(x, w, **how)

    with jax.set_mesh(m):
        return program(partial(forward, body=body), placed(m, params, SPECS), jax.device_put(x, how["out_sharding"]))


def mapped(mesh: str, dtype: str, attends: bool = True, body: Layer | None = None) -> Program:
    """Each device's part written out: ``shard_map`` with ``psum``."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    own = body or partial(layer, out=partial(lax.psum, axis_name="model"))
    how = {"mesh": m, "in_specs": (specs_of(params), P("data")), "out_specs": P("data"), "check_vma": False}
    return program(jax.shard_map(partial(forward, body=own), **how), placed(m, params, SPECS), x)


def nested(mesh: str, dtype: str, attends: bool = True) -> Program:
    """A ``shard_map`` over one axis within another's."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    body = partial(forward, body=partial(layer, out=partial(lax.psum, axis_name="model")))

    def call(params: Any, x: Any) -> Any:
        how = {"in_specs": (specs_of(params), P()), "out_specs": P(), "axis_names": {"model"}, "check_vma": False}
        return jax.shard_map(body, **how)(params, x)

    how = {"mesh": m, "in_specs": (P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    return program(jax.shard_map(call, **how, check_vma=False), params, x)


def by_pmap(mesh: str, dtype: str, attends: bool = True) -> Program:
    """``pmap`` over all devices, with weights cut before."""
    n, (params, x) = math.prod(MESHES[mesh]), weights(dtype, attends)

    def cut(name: str, w: Any) -> Any:
        axis = SPECS[name].index("model")
        return jnp.stack(jnp.split(w, n, axis))

    body = partial(forward, body=partial(layer, out=partial(lax.psum, axis_name="all")))
    mapped = jax.pmap(body, "all", in_axes=(0, None), out_axes=None, devices=jax.devices()[:n])
    return program(mapped, {name: cut(name, w) for name, w in params.items()}, x)


def by_sequence(mesh: str, dtype: str, attends: bool = True) -> Program:
    """The stream cut by tokens between sums: ``psum_scatter`` and ``all_gather`` (Korthikanti et al. 2022)."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    how = {"axis_name": "model", "tiled": True}

    def body(x: Any, w: Any) -> Any:
        gather = partial(lax.all_gather, axis=1, **how)
        scatter = partial(lax.psum_scatter, scatter_dimension=1, **how)
        if "o" in w:
            x = x + scatter(attention(gather(x), w) @ w["o"])
        return x + scatter(jax.nn.silu(norm(gather(x)) @ w["up"]) @ w["down"])

    spec = P("data", "model")
    call = jax.shard_map(
        partial(forward, body=body), mesh=m, in_specs=(specs_of(params), spec), out_specs=spec, check_vma=False
    )
    tokens = MESHES[mesh][1] * 4
    return program(call, placed(m, params, SPECS), jnp.tile(x, (1, 3, 1))[:, :tokens])


def by_expert(mesh: str, dtype: str, attends: bool = True) -> Program:
    """An expert a device, each given its tokens by ``all_to_all``."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
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


def pipelined(mesh: str, dtype: str, attends: bool = True) -> Program:
    """A stage a device: each hands the stream on by ``ppermute``."""
    m, (params, x) = mesh_of(mesh), weights(dtype, attends)
    n = MESHES[mesh][1]
    stages = {k: jnp.concatenate([w] * n)[:n] for k, w in params.items()}

    def call(w: Any, x: Any) -> Any:
        own = jax.tree.map(lambda a: a[0], w)

        def step(x: Any, _: None) -> tuple[Any, None]:
            return lax.ppermute(layer(x, own), "model", [(i, (i + 1) % n) for i in range(n)]), None

        return norm(lax.scan(step, x, length=n)[0])[None]

    specs = dict.fromkeys(stages, P("model"))
    f = jax.shard_map(call, mesh=m, in_specs=(specs, P()), out_specs=P("model"), check_vma=False)
    return program(f, stages, x)


def batch(x: Any) -> Any:
    """Return sequences of which no two are alike, as many as the most devices."""
    return jnp.concatenate([x * (1 + i / 8) for i in range(4)]).astype(x.dtype)


def down_gradient(params: Any, x: Any) -> Any:
    """Return a loss's gradient of the MLP's second weight, of a decoder, or of one layer by its weights."""
    run = forward if params["down"].ndim == 3 else lambda w, x: norm(layer(x, w))
    return jax.grad(lambda p: jnp.mean(run(p, x).astype(jnp.float32) ** 3))(params)["down"]


def to_train(dtype: str, attends: bool) -> tuple[dict[str, Any], Any]:
    """Return weights and sequences of a gradient: of the decoder, or of one layer that does not attend."""
    params, x = weights(dtype, attends)
    return params if attends else {n: w[0] for n, w in params.items()}, batch(x)


def trained(mesh: str, dtype: str, attends: bool = True) -> Program:
    """A gradient, tokens cut over devices: its products have their terms on all of them."""
    params, x = to_train(dtype, attends)
    return program(down_gradient, params, jax.device_put(x, NamedSharding(mesh_of(mesh), P("model"))))


CORRECT: dict[str, Callable[[str, str, bool], Program]] = {
    "tensor parallel": tensor_parallel, "in_shardings": in_shardings, "constraints": constrained, "rows": by_rows,
    "explicit": explicit, "shard_map": mapped, "nested": nested, "pmap": by_pmap, "sequence": by_sequence,
    "experts": by_expert, "pipeline": pipelined, "gradient": trained,
}  # fmt: skip
