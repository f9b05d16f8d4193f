"""Exams: what is said of faults that were made, and of honest programs, must be true (``make exam`` and others)."""
