"""Solvers and estimators: loops that end when they have converged, step sizes, recursions of other sciences."""

import jax
import jax.numpy as jnp
from jax import lax

from exams.styles.shapes import BF, seed_weights
from precaudit import Program

weight = seed_weights(12)[1]


def drawn(*shape, scale=1.0, dtype=jnp.float32):
    return weight(*shape, scale=scale, dt=dtype)


def slope(p, y):
    return jnp.tanh(p @ y) - 0.5 * y


def heun(p, state, tolerance):
    """Return the state after a step of Heun's method, accepted or not, whose size follows from the error of it."""
    t, h, y = state
    first = slope(p, y)
    euler = y + h * first
    made = y + h * 0.5 * (first + slope(p, euler))
    error = jnp.sqrt(jnp.mean((made - euler) ** 2)) / tolerance
    t, y = jnp.where(error <= 1, t + h, t), jnp.where(error <= 1, made, y)
    return t, h * jnp.clip(0.9 / jnp.sqrt(error + 1e-9), 0.2, 5.0), y


def adaptive(p, y):
    def step(state):
        t, h, y = heun(p, state[:3], 1e-4)
        return t, jnp.minimum(h, 2.0 - t + 1e-7), y, state[3] + 1

    return lax.while_loop(lambda s: (s[0] < 2.0) & (s[3] < 200), step, (jnp.float32(0), jnp.float32(0.1), y, 0))[2]


def adaptive_scan(p, y):
    def step(state, _):
        state = heun(p, state, 1e-4)
        return state, state[2]

    return lax.scan(step, (jnp.float32(0), jnp.float32(0.1), y), None, length=40)[1]


def adaptive_batch(p, y):
    return jax.vmap(adaptive, (None, 0))(p, y)


def conjugate_gradients(a, b):
    matrix = a @ a.T + 0.5 * jnp.eye(len(a))

    def step(state):
        x, r, d, size, n = state
        image = matrix @ d
        length = size / (d @ image)
        x, r = x + length * d, r - length * image
        return x, r, r + (r @ r / size) * d, r @ r, n + 1

    return lax.while_loop(lambda s: (s[3] > 1e-8) & (s[4] < 60), step, (jnp.zeros_like(b), b, b, b @ b, 0))[0]


def line_search(p, x):
    def loss(x):
        return jnp.sum(jnp.tanh(p["a"] @ x - p["b"]) ** 2)

    def step(state):
        x, n = state
        now, g = jax.value_and_grad(loss)(x)
        size = lax.while_loop(
            lambda t: (loss(x - t * g) > now - 0.3 * t * (g @ g)) & (t > 1e-4),
            lambda t: t * 0.5,
            jnp.asarray(2, x.dtype),
        )
        return x - size * g, n + 1

    return lax.while_loop(lambda s: s[1] < 8, step, (x, 0))[0]


def power_iteration(a, v):
    a = a + a.T

    def step(state):
        v, _, n = state
        w = a @ v
        w = w / jnp.linalg.norm(w)
        return w, jnp.linalg.norm(a @ w - (w @ (a @ w)) * w), n + 1

    v = lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 40), step, (v, jnp.asarray(1, v.dtype), 0))[0]
    return v @ (a @ v)


def newton(p, x):
    def f(x):
        return x**3 - p * x - 1

    def step(state):
        x, n = state
        return x - f(x) / (3 * x * x - p), n + 1

    return lax.while_loop(lambda s: (jnp.max(jnp.abs(f(s[0]))) > 1e-3) & (s[1] < 25), step, (x, 0))[0]


def bisection(p, low):
    def step(_, bounds):
        low, high = bounds
        middle = (low + high) * 0.5
        below = jnp.tanh(middle * p) + middle * 0.1 < 0
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = lax.fori_loop(0, 20, step, (low, low + 8))
    return (low + high) * 0.5


def fixed_point(p, x):
    def step(state):
        z, _, n = state
        new = jnp.tanh(z @ p + x)
        return new, jnp.max(jnp.abs(new - z)), n + 1

    first = jnp.zeros_like(x), jnp.asarray(1, x.dtype), 0
    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 40), step, first)[0]


def k_means(_, x):
    def step(state):
        centres, _, n = state
        nearest = jnp.argmin(((x[:, None] - centres) ** 2).sum(-1), 1)
        counts = jax.nn.one_hot(nearest, len(centres), dtype=x.dtype)
        new = counts.T @ x / (counts.sum(0)[:, None] + 1e-3)
        return new, jnp.max(jnp.abs(new - centres)), n + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 15), step, (x[:4], jnp.asarray(1, x.dtype), 0))[0]


def sinkhorn(_, x, y):
    cost = ((x[:, None] - y) ** 2).sum(-1) * 2

    def step(state):
        _, g, _, n = state
        f = -jax.nn.logsumexp(g - cost, 1)
        new = -jax.nn.logsumexp(f[:, None] - cost, 0)
        return f, new, jnp.max(jnp.abs(new - g)), n + 1

    zero = jnp.zeros(len(x), x.dtype)
    f, g, *_ = lax.while_loop(lambda s: (s[2] > 1e-3) & (s[3] < 40), step, (zero, zero, jnp.asarray(1, x.dtype), 0))
    return jnp.exp(f[:, None] + g - cost)


def kalman(p, seen):
    moves, gain = p

    def step(state, y):
        mean, spread = state
        mean, spread = moves @ mean, moves @ spread @ moves.T + 0.1 * jnp.eye(6)
        innovation = gain @ spread @ gain.T + jnp.eye(3)
        weight = jnp.linalg.solve(innovation, gain @ spread).T
        mean, spread = mean + weight @ (y - gain @ mean), spread - weight @ (gain @ spread)
        return (mean, spread), mean

    return lax.scan(step, (jnp.zeros(6), jnp.eye(6)), seen)[1]


def hidden_markov(p, emitted):
    moves = jax.nn.log_softmax(p["moves"], -1)

    def step(state, e):
        state = jax.nn.logsumexp(state[:, None] + moves, 0) + e
        return state, state

    return lax.scan(step, jax.nn.log_softmax(p["first"]), emitted)[1]


def viterbi(p, emitted):
    def step(state, e):
        every = state[:, None] + p
        return jnp.max(every, 0) + e, jnp.argmax(every, 0)

    last, back = lax.scan(step, emitted[0], emitted[1:])
    return jnp.max(last), lax.scan(lambda i, b: (b[i], i), jnp.argmax(last), back, reverse=True)[1]


def gaussian_process(p, x):
    def loss(p):
        kernel = jnp.exp(-((x[:, None] - x) ** 2).sum(-1) * jnp.exp(p[0])) + 0.05 * jnp.eye(len(x))
        root = jnp.linalg.cholesky(kernel)
        y = jnp.sin(x[:, 0])
        return 0.5 * y @ jax.scipy.linalg.cho_solve((root, True), y) + jnp.log(jnp.diag(root)).sum()

    return jax.value_and_grad(loss)(p)


def running_variance(_, x):
    def step(state, x):
        n, mean, squares = state
        n, off = n + 1, x - mean
        mean = mean + off / n
        return (n, mean, squares + off * (x - mean)), None

    zero = jnp.zeros(x.shape[1], x.dtype)
    n, _, squares = lax.scan(step, (jnp.asarray(0, x.dtype), zero, zero), x)[0]
    return squares / n


NONE = jnp.zeros(1)
MARKOV = {"moves": drawn(8, 8), "first": drawn(8)}
PROGRAMS = {
    "adaptive steps": Program(adaptive, drawn(24, 24, scale=0.2), {"a": (drawn(24),)}, outputs="y"),
    "adaptive steps, scanned": Program(adaptive_scan, drawn(24, 24, scale=0.2), {"a": (drawn(24),)}, outputs="y"),
    "adaptive steps, a batch": Program(adaptive_batch, drawn(12, 12, scale=0.3), {"a": (drawn(6, 12),)}, outputs="y"),
    "conjugate gradients": Program(conjugate_gradients, drawn(24, 24, scale=0.2), {"a": (drawn(24),)}, outputs="x"),
    "line search": Program(
        line_search, {"a": drawn(16, 16, scale=0.25), "b": drawn(16)}, {"a": (drawn(16),)}, outputs="x"
    ),
    "line search, bfloat16": Program(
        line_search, {"a": drawn(16, 16, scale=0.25, dtype=BF), "b": drawn(16, dtype=BF)},
        {"a": (drawn(16, dtype=BF),)}, outputs="x",
    ),
    "power iteration": Program(power_iteration, drawn(24, 24, scale=0.2), {"a": (drawn(24),)}, outputs="value"),
    "Newton's roots": Program(newton, 1 + abs(drawn(64)), {"a": (2 + abs(drawn(64)),)}, outputs="x"),
    "bisection, bfloat16": Program(
        bisection, 2 + drawn(32, dtype=BF), {"a": (-1 - abs(drawn(32, dtype=BF)),)}, outputs="x"
    ),
    "fixed point": Program(fixed_point, drawn(32, 32, scale=0.1), {"a": (drawn(5, 32),)}, outputs="z"),
    "fixed point, bfloat16": Program(
        fixed_point, drawn(32, 32, scale=0.1, dtype=BF), {"a": (drawn(5, 32, dtype=BF),)}, outputs="z"
    ),
    "k-means": Program(k_means, NONE, {"a": (drawn(60, 5),)}, outputs="centres"),
    "transport": Program(sinkhorn, NONE, {"a": (drawn(12, 3), drawn(12, 3))}, outputs="plan"),
    "Kalman filter": Program(kalman, (0.9 * jnp.eye(6), drawn(3, 6)), {"a": (drawn(12, 3),)}, outputs="means"),
    "hidden Markov": Program(hidden_markov, MARKOV, {"a": (drawn(30, 8),)}, outputs="states"),
    "best path": Program(viterbi, drawn(8, 8), {"a": (drawn(20, 8),)}, outputs=("score", "path")),
    "Gaussian process": Program(gaussian_process, drawn(2), {"a": (drawn(20, 3),)}, outputs=("loss", "gradient")),
    "running variance": Program(running_variance, NONE, {"a": (3 + drawn(50, 12),)}, outputs="variance"),
}  # fmt: skip
