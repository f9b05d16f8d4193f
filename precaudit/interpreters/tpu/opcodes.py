"""XLA's opcodes. No JAX here."""

# XLA's opcodes (xla/hlo/ir/hlo_opcode.h); one that runs asynchronously is written with a suffix of SUFFIXES.
_OPCODES = """
    abs acos acosh add add-dependency after-all all-gather all-gather-done all-gather-start all-reduce all-reduce-done
    all-reduce-start all-to-all and asin asinh async-done async-start async-update atan2 atanh batch-norm-grad
    batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil cholesky clamp
    collective-broadcast collective-permute collective-permute-done collective-permute-start compare complex
    concatenate conditional constant convert convolution copy copy-done copy-start cosine cosh count-leading-zeros
    custom-call divide domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf exponential
    exponential-minus-one fft floor fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not optimization-barrier or outfeed pad parameter
    partition-id popcnt power ragged-all-to-all ragged-dot real recv recv-done reduce reduce-precision reduce-scatter
    reduce-window remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz
    round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter send send-done set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan
    tanh topk transpose triangular-solve tuple while xor
"""
OPCODES = frozenset(_OPCODES.split())
SUFFIXES = ("-start", "-update", "-done")


def is_known(opcode: str) -> bool:
    """Return whether XLA has the opcode, run at once or asynchronously."""
    return opcode in OPCODES or any(opcode.endswith(end) and opcode[: -len(end)] in OPCODES for end in SUFFIXES)
