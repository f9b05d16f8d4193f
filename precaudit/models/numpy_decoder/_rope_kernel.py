"""RoPE's rotation of FP64 rows in one pass over memory, compiled by numba: NumPy makes eight, half a head at a time."""

from precaudit.numbers.compiling import nogil_njit


@nogil_njit(error_model="numpy")
def rotate(x, cos, sin, out):  # type: ignore[no-untyped-def]
    """Fill out [T, H, K] with x, its pairs (i, i + R/2) turned by cos, sin [T, R/2]; ``out`` may be x."""
    half = cos.shape[1]
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b = x[t, h, i], x[t, h, half + i]
                out[t, h, i] = a * cos[t, i] - b * sin[t, i]
                out[t, h, half + i] = b * cos[t, i] + a * sin[t, i]
            for i in range(2 * half, x.shape[2]):
                out[t, h, i] = x[t, h, i]
