"""Configurations, checkpoints, and the two decoders that share no numerics."""
