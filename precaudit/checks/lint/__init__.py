"""What a program says of its precision before it runs: rules over its jaxpr and what a TPU's compiler makes of it."""
