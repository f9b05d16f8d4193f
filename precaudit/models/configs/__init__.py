"""Model configurations: config.json and GGUF metadata, mapped field by field; what is not understood is refused."""

from precaudit.models.configs.gguf import from_gguf
from precaudit.models.configs.huggingface import FAMILIES, from_config_json
from precaudit.models.configs.masks import with_window
from precaudit.schema.configuration import DecoderConfig, Norms, RopeScaling
from precaudit.schema.tensors import EMBEDDING, HEAD, model_tensors

__all__ = [
    "EMBEDDING",
    "FAMILIES",
    "HEAD",
    "DecoderConfig",
    "Norms",
    "RopeScaling",
    "from_config_json",
    "from_gguf",
    "model_tensors",
    "with_window",
]
