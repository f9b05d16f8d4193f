"""Scripts run unedited: which functions they jit and call, and calls of them kept to be recorded."""
