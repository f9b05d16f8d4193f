"""Model configurations: config.json and GGUF metadata, mapped field by field; what is not understood is refused."""

from precaudit.models.configs.gguf import from_gguf
from precaudit.models.configs.huggingface import FAMILIES, from_config_json
from precaudit.models.configs.masks import attended
from precaudit.schema.configuration import DecoderConfig, Norms, RopeScaling
from precaudit.schema.tensors import EMBEDDING, HEAD, expected_tensors

__all__ = [
    "EMBEDDING", "FAMILIES", "HEAD", "DecoderConfig", "Norms", "RopeScaling", "attended", "expected_tensors",
    "from_config_json", "from_gguf",
]  # fmt: skip
