"""OLMo 2: norms after attention and MLP and over all of q and k, rounded once."""

from precaudit.jax_decoder.parts import Parts, rms_norm_once

PARTS = Parts(norm=rms_norm_once)
