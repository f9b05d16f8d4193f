"""Formats, rounding, and arrays of numbers."""
