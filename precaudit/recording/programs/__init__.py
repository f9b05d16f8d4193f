"""Other people's programs: any jitted function recorded, its segments compared with themselves in FP64 and emulated."""
