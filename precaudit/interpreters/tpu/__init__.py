"""A TPU that need not be here: targets, what their compiler makes of a program, and what that does to its numbers."""
