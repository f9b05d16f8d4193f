"""Which operation a wrong number comes from, why, and what to change."""
