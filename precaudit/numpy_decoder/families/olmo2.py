"""OLMo 2: norms after attention and MLP and over all of q and k, rounded once."""

from precaudit.numpy_decoder.families.llama import table
from precaudit.numpy_decoder.operators import rms_norm_once

OPERATIONS = table(rms_norm_once)
