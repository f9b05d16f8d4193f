"""What a policy's mask makes of a configuration: how attention is computed, not what the model is."""

from msgspec.structs import replace

from precaudit.errors import UserError
from precaudit.schema.configuration import DecoderConfig
from precaudit.schema.policies import Policy, window_of


def with_window(config: DecoderConfig, policy: Policy) -> DecoderConfig:
    """Return a model's configuration with the window of keys that a policy leaves to attention, in every layer.

    The model itself, whose forward error is told from FP64, has the configuration that is given. Raises UserError for a
    model with a window of its own.
    """
    window = window_of(policy)
    if window is None:
        return config
    if config.window is not None:
        raise UserError(
            f"policy {policy.name}: mask = {policy.mask} is for models that attend to all keys, and this one has a "
            f"window of its own, of {config.window:,} keys (sliding_window); use mask = full"
        )
    return replace(config, window=window)
