"""Readers of model files: named arrays by mmap, the configuration and the tokenizer."""

from precaudit.models.checkpoints.opening import Checkpoint, file_hashes, names_model, open_checkpoint, recorded_source

__all__ = ["Checkpoint", "file_hashes", "names_model", "open_checkpoint", "recorded_source"]
