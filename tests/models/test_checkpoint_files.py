"""Files that hold the same model hold the same numbers: GGUF against the folder it was made of."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
from safetensors.numpy import load_file, save_file

from precaudit.cli import run
from precaudit.errors import UserError
from precaudit.models.checkpoints import gguf_files, open_checkpoint, tensors
from precaudit.models.checkpoints.gguf_files import GgufFile, kinds
from precaudit.models.configs import RopeScaling, from_config_json
from precaudit.numbers.arrays import release, widen
from precaudit.recording.tracing.subject import load
from precaudit.recording.tracing.trace import trace
from precaudit.schema.prompts import Prompt
from tests.helpers.gguf_files import write_gguf
from tests.helpers.paths import FIXTURES
from tests.helpers.textbook_values import expected, reference, relative

MODELS = {
    "llama": "llama-gqa", "llama ": "llama-headdim", "qwen2": "qwen2-gqa", "qwen3": "qwen3-gqa", "gemma3": "gemma3-gqa",
}  # fmt: skip


@pytest.mark.parametrize("arch", MODELS)
def test_a_gguf_is_the_folder_it_was_made_of(tmp_path, arch):
    name = MODELS[arch]
    folder, made = open_checkpoint(str(FIXTURES / name)), write_gguf(tmp_path / "m.gguf", arch.strip(), name)
    file = open_checkpoint(str(made))
    assert set(file.tensors.shapes()) == set(folder.tensors.shapes())
    for key in folder.tensors.shapes():
        if "norm" in key and arch == "gemma3":  # 1 + w lost some bits of w in float32
            np.testing.assert_allclose(
                widen(file.tensors.read_tensor(key)), widen(folder.tensors.read_tensor(key)), atol=1e-7
            )
        else:
            np.testing.assert_array_equal(file.tensors.read_tensor(key), folder.tensors.read_tensor(key))
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
    assert c.rope_scaling == RopeScaling(kind="longrope", divisors=(1.0, 1.5, 2.0, 3.0))


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
        np.testing.assert_array_equal(
            widen(ours.read_tensor(key)), x.astype(ours.read_tensor(key).dtype).astype(np.float64), key
        )


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
    shapes = {(1, 1000): lambda s: (s[0], 1), (1000, 1000): lambda _: ()}
    by_block = lambda s: tuple(-(-n // b) for n, b in zip(s, block, strict=True))  # noqa: E731
    tensors, scales = float8_model(tmp_path / "m", shapes.get(block, by_block), known)
    opened = open_checkpoint(str(tmp_path / "m"))
    assert not any("scale" in name for name in opened.tensors.shapes())
    for key, scale in scales.items():
        found, stored = opened.tensors.read_tensor(key), tensors[key].astype(np.float64)
        scale = scale.reshape(1, 1) if scale.ndim == 0 else scale
        for i, j in [(0, 0), (1, 5), (stored.shape[0] - 1, stored.shape[1] - 1), (15, 23)]:
            exact = stored[i, j] * float(scale[i // block[0], j // block[1]])
            assert float(found[i, j]) == float(np.float32(exact).astype(ml_dtypes.bfloat16))
        assert opened.tensors.original(key)[1, 5] == stored[1, 5] * float(scale[1 // block[0], 5 // block[1]])


@pytest.mark.parametrize("kind", ["float8 rows", "float8 blocks", "gguf", "gguf gemma", "fused"])
@pytest.mark.parametrize("rounded", [None, "float8_e4m3fn"])
def test_weights_read_in_blocks_are_the_weights_read_at_once(tmp_path, monkeypatch, kind, rounded):
    """Every element in its place, before rounding and after, however few rows are looked at together."""
    if kind.startswith("float8"):
        rows = kind == "float8 rows"
        shape_of = (lambda s: (s[0], 1)) if rows else (lambda s: tuple(-(-n // 16) for n in s))
        float8_model(tmp_path / "m", shape_of, None if rows else [16, 16])
        path = tmp_path / "m"
    elif kind == "fused":
        path = FIXTURES / "phi3-partial"
    else:
        arch = "gemma3" if "gemma" in kind else "llama"
        path = write_gguf(tmp_path / "m.gguf", arch, f"{arch}-gqa")

    def values():
        opened = open_checkpoint(str(path)).with_weights(rounded or "as-stored")
        found = {}
        for name, shape in opened.tensors.shapes().items():
            x, parts = opened.tensors.read_tensor(name), list(tensors.row_blocks(shape))
            before = [opened.tensors.original(name, rows) for rows in parts]
            whole = [widen(x[rows]) if b is None else b for rows, b in zip(parts, before, strict=True)]
            found[name] = widen(x), np.concatenate(whole), any(b is not None for b in before)
        return found

    at_once = values()
    assert any(differs for _, _, differs in at_once.values()) == (rounded is not None or kind.startswith("float8"))
    monkeypatch.setattr(tensors, "ELEMENTS", 200)
    for name, (x, before, differs) in values().items():
        np.testing.assert_array_equal(x, at_once[name][0])
        np.testing.assert_array_equal(before, at_once[name][1])
        assert differs == at_once[name][2]


@pytest.mark.parametrize(("keep", "kept"), [(10**9, 29), (0, 1)])
def test_of_a_large_gguf_the_embedding_alone_is_held(tmp_path, monkeypatch, keep, kept):
    monkeypatch.setattr(gguf_files, "KEEP", keep)
    file = GgufFile.open(write_gguf(tmp_path / "m.gguf", "llama", "llama-gqa"))
    for name in file.shapes():
        file.read_tensor(name)
    held = [name for name in file.shapes() if file.read_tensor(name) is file.read_tensor(name)]
    assert len(held) == kept
    assert "model.embed_tokens.weight" in held


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
def test_pages_of_a_file_are_let_go(tmp_path):
    def held():
        found = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile")]
        return int(found[0].split()[1]) << 10

    (tmp_path / "x").write_bytes(b"1" * (64 << 20))
    x = np.asarray(np.memmap(tmp_path / "x", np.uint8, "r"))[100:].view(np.uint16)
    total, read = int(x.sum()), held()
    release(x)
    assert held() < read - (48 << 20)
    assert int(x.sum()) == total
    release(np.zeros(3))


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
    assert run(["models", str(FIXTURES / "qwen3-moe-gqa"), "--json"]) == 0
    assert {"router", "mlp_act"} & set(json.loads(capsys.readouterr().out)["points"].split(", ")) == {"router"}
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


def as_maxtext(name, scanned=True, interleaved=False):
    """Return a fixture as MaxText's tree: queries over √K, layers on axis 1, Gemma's factors in.

    ``interleaved``: a head's halves lie beside each other, as Llama 3.1's RoPE of MaxText turns them.
    """
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    x = {k: v.astype(np.float32) for k, v in load_file(FIXTURES / name / "model.safetensors").items()}
    gemma, layers = raw["model_type"].startswith("gemma"), raw["num_hidden_layers"]
    heads = {"q": raw["num_attention_heads"], "k": raw["num_key_value_heads"], "v": raw["num_key_value_heads"]}
    one = np.float32(1 if gemma else 0)

    def layer(i):
        def t(stem):
            return x[f"model.layers.{i}.{stem}.weight"]

        def head(n):
            y = t(f"self_attn.{n}_proj").reshape(heads[n], -1, raw["hidden_size"])
            if n != "v" and interleaved:
                y = np.stack(np.split(y, 2, axis=1), axis=2).reshape(y.shape)  # halves to pairs
            y = y / np.float32(np.sqrt(y.shape[1])) if n == "q" and not gemma else y
            return {"kernel": y.transpose(2, 0, 1)}

        out = t("self_attn.o_proj").reshape(raw["hidden_size"], heads["q"], -1).transpose(1, 2, 0)
        attention = {"query": head("q"), "key": head("k"), "value": head("v"), "out": {"kernel": out}}
        mlp = {f"wi_{j}": {"kernel": t(f"mlp.{n}_proj").T} for j, n in enumerate(("gate", "up"))}
        tree = {"self_attention": attention, "mlp": mlp | {"wo": {"kernel": t("mlp.down_proj").T}}}
        norms = {"pre_self_attention_layer_norm": "input_layernorm"}
        norms |= {"post_self_attention_layer_norm": "post_attention_layernorm"}
        if gemma:
            norms = {"pre_self_attention_norm": "input_layernorm", "pre_ffw_norm": "pre_feedforward_layernorm"}
            norms |= {"post_self_attention_norm": "post_attention_layernorm"}
            norms |= {"post_ffw_norm": "post_feedforward_layernorm"}
            attention |= {
                f"{long}_norm": {"scale": t(f"self_attn.{n}_norm") + one} for long, n in (("query", "q"), ("key", "k"))
            }
        return tree | {ours: {"scale": t(theirs) + one} for ours, theirs in norms.items()}

    every = [layer(i) for i in range(layers)]
    if scanned:
        stacked = {"layers": jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *every)}
    else:
        stacked = {f"layers_{i}": tree for i, tree in enumerate(every)}
    embedding = x["model.embed_tokens.weight"] * np.float32(np.sqrt(raw["hidden_size"]) if gemma else 1)
    decoder = stacked | {"decoder_norm": {"scale": x["model.norm.weight"] + one}}
    if "lm_head.weight" in x:
        decoder["logits_dense"] = {"kernel": x["lm_head.weight"].T}
    return {"params": {"params": {"token_embedder": {"embedding": embedding}, "decoder": decoder}}}


def orbax_model(folder, name, tree, names):
    folder.mkdir()
    shutil.copy(FIXTURES / name / "config.json", folder)
    orbax.checkpoint.PyTreeCheckpointer().save((folder / "items").resolve(), tree)
    (folder / "names.toml").write_text(names)
    return folder


@pytest.mark.parametrize(
    ("name", "layout", "rope", "limit"),
    [("llama-yarn", "maxtext-llama", "interleaved", 1e-12), ("llama-yarn", "maxtext-llama", "halves", 1e-12),
     ("llama-gqa", "maxtext-llama", "", 1e-6), ("llama-llama3", "maxtext-llama", "", 1e-6),
     ("llama-yarn", "maxtext-llama-unscanned", "interleaved", 1e-12), ("gemma3-gqa", "maxtext-gemma3", "", 1e-6)],
)  # fmt: skip
def test_a_maxtext_checkpoint_is_the_model_it_was_made_of(tmp_path, name, layout, rope, limit):
    """Exactly where √K is a power of two; else q / √K was rounded to float32 when it was stored."""
    tree = as_maxtext(name, "unscanned" not in layout, rope == "interleaved" or name == "llama-llama3")
    chosen = f'rope = "{rope}"\n' if rope else ""
    folder = orbax_model(tmp_path / "m", name, tree, f'checkpoint = "items"\nlayout = "{layout}"\n{chosen}')
    opened, want = open_checkpoint(str(folder)), expected(name)
    hidden, logits = reference(opened, want["tokens"])
    assert relative(logits, want["logits"]) <= limit
    assert relative(hidden[-1], want["hidden"][-1]) <= limit
    assert run(["models", "--check", str(folder)]) == 0
    theirs = orbax.checkpoint.PyTreeCheckpointer().restore((folder / "items").resolve())
    kernel = theirs["params"]["params"]["decoder"]["layers_1" if "unscanned" in layout else "layers"]["mlp"]["wo"][
        "kernel"
    ]
    kernel = np.asarray(kernel if "unscanned" in layout else kernel[:, 1])
    np.testing.assert_array_equal(opened.tensors.read_tensor("model.layers.1.mlp.down_proj.weight"), kernel.T)


MAXTEXT = sorted(p.parent.name for p in (FIXTURES.parent / "maxtext").glob("*/config.json"))


@pytest.mark.parametrize("name", MAXTEXT)
def test_a_tree_that_maxtext_wrote_gives_the_logits_that_maxtext_computed(name):
    """Its logits are of float32: 70 tokens of a tiny Llama, every kind of its RoPE (refs/maxtext/generate.py)."""
    folder = FIXTURES.parent / "maxtext" / name
    want = load_file(folder / "logits.safetensors")
    opened = open_checkpoint(str(folder))
    assert opened.config.query_scale == 1.0
    assert relative(reference(opened, want["tokens"])[1], want["logits"]) <= 1e-6


@pytest.mark.parametrize("name", ["default", "llama3.1", "yarn", "yarn-halves"])
def test_a_tree_of_maxtext_read_for_the_other_rope_is_another_model(tmp_path, name):
    shutil.copytree(FIXTURES.parent / "maxtext" / name, tmp_path / "m")
    other = "interleaved" if name in ("default", "yarn-halves") else "halves"
    (tmp_path / "m" / "names.toml").write_text(f'checkpoint = "items"\nlayout = "maxtext-llama"\nrope = "{other}"\n')
    want = load_file(tmp_path / "m" / "logits.safetensors")
    assert relative(reference(open_checkpoint(str(tmp_path / "m")), want["tokens"])[1], want["logits"]) > 0.1


@pytest.mark.parametrize(
    ("name", "names", "words"),
    [("yarn", 'layout = "maxtext-llama"', ["rope_type = 'yarn'", 'rope = "interleaved"', 'rope = "halves"']),
     ("default", 'layout = "maxtext-llama"\nrope = "pairs"', ["names.toml", "pairs"]),
     ("default", 'layout = "maxtext-gemma3"\nrope = "halves"', ["leave rope out"])],
)  # fmt: skip
def test_how_a_tree_is_rotated_is_told_and_never_guessed(tmp_path, capsys, name, names, words):
    shutil.copytree(FIXTURES.parent / "maxtext" / name, tmp_path / "m")
    (tmp_path / "m" / "names.toml").write_text(f'checkpoint = "items"\n{names}\n')
    assert run(["models", str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert not [w for w in words if w not in error], error


def test_trees_of_maxtext_are_what_their_hashes_say():
    root = FIXTURES.parent / "maxtext"
    told = dict(reversed(line.split("  ")) for line in (root / "SHA256SUMS").read_text().splitlines())
    files = [p for p in root.glob("*/**/*") if p.is_file()]
    assert told == {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("nested", [False, True])
def test_flat_and_nested_trees_need_no_map(tmp_path, nested):
    tree: dict = {}
    tensors = load_file(FIXTURES / "llama-gqa" / "model.safetensors")
    for key, x in tensors.items():
        node, parts = tree, key.split(".") if nested else [key]
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = x
    opened = open_checkpoint(str(orbax_model(tmp_path / "m", "llama-gqa", tree, 'checkpoint = "items"\n')))
    for key, x in tensors.items():
        np.testing.assert_array_equal(opened.tensors.read_tensor(key), x)


def test_rows_of_a_tensor_in_several_arrays_of_a_tree(tmp_path):
    """A vocabulary in two shards, and the gates of every layer in two stacks."""
    tensors = load_file(FIXTURES / "llama-gqa" / "model.safetensors")
    embed, gate = "model.embed_tokens.weight", "model.layers.{i}.mlp.gate_proj.weight"
    layers = open_checkpoint(str(FIXTURES / "llama-gqa")).config.layers
    gates = [tensors[gate.replace("{i}", str(i))] for i in range(layers)]
    own = {n: x for n, x in tensors.items() if n != embed and "gate_proj" not in n}
    halves = [np.stack([half.T for half in each]) for each in zip(*(np.split(g, 2) for g in gates), strict=True)]
    tree = own | {"low": tensors[embed][:5], "high": tensors[embed][5:], "gate": dict(zip("ab", halves, strict=True))}
    generals = {re.sub(r"layers\.\d+\.", "layers.{i}.", n) for n in own}
    lines = [f'"{n}" = {{ path = "{n}" }}' for n in sorted(generals)]
    lines += [f'"{embed}" = {{ path = ["low", "high"] }}']
    lines += [f'"{gate}" = {{ path = ["gate/a", "gate/b"], axes = "l d o -> o d" }}']
    names = "\n".join(['checkpoint = "items"', "[tensors]", *lines])
    opened = open_checkpoint(str(orbax_model(tmp_path / "m", "llama-gqa", tree, names)))
    for key, x in tensors.items():
        assert opened.tensors.shapes()[key] == x.shape
        np.testing.assert_array_equal(opened.tensors.read_tensor(key), x)


@pytest.mark.parametrize(
    ("names", "words"),
    [('layout = "maxtext-lama"', ["maxtext-llama"]), ('checkpoint = "../.."', ["outside"]),
     ('checkpoint = "nothing"', ["no Orbax checkpoint"]), ("x = 1", ["names.toml", "x"]),
     ('checkpoint = "items"\nprefix = "other"', ["other/model/embed_tokens"]),
     ('checkpoint = "items"\n[config]\nlayers = 3.0', ["layers", "cannot be set"]),
     ('checkpoint = "items"\n[tensors]\n"model.norm.weight" = { path = "a" }', ["no entry for 'model.embed_tokens"])],
)  # fmt: skip
def test_a_map_that_does_not_fit_is_refused(tmp_path, capsys, names, words):
    tree = load_file(FIXTURES / "llama-gqa" / "model.safetensors")
    assert run(["models", str(orbax_model(tmp_path / "m", "llama-gqa", tree, names))]) == 2
    error = capsys.readouterr().err
    assert not [w for w in words if w not in error], error


def test_a_stack_of_too_few_layers_is_refused(tmp_path, capsys):
    tree = as_maxtext("llama-gqa")
    decoder = tree["params"]["params"]["decoder"]
    decoder["layers"] = jax.tree.map(lambda x: x[:, :1], decoder["layers"])
    folder = orbax_model(tmp_path / "m", "llama-gqa", tree, 'checkpoint = "items"\nlayout = "maxtext-llama"\n')
    assert run(["models", str(folder)]) == 2
    assert "has no layer 1" in capsys.readouterr().err


def test_an_array_that_the_map_lacks_is_refused(tmp_path, capsys):
    """As safetensors refuses it; one beside the prefix (an optimiser's) is none of the model's."""
    tensors = load_file(FIXTURES / "llama-gqa" / "model.safetensors")
    tree = {"params": tensors | {"extra.bias": np.ones(3, np.float32)}, "step": np.zeros((), np.float32)}
    names = 'checkpoint = "items"\nprefix = "params"\n'
    folder = orbax_model(tmp_path / "m", "llama-gqa", tree, names)
    assert run(["models", str(folder)]) == 2
    assert "array 'params/extra.bias' is not in the map" in capsys.readouterr().err
    (folder / "names.toml").write_text(f'{names}ignore = ["extra"]\n')
    assert run(["models", str(folder)]) == 0


@pytest.mark.turn  # 3 s
def test_an_orbax_model_is_traced_and_compared(tmp_path):
    tree = as_maxtext("llama-gqa")
    folder = orbax_model(tmp_path / "m", "llama-gqa", tree, 'checkpoint = "items"\nlayout = "maxtext-llama"\n')
    prompts = [Prompt(id="p", tokens=tuple(range(1, 30)))]
    trace(load(str(folder), "fp32-highest", device="cpu"), tmp_path / "run", prompts)
    assert run(["gate", str(tmp_path / "run")]) == 2
    assert run(["compare", str(tmp_path / "run")]) == 0
    assert run(["gate", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_data_an_orbax_checkpoint_lacks_is_named(tmp_path, capsys, damage):
    tree = load_file(FIXTURES / "llama-gqa" / "model.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copy(FIXTURES / "llama-gqa" / "config.json", folder)
    orbax.checkpoint.PyTreeCheckpointer(use_ocdbt=False).save((folder / "items").resolve(), tree)
    (folder / "names.toml").write_text('checkpoint = "items"\n')
    assert run(["models", "--check", str(folder)]) == 0
    chunk = folder / "items" / "model.layers.0.mlp.down_proj.weight" / "0.0"
    if damage == "gone":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:20])
    assert run(["models", "--check", str(folder)]) == 2
    assert "'model.layers.0.mlp.down_proj.weight' cannot be read" in capsys.readouterr().err


ROPE_OF_FILES = {
    "scale_linear": ({"rope.scale_linear": 4.0}, RopeScaling(kind="linear", factor=4.0)),
    "no type": ({"rope.scaling.factor": 2.0}, RopeScaling(kind="linear", factor=2.0)),
    "factor 1": ({"rope.scaling.factor": 1.0}, None),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
        RopeScaling(kind="yarn", factor=4.0, original=128, attention=0.5 * (1 + 0.1 * np.log(4.0))),
    ),
}


@pytest.mark.parametrize("kind", ROPE_OF_FILES)
def test_rope_of_a_gguf_is_llama_cpp_s(tmp_path, kind):
    more, want = ROPE_OF_FILES[kind]
    assert open_checkpoint(str(write_gguf(tmp_path / "a.gguf", "llama", "llama-gqa", more))).config.rope_scaling == want


def test_rope_of_a_gguf_that_is_not_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"llama\.rope\.scaling\.yarn_beta_fast"):
        open_checkpoint(
            str(write_gguf(tmp_path / "a.gguf", "llama", "llama-gqa", {"rope.scaling.yarn_beta_fast": 8.0}))
        )


def config_of(name, **more):
    return from_config_json(json.loads((FIXTURES / name / "config.json").read_text()) | more, "config.json")


# Fields of published configurations that change nothing where they stand.
@pytest.mark.parametrize(
    ("name", "more"),
    [("phi3-mha", {"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
     ("qwen2-gqa", {"use_mrope": False}), ("gemma2-gqa", {"sliding_window_size": 8}),
     ("gemma2-gqa", {"hidden_act": "gelu"}), ("gemma-mqa", {"hidden_act": "gelu"}),
     ("qwen3-moe-gqa", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
     ("llama-gqa", {"unsloth_version": "x", "_attn_implementation_autoset": True, "tokenizer_class": "T"})],
)  # fmt: skip
def test_fields_that_change_nothing_are_let_pass(name, more):
    assert config_of(name, **more) == config_of(name)


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [("phi3-mha", {"attention_bias": True}, "attention_bias"), ("phi3-mha", {"lm_head_bias": True}, "lm_head_bias"),
     ("gemma2-gqa", {"sliding_window_size": 9}, "sliding_window_size"), ("qwen2-gqa", {"use_mrope": True}, "use_mrope"),
     ("qwen3-gqa", {"use_qk_norm": True}, "use_qk_norm"), ("qwen3-moe-gqa", {"mlp_only_layers": [1]}, "mlp_only"),
     ("phi3-longrope", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "1 factors"),
     ("llama-gqa", {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor 0"),
     ("llama-gqa", {"quantization_config": {"quant_method": "gptq"}}, "gptq")],
)  # fmt: skip
def test_fields_that_change_something_are_refused(name, more, word):
    with pytest.raises(UserError, match=f"config.json: .*{word}"):
        config_of(name, **more)


def test_windows_of_qwen3_moe_are_on_every_layer():
    c = config_of("qwen3-moe-gqa", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert (c.window, c.full_layers) == (7, ())


@pytest.mark.turn  # 9 s
def test_the_activation_is_the_configuration_s(tmp_path):
    """A llama with GELU: the decoder and the reference compute the same."""
    shutil.copytree(FIXTURES / "llama-gqa", tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"hidden_act": "gelu_pytorch_tanh"}))
    prompts = [Prompt(id="p", tokens=tuple(range(1, 20)))]
    trace(load(str(tmp_path / "m"), "fp32-highest", device="cpu"), tmp_path / "run", prompts)
    assert run(["compare", str(tmp_path / "run")]) == 0
    assert run(["gate", str(tmp_path / "run")]) == 0


def test_compressed_tensors_and_activation_scales(tmp_path):
    tensors, _ = float8_model(tmp_path / "m", lambda s: (s[0], 1))
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    how = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"quantization_config": how}))
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = np.ones((), np.float32)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert run(["models", "--check", str(tmp_path / "m")]) == 0


def test_a_snapshot_without_weights_is_not_the_model(tmp_path):
    cached(tmp_path, "someone/model")
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "precaudit", "models", "someone/model"]
    lost = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert lost.returncode == 2
    assert "could not be fetched" in lost.stderr or "no .safetensors" in lost.stderr
