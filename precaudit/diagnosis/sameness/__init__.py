"""Whether two programs are one formula: outputs in FP64 side by side, and where their values first part."""
