"""Runs on disk as what reads them needs them: what was recorded, what compare wrote, and those of programs."""
