"""Training, step for step: where two sides part, and whether that grows as rounding does or drifts."""
