"""Fixtures as GGUF files."""

import json

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.helpers.paths import FIXTURES

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

PLAIN = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip

GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
GEMMA |= {"post_feedforward_layernorm": "post_ffw_norm"}


def write_gguf(path, arch, name, more=None):
    """Write a fixture as llama.cpp's converter does: q and k of a llama interleaved, Gemma's norms plus one."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    heads = {"q": raw["num_attention_heads"], "k": raw["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_key_length(raw.get("head_dim") or raw["hidden_size"] // heads["q"])
    writer.add_value_length(raw.get("head_dim") or raw["hidden_size"] // heads["q"])
    rope = raw["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(raw["sliding_window"])
    for key, x in (more or {}).items():
        writer.add_float32(f"{arch}.{key}", x) if isinstance(x, float) else writer.add_string(f"{arch}.{key}", x)
    names = PLAIN | GEMMA if arch == "gemma3" else PLAIN
    for key, x in load_file(FIXTURES / name / "model.safetensors").items():
        stem, _, kind = key.rpartition(".")
        x = x.astype(np.float32)
        if stem in OUTSIDE:
            ours = OUTSIDE[stem]
        else:
            _, _, layer, *rest = stem.split(".")
            ours = f"blk.{layer}.{names['.'.join(rest)]}"
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            n = heads[stem[-6]]
            x = x.reshape(n, 2, len(x) // n // 2, -1).swapaxes(1, 2).reshape(x.shape)
        if arch == "gemma3" and stem.endswith("norm"):
            x = x + np.float32(1)
        writer.add_tensor(f"{ours}.{kind}", np.ascontiguousarray(x))
    if "freqs" in (more or {}):
        writer.add_tensor("rope_freqs.weight", np.asarray([1.0, 1.5, 2.0, 3.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
