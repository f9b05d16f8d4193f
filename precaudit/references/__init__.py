"""What a run is held against: the textbook, or the program's own jaxpr, in FP64 and as honest rounding makes it."""
