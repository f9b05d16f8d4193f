"""What a device makes of a product of attention scores, in every format and every way that JAX offers."""
