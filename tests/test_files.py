"""Files that hold the same model hold the same numbers: GGUF against the folder it was made of."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from precaudit.checkpoints import open_checkpoint
from precaudit.checkpoints.gguf_files import GgufFile, kinds
from precaudit.cli import run
from precaudit.configs import RopeScaling
from precaudit.formats import widen
from tests.conftest import FIXTURES

GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
GEMMA |= {"post_feedforward_layernorm": "post_ffw_norm"}
PLAIN = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MODELS = {
    "llama": "llama-gqa", "llama ": "llama-headdim", "qwen2": "qwen2-gqa", "qwen3": "qwen3-gqa", "gemma3": "gemma3-gqa",
}  # fmt: skip


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
        writer.add_tensor("rope_freqs.weight", np.asarray([1.0, 2.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", MODELS)
def test_a_gguf_is_the_folder_it_was_made_of(tmp_path, arch):
    name = MODELS[arch]
    folder, made = open_checkpoint(str(FIXTURES / name)), write_gguf(tmp_path / "m.gguf", arch.strip(), name)
    file = open_checkpoint(str(made))
    assert set(file.tensors.shapes()) == set(folder.tensors.shapes())
    for key in folder.tensors.shapes():
        if "norm" in key and arch == "gemma3":  # 1 + w lost some bits of w in float32
            np.testing.assert_allclose(widen(file.tensors.read(key)), widen(folder.tensors.read(key)), atol=1e-7)
        else:
            np.testing.assert_array_equal(file.tensors.read(key), folder.tensors.read(key))
    ignored = ("norm_eps", "full_layers", "local_rope_theta", "query_scale")  # llama.cpp's own constants
    for field in folder.config.__struct_fields__:
        if field not in ignored:
            assert getattr(file.config, field) == getattr(folder.config, field), field
    assert file.config.norm_eps == pytest.approx(folder.config.norm_eps, rel=1e-7)


def test_llama_cpp_s_constants_of_gemma_3(tmp_path):
    """Every sixth layer is full, local layers turn by 10 000, scores are scaled by the head dimension."""
    c = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", "gemma3", "gemma3-gqa"))).config
    assert (c.full_layers, c.local_rope_theta, c.query_scale) == ((), 10000.0, c.head_dim**-0.5)
    assert (c.embed_scale, c.activation, c.norm_offset) == (c.width**0.5, "gelu_tanh", 1.0)


def test_scaled_rope_in_gguf(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    c = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", "llama", "llama-gqa", scaling))).config
    assert c.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    c = open_checkpoint(str(write_gguf(tmp_path / "b.gguf", "llama", "llama-gqa", {"freqs": "x"}))).config
    assert c.rope_scaling == RopeScaling(kind="longrope", divisors=(1.0, 2.0))


def test_every_type_of_the_library_is_read():
    assert {"F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS"} <= set(kinds())


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_five_bit_blocks(kind):
    """32 values: d (and m), a fifth bit of each in 4 bytes, 16 bytes of nibbles, the low ones first (ggml's layout)."""
    block = np.random.default_rng(3).integers(
        0, 120, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1], np.uint8
    )
    halves = block[: 4 if kind == "Q5_1" else 2].view(np.float16).astype(np.float64)
    bits = int.from_bytes(block[2 * len(halves) : 2 * len(halves) + 4].tobytes(), "little")
    low, high = block[-16:] & 15, block[-16:] >> 4
    q = np.concatenate([low, high]) + np.array([(bits >> j & 1) << 4 for j in range(32)])
    want = q * halves[0] + halves[1] if kind == "Q5_1" else (q - 16.0) * halves[0]
    found = gguf.quants.dequantize(block[None], gguf.GGMLQuantizationType[kind])[0]
    np.testing.assert_allclose(found, want, rtol=1e-6)


# transformers' own GGUF reader ignores key_length for llama and qwen3: their head dimension must be its default
@pytest.mark.oracle
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_transformers_reads_the_same_gguf(tmp_path, arch):
    import torch
    from transformers import AutoModelForCausalLM

    made = write_gguf(tmp_path / "m.gguf", arch, MODELS[arch])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    ours = GgufFile.open(made)
    for key in ours.shapes():
        x = theirs[key].numpy()
        np.testing.assert_array_equal(widen(ours.read(key)), x.astype(ours.read(key).dtype).astype(np.float64), key)


QUANTISED = (
    "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
)  # fmt: skip


def float8_model(folder, scale_of, block=None):
    """Copy a fixture, its projections as float8 with scales of shape ``scale_of(shape)``; return tensors and scales."""
    shutil.copytree(FIXTURES / "llama-gqa", folder)
    raw = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "fp8"} | ({} if block is None else {"weight_block_size": block})
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": how}))
    tensors, scales = load_file(folder / "model.safetensors"), {}
    for key in [k for k in tensors if k.endswith("proj.weight")]:
        tensors[key] = tensors[key].astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        shape = scale_of(tensors[key].shape)
        scales[key] = np.random.default_rng(len(scales)).uniform(0.5, 2, shape).astype(np.float32)
        tensors[f"{key}_scale_inv"] = scales[key]
    save_file(tensors, folder / "model.safetensors")
    return tensors, scales


@pytest.mark.parametrize("block", [(16, 16), (32, 24), (1, 1000), (1000, 1000)])
def test_float8_times_its_scales(tmp_path, block):
    known = list(block) if block[0] in (16, 32) else None
    shapes = {(1, 1000): lambda s: (s[0], 1), (1000, 1000): lambda s: ()}
    by_block = lambda s: tuple(-(-n // b) for n, b in zip(s, block, strict=True))  # noqa: E731
    tensors, scales = float8_model(tmp_path / "m", shapes.get(block, by_block), known)
    opened = open_checkpoint(str(tmp_path / "m"))
    assert not any("scale" in name for name in opened.tensors.shapes())
    for key, scale in scales.items():
        found, stored = opened.tensors.read(key), tensors[key].astype(np.float64)
        scale = scale.reshape(1, 1) if scale.ndim == 0 else scale
        for i, j in [(0, 0), (1, 5), (stored.shape[0] - 1, stored.shape[1] - 1), (15, 23)]:
            exact = stored[i, j] * float(scale[i // block[0], j // block[1]])
            assert float(found[i, j]) == float(np.float32(exact).astype(ml_dtypes.bfloat16))
        assert opened.tensors.original(key)[1, 5] == stored[1, 5] * float(scale[1 // block[0], 5 // block[1]])


def test_a_scale_that_does_not_fit_is_refused(tmp_path, capsys):
    float8_model(tmp_path / "m", lambda s: (s[0] + 1, 1))
    assert run(["models", str(tmp_path / "m")]) == 2
    assert "is no scale of" in capsys.readouterr().err


def cached(folder, name):
    """Lay a fixture out as the hub's cache does."""
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(FIXTURES / "llama-gqa", repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)


def test_a_hub_id_is_read_from_the_cache_and_said_where_it_is_not(tmp_path):
    cached(tmp_path, "someone/model")
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def models(name):
        command = [sys.executable, "-m", "precaudit", "models", name]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    found = models("someone/model")
    assert found.returncode == 0, found.stderr
    assert "family      llama" in found.stdout
    lost = models("someone/else")
    assert lost.returncode == 2
    assert "not in the hub's cache" in lost.stderr
    assert "Traceback" not in lost.stderr


def test_models_shows_what_there_is(capsys):
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    assert "gemma3_text" in out
    assert "tiny: installed" in out
    assert run(["models", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "llama"
    assert run(["models", "--check"]) == 2


def test_models_reads_every_tensor(tmp_path, capsys):
    assert run(["models", "--check", str(FIXTURES / "phi3-partial")]) == 0
    assert "all finite" in capsys.readouterr().out
    shutil.copytree(FIXTURES / "llama-gqa", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert run(["models", "--check", str(tmp_path / "m")]) == 1
    assert "model.norm.weight [48] bfloat16: 1 values are NaN" in capsys.readouterr().out
    assert run(["models", "--check", "--json", str(tmp_path / "m")]) == 1
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    bad = next(x for x in lines if x["nonfinite"])
    want = hashlib.sha256(tensors["model.norm.weight"].tobytes()).hexdigest()
    assert (bad["name"], bad["sha256"]) == ("model.norm.weight", want)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", QUANTISED)
def test_the_library_dequantises_as_transformers_does(kind):
    """Random blocks, through the gguf library and through transformers' own torch code."""
    import torch
    from transformers.integrations.gguf.dequant import dequantize

    kind = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(7).integers(0, 120, (4, 3 * size), dtype=np.uint8)  # below 0x7c: scales are finite
    ours = gguf.quants.dequantize(data, kind)
    theirs = dequantize(torch.from_numpy(data), int(kind)).numpy().reshape(ours.shape)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
