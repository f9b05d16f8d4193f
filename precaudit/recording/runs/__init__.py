"""Runs on disk: written and read, what was recorded, what compare wrote, and those of programs."""
