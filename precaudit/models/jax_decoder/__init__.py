"""The decoder in plain JAX: what is audited when no other program is given."""

from precaudit.models.jax_decoder.decoder import Decoder
from precaudit.models.jax_decoder.parts import Parts

__all__ = ["Decoder", "Parts"]
