"""Correct programs in the styles that people write: none may fail."""
