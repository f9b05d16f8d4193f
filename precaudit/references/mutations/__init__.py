"""What may have been done instead of an operation: the formulas, formats and rows that an error is tried against."""
