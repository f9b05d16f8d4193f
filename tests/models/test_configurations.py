"""config.json against transformers' own classes: each reads as they read it, or is refused by name."""

import ast
import dataclasses
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.configs.huggingface import FAMILIES
from precaudit.models.configs.unread import BESIDE, DERIVED, LEFT_BEHIND, UNREAD
from precaudit.models.numpy_decoder.operators import rms_norm, rms_norm_once
from precaudit.models.numpy_decoder.rounding import of_policy
from precaudit.recording.runs.reader import open_run
from precaudit.schema.policies import load_policy
from tests.helpers.paths import FIXTURES
from tests.helpers.selected import few
from tests.helpers.textbook_values import reference

ABSENT = "absent"  # in place of a value: the field is left out
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
OWN = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "mistral": {"sliding_window": 5},
    "gemma": {"head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": [SLIDING, FULL, SLIDING], "rope_theta": 65536.0},
    "seed_oss": {"head_dim": 8},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3, "logits_scaling": 2.5,
    },
}  # fmt: skip
THETA = {"rope_theta": 256.0}  # its roots are exact, as 65536's: longrope's powers stay in float32 in transformers
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN = {"rope_type": "default"}
AWKWARD = {
    "hidden_size": [32.0, "32", 30, 0, -32, None],
    "num_hidden_layers": [1, 0, 2.0, True, None],
    "num_attention_heads": [3, 8, 0, None, 2.5],
    "num_key_value_heads": [None, 1, 3, 4, 0, ABSENT, 2.0],
    "head_dim": [None, 16, 7, 6, ABSENT, 0, 8.0],
    "intermediate_size": [None, 41, 0],
    "vocab_size": [None, 65],
    "rms_norm_eps": [ABSENT, 0.0, -1, 1, "1e-5", None, 1e-3, float("nan")],
    "rope_theta": [ABSENT, 0, -1, 1, 500000, None, 1e6, "10000", float("inf")],
    "hidden_act": ["gelu", "silu", "swish", "gelu_pytorch_tanh", "relu", None, "nope", "gelu_new"],
    "hidden_activation": ["gelu", "silu", "gelu_pytorch_tanh", None, "relu", "gelu_new"],
    "tie_word_embeddings": [True, False, None, 1, "true", ABSENT],
    "attention_bias": [True, False, None, 1],
    "mlp_bias": [True, False, None],
    "partial_rotary_factor": [0.5, 1.0, 0.4, 0.0, None, 2.0],
    "rope_scaling": [
        None, {}, LINEAR, YARN, LLAMA3, LONG, {"type": "linear", "factor": 2.0}, LINEAR | {"rope_type": "dynamic"},
        LONG | {"rope_type": "su"}, LINEAR | {"partial_rotary_factor": 0.5}, PLAIN | {"rope_theta": 500.0},
        {"rope_type": "nope"}, PLAIN | {"factor": 3.0}, {"factor": 2.0},
        {"rope_type": "mrope", "mrope_section": [1, 1, 2]}, YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, YARN | {"mscale": 0.7}, YARN | {"beta_fast": 8, "beta_slow": 2},
        YARN | {"truncate": False}, YARN | {"factor": None}, LONG | {"factor": 4.0}, LONG | {"attention_factor": 1.3},
        LONG | {"short_factor": [1.0]}, "linear", {"rope_type": "linear"}, LINEAR | {"factor": 0.5},
        LINEAR | {"factor": 0}, LLAMA3 | {"low_freq_factor": 4.0}, LLAMA3 | {"factor": None},
        {"rope_type": "yarn", "factor": 4.0},
    ],
    "rope_parameters": [
        None, {}, PLAIN | THETA, LINEAR | THETA, LINEAR, YARN | THETA, LONG | THETA, LLAMA3 | THETA,
        PLAIN | THETA | {"partial_rotary_factor": 0.5}, LINEAR | THETA | {"partial_rotary_factor": 0.5},
        LINEAR | THETA | {"partial_rotary_factor": 1.0}, {FULL: PLAIN | THETA, SLIDING: PLAIN | {"rope_theta": 70.0}},
        {FULL: LINEAR | THETA, SLIDING: LINEAR | {"rope_theta": 70.0}}, {FULL: PLAIN | THETA}, {SLIDING: PLAIN | THETA},
        {FULL: None, SLIDING: None}, PLAIN | {"rope_theta": 0}, PLAIN | {"rope_theta": None},
        {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ],
    "original_max_position_embeddings": [16, None, 64],
    "max_position_embeddings": [ABSENT, 8, 128, 0, None, 64.0],
    "sliding_window": [None, 3, 0, 1, 100, ABSENT, -1, 5.0],
    "use_sliding_window": [True, False, None],
    "max_window_layers": [0, 1, 3, 28, None, -1],
    "layer_types": [
        None, [FULL] * 3, [SLIDING] * 3, [FULL, SLIDING, FULL], [FULL] * 2, [FULL, "chunked_attention", FULL], ABSENT,
        ["full", "sliding", "full"], FULL,
    ],
    "sliding_window_pattern": [2, 1, None, 0],
    "query_pre_attn_scalar": [12, 0, -1, ABSENT, None, 7.5],
    "attn_logit_softcapping": [None, 2.0, 0, -1.0, ABSENT],
    "final_logit_softcapping": [None, 2.0, 0, -1.0, ABSENT],
    "use_bidirectional_attention": [True, False, None],
    "rope_local_base_freq": [100.0, ABSENT, 0],
    "embedding_multiplier": [1, 2.5, 0],
    "residual_multiplier": [0.3, None, 0],
    "attention_multiplier": [0.1, ABSENT, 0, None],
    "logits_scaling": [1, 3.0, 0, -2.0, None],
    "num_experts": [5, None, 0],
    "num_local_experts": [4, 5],
    "num_experts_per_tok": [1, 4, 5, 0],
    "moe_intermediate_size": [None, 13],
    "norm_topk_prob": [True, None],
    "mlp_only_layers": [[1], [], None],
    "decoder_sparse_step": [2, 0, 1, None],
    "pretraining_tp": [2, 1, None],
    "use_qk_norm": [True, False],
    "qkv_bias": [True, False],
    "clip_qkv": [8.0, None],
    "per_layer_config": [None, {"0": {"intermediate_size": 44}}],
    "some_unknown": [1],
}  # fmt: skip
TOGETHER = [
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 4},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 4, "layer_types": [FULL, SLIDING, FULL]},
    {"use_sliding_window": False, "sliding_window": 4, "layer_types": [FULL, SLIDING, FULL]},
    {"sliding_window": 4, "layer_types": [FULL, SLIDING, FULL]},
    {"sliding_window": 4, "layer_types": [FULL] * 3},
    {"sliding_window": None, "layer_types": [SLIDING] * 3},
    {"rope_parameters": PLAIN | THETA, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR | THETA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": PLAIN | THETA, "rope_theta": 77.0},
    {"rope_parameters": PLAIN, "rope_theta": 77.0},
    {"rope_scaling": LINEAR, "rope_theta": 77.0},
    {"rope_scaling": YARN, "max_position_embeddings": 32},
    {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5},
    {"rope_scaling": PLAIN, "partial_rotary_factor": 0.5},
    {"rope_scaling": LONG, "partial_rotary_factor": 0.5},
    {
        "rope_scaling": LONG | {"short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0]},
        "partial_rotary_factor": 0.5,
    },
    {"rope_scaling": LONG, "original_max_position_embeddings": 16},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
    {"rope_scaling": YARN, "original_max_position_embeddings": 8},
    {"hidden_act": "relu", "hidden_activation": "silu"},
    {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
    {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 3},
    {"sliding_window_pattern": 2, "layer_types": ABSENT},
    {"sliding_window_pattern": 3, "layer_types": [FULL, SLIDING, FULL]},
]
# What leaves the mathematics alone, with values that are not those of transformers' defaults.
VALUES = {
    "bool": True, "_attn_implementation": "eager", "attn_implementation": "eager", "experts_implementation": "eager",
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0},
    "architectures": ["X"], "auto_map": {"AutoConfig": "x.Y"}, "problem_type": "regression", "initializer_range": 0.5,
    "attention_dropout": 0.0, "pruned_heads": {}, "is_encoder_decoder": False, "output_attentions": False,
    "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": [1, 2], "router_aux_loss_coef": 0.1,
    "_experts_implementation": "eager", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "num_labels": 4, "loss_type": "X",
    "_commit_hash": "ab", "transformers_version": "4.0", "chunk_size_feed_forward": 0, "name_or_path": "x",
    "cache_implementation": "static", "pretraining_tp": 2, "output_router_logits": False,
}  # fmt: skip
READ_WITHOUT_THEM = {"torch_dtype": "auto"}  # transformers fails on it; it is no formula


def mutations():
    yield from ({name: value} for name, values in AWKWARD.items() for value in values)
    yield from TOGETHER
    yield READ_WITHOUT_THEM
    yield from ({name: VALUES.get(name, True)} for name in sorted(UNREAD))


def changed(raw, change):
    return {k: v for k, v in (raw | change).items() if v is not ABSENT}


def words(change):
    """Names under which a refusal may speak of a change."""
    found = {"RoPE", "rope", "window", "layer_types"}
    for name, value in change.items():
        found |= {name, *(value if isinstance(value, dict) else ())}
    own = {
        "max_position_embeddings": "context", "intermediate_size": "mlp_width", "num_key_value_heads": "heads",
        "num_attention_heads": "heads", "head_dim": "head_dim", "moe_intermediate_size": "mlp_width",
        "num_experts_per_tok": "experts", "num_local_experts": "num_experts", "vocab_size": "vocab",
        "attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap", "hidden_size": "width",
    }  # fmt: skip
    return found | {own[name] for name in change if name in own}


@pytest.fixture(scope="module")
def generate():
    """The program that makes the fixtures: transformers' models in patched float64."""
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("generate", FIXTURES / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(generate, raw, folder, tokens):
    """Write a model of transformers' own class with random weights, and return its float64 logits."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = json.loads(json.dumps({k: v for k, v in raw.items() if k != "model_type"}))
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(given)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.from_numpy(generate.random_weight(raw["model_type"], key, p.shape)).bfloat16())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    model = model.double().eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5, dtype=torch.float64)
    if raw["model_type"] != "granite" and hasattr(model.config, "embedding_multiplier"):
        del model.config.embedding_multiplier
    with generate.float64_everywhere(model):
        return generate.forward(model, tokens)[0].numpy()


def ours(folder, tokens):
    """Return the FP64 reference's logits, or why the model is refused."""
    try:
        return reference(open_checkpoint(str(folder)), tokens)[1], ""
    except UserError as error:
        return None, str(error)


@pytest.mark.oracle
@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gemma2", "qwen3_moe"))  # 25 s each
def test_every_field_is_read_as_transformers_reads_it(tmp_path, monkeypatch, generate, family):
    """Logits of random models at most 1e-9 apart; refused where transformers fails, and nowhere without its name."""
    import transformers

    transformers.logging.disable_progress_bar()
    monkeypatch.setattr(generate, "require", lambda *_: None)  # odd values leave float32-like numbers
    base = {"model_type": family, **BASE, **OWN.get(family, {})}
    tokens = np.random.default_rng(3).integers(0, 64, 14).tolist()
    (tmp_path / "base").mkdir()
    plain = theirs(generate, base, tmp_path / "base", tokens)
    counts = Counter()
    for i, change in enumerate(mutations()):
        raw, folder = changed(base, change), tmp_path / str(i)
        folder.mkdir()
        try:
            want, why = theirs(generate, raw, folder, tokens), "not finite"
            want = want if np.isfinite(want).all() else None
        except Exception as error:
            want, why = None, f"{type(error).__name__}: {error}"
            (folder / "config.json").write_text(json.dumps(raw))
            if not list(folder.glob("*.safetensors")):
                weights = tmp_path / "base" / "model.safetensors"
                (folder / "model.safetensors").write_bytes(weights.read_bytes())
        told = f"{family} {change}"
        logits, refusal = ours(folder, tokens)
        if refusal:
            counts["refused"] += 1
            assert any(word in refusal for word in words(change)), f"{told}: {refusal}"
            if want is not None:
                assert not set(change) <= UNREAD, f"{told}: {refusal}"
                assert list(change.values()) != [None] or not np.array_equal(want, plain), told
            continue
        if change is READ_WITHOUT_THEM:
            continue
        assert want is not None, f"{told} is read, and transformers fails: {why}"
        assert np.abs(logits - want).max() <= 1e-9, told
        counts["agree"] += 1
    assert counts["agree"] >= 150, counts


def test_what_transformers_never_reads_is_derived_from_it():
    """What its base configuration takes, and neither the ten modelling files nor what they share mention."""
    from transformers import GenerationConfig, PreTrainedConfig

    root = Path(importlib.util.find_spec("transformers").origin).parent
    known = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    known |= set(GenerationConfig._get_default_generation_params())
    for node in ast.walk(ast.parse((root / "configuration_utils.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("pop", "get"):
            of, first = getattr(node.func.value, "id", ""), node.args[0]
            known |= {first.value} if of == "kwargs" and isinstance(first, ast.Constant) else set()
    known |= {name for name, found in vars(PreTrainedConfig).items() if isinstance(found, property)}
    pattern = re.compile(r'config\w*\.(\w+)|(?:getattr|hasattr)\(\s*[\w.]*config[\w.()]*,\s*"(\w+)"')
    files = [next(root.glob(f"models/{f.removesuffix('_text')}/modeling_*.py")) for f in FAMILIES]
    shared = ("modeling_rope_utils", "masking_utils", "modeling_layers", "activations", "cache_utils", "modeling_utils")
    files += [p for p in (root / f"{name}.py" for name in shared) if p.is_file()]
    files += [*root.glob("integrations/sdpa_attention.py"), *root.glob("integrations/moe.py")]
    read = {a or b for file in files for a, b in pattern.findall(file.read_text())}
    # where a file came from, what has no setter, and RoPE's older names, which become rope_parameters
    place = {
        "_configuration_file", "_from_auto", "_from_pipeline", "cache_dir", "commit_message", "force_download",
        "gguf_file", "local_files_only", "proxies", "repo_id", "return_unused_kwargs", "revision", "subfolder", "token",
        "trust_remote_code", "rope_scaling", "rope_theta", "use_return_dict",
    }  # fmt: skip
    never = known - read - place
    assert not never - UNREAD, "transformers takes more fields that change nothing"
    assert not DERIVED & read, "transformers reads what was taken for unread"
    assert not DERIVED & BESIDE
    assert not LEFT_BEHIND & (DERIVED | BESIDE)


@pytest.mark.parametrize("head", ["none", "same", "other"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_beside_tie_word_embeddings(tmp_path, tied, head):
    """As transformers 5: a file's own head goes before the field, unless it is the embedding."""
    source = FIXTURES / "qwen2-tied-mqa"
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": tied}))
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    own = {"none": {}, "same": {"lm_head.weight": embedding}, "other": {"lm_head.weight": embedding[::-1].copy()}}
    save_file(tensors | own[head], tmp_path / "model.safetensors")
    if head == "none" and not tied:
        with pytest.raises(UserError, match=r"'lm_head.weight' .* is missing"):
            open_checkpoint(str(tmp_path))
        return
    opened = open_checkpoint(str(tmp_path))
    assert opened.config.tied == (tied and head != "other")
    got = reference(opened, [1, 2, 3])[1]
    plain = reference(open_checkpoint(str(source)), [1, 2, 3])[1]
    assert np.array_equal(got, plain[:, ::-1] if head == "other" else plain)


@pytest.mark.turn  # 4 s
def test_a_field_the_user_names_is_passed_over_and_recorded(tmp_path, capsys):
    source = FIXTURES / "llama-gqa"
    folder, out = tmp_path / "m", str(tmp_path / "run")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"my_field": 3, "other_field": 4}))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "p", "tokens": [1, 2, 3]}\n')
    args = ["trace", str(folder), "-o", out, "--prompts", str(prompts), "--phases", "prefill"]
    assert run(args) == 2
    assert "field 'my_field' = 3 is not known to leave the mathematics unchanged" in capsys.readouterr().err
    assert run([*args, "--allow-field", "my_field"]) == 2
    assert "--allow-field other_field" in capsys.readouterr().err
    assert run([*args, "--allow-field", "my_field", "--allow-field", "other_field", "--allow-field", "no"]) == 0
    assert open_run(Path(out)).record.model.allowed == ("my_field", "other_field")
    assert run(["compare", out]) == 0
    assert run(["trace", "--repeat", out, "-o", str(tmp_path / "again")]) == 0
    settings = f'subject = {str(folder)!r}\nprompts = "p.jsonl"\nphases = "prefill"\nformula = false\n'
    (tmp_path / "precaudit.toml").write_text(settings)
    audit = ["audit", "--config", str(tmp_path / "precaudit.toml")]
    assert run(audit) == 2
    (tmp_path / "precaudit.toml").write_text(f'{settings}allow_field = ["my_field", "other_field"]\n')
    assert run(audit) == 0
    assert run(["models", str(folder)]) == 2
    assert run(["models", str(folder), "--allow-field", "my_field", "--allow-field", "other_field"]) == 0


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_rounded_as_transformers_rounds_them(family):
    """Once after the weight, or before it too: bits of transformers' own norm of bfloat16 rows."""
    torch = pytest.importorskip("torch")
    modelling = importlib.import_module(f"transformers.models.{family.removesuffix('_text')}.modeling_"
                                        f"{family.removesuffix('_text')}")  # fmt: skip
    (kind,) = {getattr(modelling, n) for n in dir(modelling) if n.endswith("RMSNorm") and "Gated" not in n}
    made = kind(64, eps=1e-6)
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((200, 64)).astype(np.float32), draw.standard_normal(64).astype(np.float32)
    x, w = (z.astype(bfloat16) for z in (x, w))
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(w.astype(np.float32)))
        given = torch.from_numpy(x.astype(np.float32)).bfloat16()
        theirs = made.bfloat16()(given).float().numpy()
    config = next(
        c for p in sorted(FIXTURES.iterdir()) if (p / "config.json").is_file()
        for c in [open_checkpoint(str(p)).config] if c.family == family
    )  # fmt: skip
    policy = of_policy(load_policy("bf16"))
    wide, weight = x.astype(np.float64), w.astype(np.float64) + config.norm_offset
    own = {once: norm(wide, weight, 1e-6, policy) for once, norm in ((True, rms_norm_once), (False, rms_norm))}
    off = {once: np.mean(y.astype(np.float32) != theirs) for once, y in own.items()}
    assert off[config.norm_once] < 0.01 < off[not config.norm_once]
