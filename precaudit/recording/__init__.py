"""From a program to a run on disk."""
