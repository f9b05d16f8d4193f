"""Small random models with the traits of large trained ones, on which honest programs must pass as well.

Massive activations in a few channels (Sun et al. 2024), key biases of ±100, scores far beyond ±50, attention sinks
(Xiao et al. 2024), flat and peaked softmax, gates where gelu vanishes in float32, weights stored wider or narrower than
the activations, wide models and vocabularies. None is trained; what they compute means nothing, how they round does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from precaudit.models.configs import model_tensors
from precaudit.models.configs.huggingface import from_config_json
from precaudit.numbers.formats import FORMATS
from precaudit.recording.tracing.subject import load
from precaudit.schema.prompts import Prompt

Tensors = dict[str, Any]
Change = Callable[[Tensors, np.random.Generator], None]
BASE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 512, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "attention_bias": None, "mlp_bias": None}


@dataclass(frozen=True)
class Trait:
    """A model: ``config`` over BASE, ``change`` of random weights (std 0.7/√fan-in), stored as ``dtype``."""

    name: str
    config: dict[str, Any]
    change: Change = lambda *_: None
    dtype: str = "bfloat16"

    def make(self, folder: Path) -> Path:
        """Write the model to a folder as Hugging Face lays it out; return the folder."""
        raw = {k: v for k, v in (BASE | self.config).items() if v is not None}
        config = from_config_json(raw, "config.json")
        draw = np.random.default_rng(sum(self.name.encode()))
        tensors = {name: _random(name, shape, draw) for name, shape in model_tensors(config).items()}
        self.change(tensors, draw)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))
        stored = {k: np.ascontiguousarray(x.astype(FORMATS[self.dtype].dtype)) for k, x in tensors.items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def _random(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Any:
    if len(shape) == 1:
        return draw.normal(0.0, 0.1, shape) if name.endswith("bias") else 1.0 + draw.normal(0.0, 0.2, shape)
    scale = 0.7 if "embed" in name else 0.7 / shape[1] ** 0.5
    return draw.normal(0.0, scale, shape)


def _times(part: str, factor: float, tensors: Tensors, _draw: Any) -> None:
    for name in tensors:
        if part in name and name.endswith("weight"):
            tensors[name] = tensors[name] * factor


def _massive(tensors: Tensors, _draw: Any) -> None:
    """A few channels of the stream reach 10² to 10⁴, a few activations 10² (Sun et al. 2024)."""
    tensors["model.layers.0.mlp.down_proj.weight"][[3, 77]] *= 400.0
    for n in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{n}_proj.weight"][[5, 9]] *= 12.0
    tensors["model.layers.0.mlp.gate_proj.weight"][[11, 50]] *= 20.0


def _key_bias(tensors: Tensors, draw: Any) -> None:
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name][::5] = draw.choice([-100.0, 100.0], len(tensors[name][::5]))


def _large_scores(factor: float, tensors: Tensors, draw: Any) -> None:
    _times("q_proj", factor, tensors, draw)
    _times("k_proj", factor, tensors, draw)


def _sink(tensors: Tensors, draw: Any) -> None:
    """Token 1's keys agree with every query: rows attend to it almost alone."""
    width = tensors["model.embed_tokens.weight"].shape[1]
    direction = draw.normal(0.0, 1.0, width)
    tensors["model.embed_tokens.weight"][:] += 0.3 * direction
    tensors["model.embed_tokens.weight"][1] = 40.0 * direction


def _vanishing(tensors: Tensors, _draw: Any) -> None:
    """Channels whose gates are all below −6, where 1 + tanh is 0 in float32."""
    for name in tensors:
        if name.endswith("gate_proj.bias"):
            tensors[name][:16] = -9.0
            tensors[name][16:32] = -5.5


def bundled(dtype: str, folder: Path) -> Path:
    """Return the bundled model with its weights stored as another format."""
    source = Path(load("tiny", device="cpu").checkpoint.path)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            text = (source / name).read_text()
            (folder / name).write_text(text.replace('"bfloat16"', f'"{dtype}"'))
    tensors = {k: x.astype(np.float32).astype(dtype) for k, x in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


TRAITS = (
    Trait("massive activations", {}, _massive),
    Trait("key biases", {**QWEN2}, _key_bias),
    Trait("large scores", {}, partial(_large_scores, 3.0)),
    Trait("scores beyond 1000", {}, partial(_large_scores, 16.0)),
    Trait("flat softmax", {}, partial(_times, "q_proj", 0.02)),
    Trait("sink", {}, _sink),
    Trait("vanishing gelu", {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}, _vanishing),
    Trait("float32 weights", {}, dtype="float32"),
    Trait("float16 weights", {}, dtype="float16"),
    Trait("wide", {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "head_dim": 128}),
    Trait("wide vocabulary", {"hidden_size": 64, "vocab_size": 1 << 18, "num_hidden_layers": 1}),
)  # fmt: skip


def models(folder: Path) -> dict[str, Path]:
    """Write every model to a folder of its own below ``folder``; return {trait: folder}."""
    found = {t.name: t.make(folder / t.name.replace(" ", "-")) for t in TRAITS}
    for dtype in ("float32", "float16"):
        found[f"tiny in {dtype}"] = bundled(dtype, folder / f"tiny-{dtype}")
    return found


def prompts(vocab: int, seed: int = 5) -> list[Prompt]:
    """Return prompts of token ids: random, one repeated, two in turn, one alone, with a sink at the start."""
    draw = np.random.default_rng(seed)
    top = min(vocab, 1 << 18)
    made = {
        "random": draw.integers(2, top, 60), "repeated": np.full(40, int(draw.integers(2, top))),
        "two": np.tile(draw.integers(2, top, 2), 15), "alone": draw.integers(2, top, 1),
        "sink": np.concatenate([[1], draw.integers(2, top, 24)]),
    }  # fmt: skip
    return [Prompt(id=f"c{i}-{name}", tokens=tuple(map(int, t))) for i, (name, t) in enumerate(made.items())]
