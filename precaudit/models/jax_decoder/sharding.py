"""Where the decoder's arrays lie on a mesh: prompts over ``data``; heads, MLP width and vocabulary over ``model``.

The layout of Megatron-LM (Shoeybi et al. 2019): projections into heads and into the MLP are cut by their rows, those
out of them by their columns, so that each device has a part of the terms of their sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from precaudit.errors import UserError
from precaudit.models.configs import DecoderConfig
from precaudit.schema.meshes import MeshShape

KEYS = ("wk", "wv", "bk", "bv", "qkv", "bqkv")  # cut where every device has a key/value head of its own
OUTWARDS = (
    "wq",
    "bq",
    "gate",
    "up",
    "bgate",
    "bup",
    "gate_up",
    "bgate_up",
    "expert_gate",
    "expert_up",
    "expert_gate_up",
)
INWARDS = ("wo", "down", "expert_down")
BIASES = ("bq", "bk", "bv", "bgate", "bup", "bqkv", "bgate_up")
TABLES = ("embed", "lm_head")


@dataclass(frozen=True)
class Layout:
    """A mesh of devices, and where a decoder's arrays lie on it."""

    shape: MeshShape
    config: DecoderConfig
    mesh: Mesh

    @classmethod
    def of(cls, shape: MeshShape, config: DecoderConfig, devices: Sequence[Any]) -> "Layout":
        """Return the layout over the first devices; raises UserError where there are too few."""
        if shape.devices > len(devices):
            few = f"--mesh {shape} is of {shape.devices} devices, and there are {len(devices)}"
            cpu = str(getattr(devices[0], "platform", "")) == "cpu"
            flag = f"; on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={shape.devices}"
            raise UserError(few + (flag if cpu else ""))
        if jax.process_count() > 1 and shape.devices < len(devices):
            raise UserError(
                f"--mesh {shape} is of {shape.devices} devices, and the {jax.process_count()} processes have "
                f"{len(devices)}: every process holds a part, so give a mesh of all"
            )
        each = np.array(devices[: shape.devices]).reshape(tuple(shape.axes.values()))
        return cls(shape, config, Mesh(each, tuple(shape.axes)))

    def named(self, spec: Spec) -> NamedSharding:
        """Return a way to cut an array as a sharding on the devices."""
        return NamedSharding(self.mesh, spec)

    def parameter(self, name: str, field: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return where a parameter lies."""
        return self.named(parameter_spec(name, field, shape, self.shape, self.config))

    @property
    def cache(self) -> NamedSharding:
        """Where the cache lies."""
        return self.named(cache_spec(self.shape, self.config))

    @property
    def by_prompt(self) -> NamedSharding:
        """Where what has a row for every prompt lies."""
        return self.named(Spec("data"))

    @property
    def everywhere(self) -> NamedSharding:
        """Where what every device has whole lies."""
        return self.named(Spec())

    def put(self, tree: object, where: object) -> Any:
        """Return arrays cut so; of what several processes hold alike, each keeps its own parts."""
        if jax.process_count() == 1:
            return jax.device_put(tree, where)
        shardings = jax.tree.broadcast(where, tree)
        return jax.tree.map(_place, tree, shardings)

    def tables(self, tables: object) -> Any:
        """Return where RoPE's tables lie."""
        return jax.tree.map(self.named, table_specs(tables), is_leaf=lambda x: isinstance(x, Spec))


def check_mesh(mesh: MeshShape, config: DecoderConfig, batch: int | None = None) -> None:
    """Raise UserError for a mesh that does not divide what is cut over it; ``batch``: prompts run together."""
    for what, size in (("heads", config.heads), ("the MLP's width", config.mlp_width)):
        if size % mesh.model:
            raise UserError(f"--mesh {mesh}: model={mesh.model} does not divide {what} ({size})")
    keys = config.kv_heads
    if keys % mesh.model and mesh.model % keys:
        raise UserError(
            f"--mesh {mesh}: model={mesh.model} neither divides the key/value heads ({keys}) nor is a multiple of them"
        )
    if batch is not None and batch % mesh.data:
        raise UserError(
            f"--mesh {mesh}: data={mesh.data} does not divide --batch {batch}; leave --batch out, or a multiple"
        )


def cuts_keys(mesh: MeshShape, config: DecoderConfig) -> bool:
    """Whether key/value heads are cut over devices; where there are fewer of them, every device has all."""
    return config.kv_heads % mesh.model == 0


def parameter_spec(name: str, field: str, shape: Sequence[int], mesh: MeshShape, config: DecoderConfig) -> Spec:
    """Return how a parameter [..., out, in] is cut; ``field``: values or scales of one that is held as integers."""
    keys = name in KEYS and cuts_keys(mesh, config)
    rows = -1 if name in BIASES or field == "scales" else -2
    if name in TABLES or name in OUTWARDS or keys:
        return _cut(shape, rows, mesh)
    return _cut(shape, -1, mesh) if name in INWARDS and field != "scales" else Spec()


def cache_spec(mesh: MeshShape, config: DecoderConfig) -> Spec:
    """Return how a cache [L, B, S, G, K], or its scales [L, B, S, G], is cut."""
    return Spec(None, "data", None, "model" if cuts_keys(mesh, config) else None)


def parameter_specs(params: object, mesh: MeshShape, config: DecoderConfig) -> Any:
    """Return the tree of how parameters, or shapes of such, are cut."""

    def spec(path: tuple[Any, ...], x: Any) -> Spec:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        return parameter_spec(names[-1], "".join(fields[:1]), x.shape, mesh, config)

    return jax.tree_util.tree_map_with_path(spec, params)


def table_specs(tables: object) -> Any:
    """Return how RoPE's tables are cut: [P, R/2] not, each sequence's own [B, P, R/2] as the sequences are."""
    return jax.tree.map(lambda x: Spec("data") if len(x.shape) == 3 else Spec(), tables)


def call_specs(mesh: MeshShape, config: DecoderConfig) -> Callable[..., Any]:
    """Return what gives the tree of how the arguments of a prefill or a decode are cut."""

    def specs(params: object, tables: object, *rest: Any) -> tuple[Any, ...]:
        tokens, starts, rows, cache, take = rest
        by_prompt = jax.tree.map(lambda _: Spec("data"), (tokens, starts, rows, take))
        caches = jax.tree.map(lambda _: cache_spec(mesh, config), cache)
        return parameter_specs(params, mesh, config), table_specs(tables), *by_prompt[:3], caches, by_prompt[3]

    return specs


def _place(x: object, where: NamedSharding) -> Any:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, where)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def _cut(shape: Sequence[int], axis: int, mesh: MeshShape) -> Spec:
    """Return how one axis is cut over ``model``; not, where that does not divide it."""
    at = len(shape) + axis
    return Spec(*[None] * at, "model") if shape[at] % mesh.model == 0 else Spec()
