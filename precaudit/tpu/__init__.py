"""A TPU that is not there: what its compiler makes of a program, read and run on a CPU."""
