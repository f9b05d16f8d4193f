"""Another framework in small: a Llama in NumPy that writes its tensors under names of its own, as hooks in torch would.

    python examples/dumped_decoder.py -o dump
    precaudit import dump --map examples/dumped_decoder.toml -o runs/theirs
    precaudit compare runs/theirs --model tiny

It shares no line with precaudit. ``--eps`` and ``--base`` make faults.
"""

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

TINY = Path(str(resources.files("precaudit") / "bundled" / "tiny"))


def run_decoder(
    model: Path, tokens: Any, dtype: Any = np.float32, base: float | None = None, eps: float | None = None,
    noise: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return every tensor by name, each rounded to ``dtype`` once; ``noise``: relative, of every matrix."""
    config = json.loads((model / "config.json").read_text())
    heads, groups, width = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps = config["rms_norm_eps"] if eps is None else eps
    base = (config.get("rope_parameters") or config)["rope_theta"] if base is None else base
    draw = np.random.default_rng(0)
    weights = {n: x.astype(np.float32) for n, x in load_file(model / "model.safetensors").items()}
    if noise:
        factor = {n: np.float32(1) + np.float32(noise) * draw.standard_normal(x.shape) for n, x in weights.items()}
        weights = {n: (x * factor[n]).astype(np.float32) if x.ndim == 2 else x for n, x in weights.items()}
    out = {"ids": np.asarray(tokens)}

    def put(name: str, x: Any) -> Any:
        out[name] = np.asarray(x, np.float32).astype(dtype)
        return out[name].astype(np.float32)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weights[f"model.{name}.weight"]

    at = np.arange(len(tokens))
    angle = at[:, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = (np.concatenate([f(angle)] * 2, -1).astype(np.float32)[:, None] for f in (np.cos, np.sin))

    def turned(x: Any, n: int) -> Any:
        x = x.reshape(len(at), n, width)
        half = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return (x * cos + half * sin).reshape(len(at), -1)

    x = weights["model.embed_tokens.weight"][np.asarray(tokens)]
    for i in range(config["num_hidden_layers"]):

        def linear(rows: Any, name: str, i: int = i) -> Any:
            return rows @ weights[f"model.layers.{i}.{name}_proj.weight"].T

        x = put(f"{i}/input", x)
        h = put(f"{i}/input_layernorm", norm(x, f"layers.{i}.input_layernorm"))
        q = put(f"{i}/query", turned(linear(h, "self_attn.q"), heads))
        k = put(f"{i}/key", turned(linear(h, "self_attn.k"), groups))
        v = put(f"{i}/value", linear(h, "self_attn.v"))
        k, v = (np.repeat(y.reshape(len(at), groups, width), heads // groups, 1) for y in (k, v))
        scores = np.einsum("thk,shk->hts", q.reshape(len(at), heads, width), k) / np.float32(width**0.5)
        scores = np.where(at[:, None] >= at, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mix = put(f"{i}/mix", np.einsum("hts,shk->htk", probs / probs.sum(-1, keepdims=True), v))
        rows = mix.transpose(1, 0, 2).reshape(len(at), -1)
        x = put(f"{i}/middle", x + put(f"{i}/self_attn", linear(rows, "self_attn.o")))
        h = put(f"{i}/post_attention_layernorm", norm(x, f"layers.{i}.post_attention_layernorm"))
        gate = linear(h, "mlp.gate")
        act = put(f"{i}/act", gate / (1 + np.exp(-gate)) * linear(h, "mlp.up"))
        x = put(f"{i}/output", x + put(f"{i}/mlp", linear(act, "mlp.down")))
    out["lm_head"] = put("norm", norm(x, "norm")) @ weights["model.embed_tokens.weight"].T
    return out


def main() -> None:
    """Write a file of tensors for every text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--eps", type=float, help="another epsilon than the model's")
    parser.add_argument("--base", type=float, help="another base of RoPE than the model's")
    given = parser.parse_args()
    given.output.mkdir(parents=True)
    texts = {"read": "def read(path):\n    with open(path) as f:", "add": "def add(a, b):\n    return a + b"}
    for name, text in texts.items():
        made = run_decoder(TINY, list(text.encode()), ml_dtypes.bfloat16, given.base, given.eps)
        arrays = {"ids": made.pop("ids")} | {f"0/{n}": x for n, x in made.items()}
        save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, given.output / f"{name}.safetensors")


if __name__ == "__main__":
    main()
