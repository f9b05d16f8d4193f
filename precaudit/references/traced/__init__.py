"""A program's own jaxpr as its reference: segments between points, and the whole, in FP64 and emulated (JAX)."""
