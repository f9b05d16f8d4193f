"""What there is to know of a run's errors: one question a file, each with a typed answer."""
