"""The decoder in plain JAX: what is audited when no other program is given."""

from precaudit.jax_decoder.decoder import Decoder
from precaudit.jax_decoder.parts import Parts

__all__ = ["Decoder", "Parts"]
