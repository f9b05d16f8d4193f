"""Projections some families store as one tensor, read as their parts."""

from collections.abc import Mapping
from dataclasses import dataclass

from precaudit.models.checkpoints.tensors import ALL, Tensors, read_rows
from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array

# stored tensor → the parts along its rows, in order
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True)
class SplitTensors:
    """Tensors underneath, their fused projections as parts: ``parts`` maps a part to (stored name, rows)."""

    inner: Tensors
    parts: Mapping[str, tuple[str, slice]]

    @classmethod
    def of(cls, inner: Tensors, config: DecoderConfig) -> "SplitTensors | Tensors":
        """Return the tensors with every fused projection split; as they are where nothing is fused."""
        q, kv, f = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.mlp_width
        sizes = {"self_attn.qkv_proj": (q, kv, kv), "mlp.gate_up_proj": (f, f)}
        parts: dict[str, tuple[str, slice]] = {}
        for name, shape in inner.shapes().items():
            stem, _, kind = name.rpartition(".")
            fused = next((x for x in FUSED if stem.endswith(x)), None)
            if fused is None or not shape or shape[0] != sum(sizes[fused]):
                continue
            first = 0
            for part, rows in zip(FUSED[fused], sizes[fused], strict=True):
                parts[f"{stem.removesuffix(fused)}{part}.{kind}"] = (name, slice(first, first + rows))
                first += rows
        return cls(inner, parts) if parts else inner

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, parts in place of what they are cut from."""
        inner, cut = self.inner.shapes(), {stored for stored, _ in self.parts.values()}
        found = {name: shape for name, shape in inner.items() if name not in cut}
        for part, (stored, rows) in self.parts.items():
            found[part] = (rows.stop - rows.start, *inner[stored][1:])
        return found

    def read_tensor(self, name: str) -> Array:
        """Return a tensor, a part as a view of what it is cut from."""
        if name not in self.parts:
            return self.inner.read_tensor(name)
        stored, rows = self.parts[name]
        return self.inner.read_tensor(stored)[rows]

    def read_rows(self, name: str, rows: slice) -> Array:
        """Return some rows of a tensor, or of a part."""
        if name not in self.parts:
            return read_rows(self.inner, name, rows)
        stored, own = self.parts[name]
        inside = range(own.start, own.stop)[rows]
        return read_rows(self.inner, stored, slice(inside.start, inside.stop))

    def original(self, name: str, rows: slice = ALL) -> Array | None:
        """Return FP64 values before rounding, None where nothing was rounded."""
        if name not in self.parts:
            return self.inner.original(name, rows)
        stored, own = self.parts[name]
        inside = range(own.start, own.stop)[rows]
        return self.inner.original(stored, slice(inside.start, inside.stop))
