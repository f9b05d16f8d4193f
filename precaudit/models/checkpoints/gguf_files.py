"""GGUF files: dequantised by the gguf library, rounded once to bfloat16, and that is the model (docs/files.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from precaudit.errors import UserError
from precaudit.models.checkpoints.tensors import ALL, row_blocks
from precaudit.models.configs import EMBEDDING, HEAD
from precaudit.numbers.arrays import Array, as_format, release
from precaudit.numbers.formats import FORMATS

NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PLAIN = ("F32", "F16", "BF16")
ROPE_FREQS = "rope_freqs.weight"
MODEL_FORMAT = "bfloat16"
KEEP = 300_000_000  # bytes of a model that is dequantised once; of a larger one its embedding alone is held
PERMUTED = {"self_attn.q_proj.weight": "head_count", "self_attn.k_proj.weight": "head_count_kv"}


def hugging_face_name(name: str, arch: str) -> str:
    """Return the Hugging Face name of a GGUF tensor (itself when unknown, so that the check of names reports it)."""
    if name in NAMES:
        return NAMES[name]
    parts, known = name.split("."), GEMMA_NAMES if arch.startswith("gemma") else LAYER_NAMES
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in known:
        return f"model.layers.{parts[1]}.{known[parts[2]]}.{parts[3]}"
    return name


def kinds() -> tuple[str, ...]:
    """Return the tensor types that can be read: plain ones and all that the gguf library dequantises."""
    from gguf.quants import _type_traits

    return (*PLAIN, *(k.name for k in _type_traits if k.name not in PLAIN))


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of one GGUF file."""

    path: Path
    reader: Any
    _kept: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read metadata and tensor table; raises UserError when the file is not a sound GGUF."""
        import gguf

        class Reader(gguf.GGUFReader):
            """The library reads past the end of a file as empty arrays, in lists without end."""

            data: Any

            def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
                self.data = np.asarray(self.data)  # slicing a memmap costs more than the reading
                found = super()._get(offset, dtype, count, override_order)
                if len(found) < count:
                    raise ValueError(f"{count} values of {np.dtype(dtype)} at byte {offset} lie past the end")
                return found

        try:
            reader = Reader(path)
        except Exception as error:  # the library raises whatever the broken bytes lead to
            raise UserError(f"{path}: truncated or not a GGUF file: {type(error).__name__}: {error}") from None
        file = cls(path, reader)
        known = kinds()
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in known:
                told = ", ".join(known)
                raise UserError(f"{path}: tensor {tensor.name!r} is {tensor.tensor_type.name}; supported: {told}")
        return file

    @property
    def arch(self) -> str:
        """The architecture the file names."""
        return str(self.metadata.get("general.architecture"))

    def rope_freqs(self) -> Array | None:
        """Return what RoPE's frequencies are divided by [K/2], where the file says."""
        return self._dequantise(ROPE_FREQS) if ROPE_FREQS in self._tensors else None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Every metadata field by its GGUF key."""
        try:
            return {key: field.contents() for key, field in self.reader.fields.items()}
        except Exception as error:
            raise UserError(f"{self.path}: broken GGUF metadata: {type(error).__name__}: {error}") from None

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        return {hugging_face_name(t.name, self.arch): t for t in self.reader.tensors}

    def names(self) -> set[str]:
        """GGUF's own tensor names."""
        return {t.name for t in self.reader.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape [out, in] (GGUF lists the fastest axis first)."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def _dequantise(self, name: str, rows: slice = ALL) -> Array:
        from gguf.quants import dequantize

        tensor, shape = self._tensors[name], self.shapes()[name]
        if self._is_permuted(name):
            x = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
            return self._unpermute(name, x)[rows]
        x = dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32, copy=False).reshape(-1, *shape[1:])
        if self.arch.startswith("gemma") and name.endswith("norm.weight"):
            return x - np.float32(1)  # llama.cpp stores 1 + w
        return x

    def _is_permuted(self, name: str) -> bool:
        return self.arch == "llama" and ".".join(name.split(".")[-3:]) in PERMUTED

    def _unpermute(self, name: str, x: Array) -> Array:
        """Undo llama.cpp's interleaved RoPE layout of q and k rows (only family llama has it)."""
        arch, key = self.arch, PERMUTED[".".join(name.split(".")[-3:])]
        n = int(self.metadata.get(f"{arch}.attention.{key}", self.metadata[f"{arch}.attention.head_count"]))
        return x.reshape(n, x.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)

    def read_tensor(self, name: str) -> Array:
        """Return the dequantised tensor rounded to bfloat16; the file's pages are let go of."""
        if name in self._kept:
            return self._kept[name]
        x = np.empty(self.shapes()[name], FORMATS[MODEL_FORMAT].dtype)
        # FP32 to bfloat16 is one rounding, to nearest even, in ml_dtypes.
        with np.errstate(invalid="ignore", over="ignore"):
            for rows in [ALL] if self._is_permuted(name) else row_blocks(x.shape):
                x[rows] = self._dequantise(name, rows)
        release(self._tensors[name].data)
        if self._small or name == EMBEDDING:
            self._kept[name] = x
        return x

    @cached_property
    def _small(self) -> bool:
        return sum(prod(shape) for shape in self.shapes().values()) * FORMATS[MODEL_FORMAT].dtype.itemsize <= KEEP

    def original(self, name: str, rows: slice = ALL) -> Array | None:
        """Return the dequantised values in FP64 where rounding to bfloat16 changes any."""
        x = self._dequantise(name, rows).astype(np.float64)
        release(self._tensors[name].data)
        return x if (as_format(x, MODEL_FORMAT).astype(np.float64) != x).any() else None
