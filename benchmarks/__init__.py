"""Measures of speed and memory, each against its bound (``make bench``)."""
