"""Model configurations: config.json and GGUF metadata, mapped field by field; what is not understood is refused."""

from precaudit.configs.decoder import DecoderConfig, Norms, RopeScaling
from precaudit.configs.gguf import from_gguf
from precaudit.configs.huggingface import FAMILIES, from_config_json
from precaudit.configs.masks import attended
from precaudit.configs.tensors import EMBEDDING, HEAD, expected_tensors

__all__ = [
    "EMBEDDING", "FAMILIES", "HEAD", "DecoderConfig", "Norms", "RopeScaling", "attended", "expected_tensors",
    "from_config_json", "from_gguf",
]  # fmt: skip
