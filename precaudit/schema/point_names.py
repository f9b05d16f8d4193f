"""What transformers, flax and vLLM call what our points hold, for who writes their words."""

from collections.abc import Sequence

from precaudit.errors import nearest

SAME = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "query": "q",
    "key": "k",
    "value": "v",
    "o_proj": "attn_proj",
    "out_proj": "attn_proj",
    "attn_logits": "scores",
    "attn_weights": "probs",
    "attentions": "probs",
    "past_key_values": "k_cache",
    "down_proj": "mlp_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "embed_tokens": "resid_in",
    "wte": "resid_in",
    "hidden_states": "resid_out",
    "norm": "final_norm",
    "lm_head": "logits",
}
CLOSE = {"gate_proj": "gate_out", "up_proj": "mlp_act"}  # what is computed from it next


def point_hint(word: str, known: Sequence[str]) -> str:
    """Return which known point a word may stand for: that of another library's module, else the nearest by letters."""
    module = word.removesuffix(".weight").rpartition(".")[2]
    if (same := SAME.get(module)) in known:
        return f"; here it is {same!r}"
    if (close := CLOSE.get(module)) in known:
        return f"; the next point after it is {close!r}"
    return nearest(word, known)
