from fp16 import program_of

buggy = program_of(False, size=30.0)  # raw q.k^T overflows float16; scaled after
fixed = program_of(True, size=30.0)
