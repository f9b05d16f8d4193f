"""Generation over the shipped decoder: a prefill, then decode steps in one ``lax.while_loop`` or in a Python loop.

Both loops run the same step, end as soon as every sequence has drawn an end token, and hand one cache on, made before
and donated. A program is compiled once for a batch and its bucket of slots; how many tokens are drawn is an argument.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precaudit.checks.rollouts.sampling import Kind, Knobs, Sampling, draw_tokens
from precaudit.interpreters.jaxpr.narrow import hold_narrow
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.models.jax_decoder.sharding import Layout
from precaudit.numbers.arrays import Array
from precaudit.recording.tracing.programs import Compiled, compile_program, jit_program
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.lengths import bucket, row_lengths

Loop = Literal["python", "while"]
LOOPS: tuple[Loop, ...] = ("python", "while")
STATE = 3  # the argument that a program takes over


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["numbers", "token", "slots", "count", "live", "going", "drawn", "tokens", "logprobs", "cache"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DrawState:
    """A batch while it is drawn.

    ``numbers`` [B]: of its sequences; ``token`` [B]: drawn last, and ``slots`` [B] where it goes; ``count`` [B]: tokens
    of each; ``live`` [B]: whether a sequence has not ended, ``going``: whether any has not; ``drawn``: tokens of those
    that have not. ``tokens``, ``logprobs`` [B, N]: what was drawn, 0 after the end.
    """

    numbers: Any
    token: Any
    slots: Any
    count: Any
    live: Any
    going: Any
    drawn: Any
    tokens: Any
    logprobs: Any
    cache: Any


@dataclass(frozen=True)
class DrawShape:
    """What programs are compiled for: sequences, padded prompt, slots of the cache, and tokens at most."""

    batch: int
    prompt: int
    slots: int
    new: int

    @classmethod
    def of(cls, batch: int, longest: int, new: int) -> "DrawShape":
        """Return the bucket of ``batch`` prompts of at most ``longest`` tokens and of ``new`` drawn after each."""
        return cls(batch, bucket(longest), bucket(longest + new), bucket(new))


@dataclass(frozen=True)
class Generated:
    """A batch that was drawn. ``tokens``, ``logprobs``: of each sequence, its end token among them.

    Seconds: ``prefill``, its first token among that; ``decode``: of ``steps`` steps of the whole batch; ``host``: of
    these, while Python did not wait for the device.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    prefill: float
    decode: float
    host: float
    steps: int


@dataclass(frozen=True)
class Generator:
    """A subject that draws batches of one shape. ``ends``: the tokens after which a sequence ends."""

    subject: Subject
    shape: DrawShape
    sampling: Sampling
    ends: tuple[int, ...]
    programs: dict[str, Compiled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill up the batch to what the mesh divides."""
        object.__setattr__(self, "shape", replace(self.shape, batch=self.subject.mesh.filled(self.shape.batch)))

    def compile(self, loops: Sequence[Loop] = LOOPS) -> dict[str, float]:
        """Compile what ``loops`` need that is not there yet; return the seconds of each program."""
        options = tuple(compiler_options(self.subject.policy).items())
        s = self.subject
        made = _programs(s.decoder, self.sampling.kind, options, s.platform, s.layout)
        given = self.arguments()
        new = [name for name in ("start", *loops) if name not in self.programs]
        self.programs.update({name: compile_program(made[name], *given[name]) for name in new})
        return {name: self.programs[name].seconds for name in new}

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """Return arguments of each program, of the shapes and formats that it is compiled for."""
        state = self._blank([0] * self.shape.batch, [1] * self.shape.batch)
        ids = self._to_device(np.zeros((self.shape.batch, self.shape.prompt), np.int32))
        first = self._program_inputs([1] * self.shape.batch)
        return {
            "start": (*first, state, ids),
            "python": (*first, state),
            "while": (*first, state, self._to_device(np.int32(1))),
        }

    def generate(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], limit: int, loop: Loop = "while"
    ) -> Generated:
        """Draw at most ``limit`` tokens after each prompt; sequences draw by their ``numbers``.

        Fewer prompts than the batch holds are filled up with rows that draw nothing.
        """
        n, s = len(prompts), self.shape
        if not (0 < n <= s.batch and 0 < limit <= s.new and max(map(len, prompts)) <= s.prompt):
            raise ValueError(f"{n} prompts and {limit} tokens do not fit {s}")
        self.compile([loop])
        filled = [*prompts, *[prompts[0]] * (s.batch - n)]
        tokens = np.zeros((s.batch, s.prompt), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt)] = prompt
        state = self._blank([*numbers, *[0] * (s.batch - n)], [len(p) for p in filled], n)
        began = time.perf_counter()
        given = self._program_inputs([len(p) for p in filled])
        state = self.programs["start"](*given, state, self._to_device(tokens))
        going = bool(state.going)
        between = time.perf_counter()
        if loop == "python":
            state, waited = self._python(given, state, going, limit)
        else:
            state, waited = self._while(given, state, limit)
        decode = time.perf_counter() - between
        return _read_state(state, n, between - began, decode, decode - waited)

    def _program_inputs(self, lengths: Sequence[int]) -> tuple[Any, ...]:
        """Return what every program is given first: parameters, tables for prompts of ``lengths``, and how to draw."""
        slots = self.shape.slots
        tables = self.subject.tables(slots, np.stack([row_lengths("prefill", n, slots, slots) for n in lengths]))
        weights, how = self._on_device
        return weights, tables, how

    @cached_property
    def _on_device(self) -> tuple[Any, Any]:
        """Parameters, and how to draw, on the device."""
        knobs = self.sampling.knobs(self.subject.config.vocab, self.shape.batch)
        ends = np.asarray(self.ends or (-1,), np.int32)
        weights = hold_narrow(self.subject.parameters) if self.subject.platform == "cpu" else self.subject.parameters
        return weights, self._to_device((knobs, ends))

    def _blank(self, numbers: Sequence[int], lengths: Sequence[int], live: int | None = None) -> DrawState:
        """Return the state before prefill: an empty cache, and the slot of each prompt's last token."""
        b, n = self.shape.batch, self.shape.new
        each = np.arange(b) < (b if live is None else live)
        last = np.asarray(lengths, np.int32) - 1
        zero, made = np.zeros(b, np.int32), (np.zeros((b, n), np.int32), np.zeros((b, n), np.float32))
        numbers32 = np.asarray(numbers, np.uint32)
        state = DrawState(numbers32, zero, last, zero, each, np.bool_(True), np.int32(0), *made, None)
        return replace(self._to_device(state), cache=self._cache())

    def _cache(self) -> Any:
        """Return an empty cache: on a mesh no device makes all of it."""
        made = partial(self.subject.decoder.init_cache, self.shape.batch, self.shape.slots)
        if self.subject.layout is None:
            return self._to_device(made())
        return self.subject.put_cache(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(made)))

    def _python(self, given: Any, state: DrawState, going: bool, limit: int) -> tuple[DrawState, float]:
        """Take step after step from Python; return the state and the seconds that were waited for the device."""
        step, waited = self.programs["python"], 0.0
        for _ in range(limit - 1):
            if not going:
                break
            state = step(*given, state)
            began = time.perf_counter()
            going = bool(state.going)
            waited += time.perf_counter() - began
        return state, waited

    def _while(self, given: Any, state: DrawState, limit: int) -> tuple[DrawState, float]:
        """Take all steps in one call."""
        state = self.programs["while"](*given, state, self._to_device(np.int32(limit)))
        began = time.perf_counter()
        jax.block_until_ready(state.going)
        return state, time.perf_counter() - began

    def _to_device(self, x: object) -> Any:
        layout = self.subject.layout
        return jax.device_put(x, self.subject.device) if layout is None else layout.put(x, layout.everywhere)


def _read_state(state: DrawState, n: int, prefill: float, decode: float, host: float) -> Generated:
    """Return what stands in a state, of its first ``n`` sequences."""
    counts = np.asarray(state.count)[:n]
    tokens, logprobs = np.asarray(state.tokens), np.asarray(state.logprobs)

    def rows(x: Array) -> tuple[Any, ...]:
        return tuple(tuple(row[:count].tolist()) for row, count in zip(x, counts, strict=False))

    return Generated(rows(tokens), rows(logprobs), prefill, decode, host, int(state.drawn) - 1)


@lru_cache(maxsize=16)
def _programs(
    decoder: Any, kind: Kind, options: tuple[Any, ...], platform: str, layout: Layout | None
) -> dict[str, Callable[..., Any]]:
    """Return the jitted programs: ``start``, ``python`` (a step) and ``while`` (all of them).

    On a mesh the decoder is cut as in a trace. Tokens are drawn of whole logits, by every device the same.
    """
    how: dict[str, Any] = {"donate_argnums": (STATE,), "compiler_options": dict(options) or None}
    if layout is not None:
        how["out_shardings"] = _shardings(layout)

    def cut(*given: jax.Array) -> list[jax.Array]:
        return list(given) if layout is None else [lax.with_sharding_constraint(x, layout.by_prompt) for x in given]

    def whole(logits: jax.Array) -> jax.Array:
        return logits if layout is None else lax.with_sharding_constraint(logits, layout.everywhere)

    def start(
        params: Mapping[str, Any], tables: tuple[Any, ...], given: Any, state: DrawState, tokens: jax.Array
    ) -> DrawState:
        rows, starts = state.slots[:, None], jnp.zeros_like(state.slots)
        logits, cache = decoder.prefill(params, tables, *cut(tokens, starts, rows), state.cache)
        return _draw_token(kind, given, replace(state, cache=cache), whole(logits[:, 0]))

    def step(params: Mapping[str, Any], tables: tuple[Any, ...], given: Any, state: DrawState) -> DrawState:
        starts = jnp.zeros_like(state.slots)
        logits, cache = decoder.decode(params, tables, *cut(state.token, starts, state.slots), state.cache)
        return _draw_token(kind, given, replace(state, cache=cache), whole(logits[:, 0]))

    def loop(
        params: Mapping[str, Any], tables: tuple[Any, ...], given: object, state: DrawState, limit: jax.Array
    ) -> DrawState:
        return lax.while_loop(lambda s: s.going & (s.drawn < limit), lambda s: step(params, tables, given, s), state)

    return {
        "start": jit_program(start, platform, **how),
        "python": jit_program(step, platform, **how),
        "while": jit_program(loop, platform, **how),
    }


def _shardings(layout: Layout) -> DrawState:
    """Return where a state lies on a mesh: all but the cache on every device."""
    names = (f.name for f in fields(DrawState))
    return DrawState(**{name: layout.cache if name == "cache" else layout.everywhere for name in names})


def _draw_token(kind: Kind, given: tuple[Knobs, jax.Array], state: DrawState, logits: jax.Array) -> DrawState:
    """Return the state after a token was drawn from logits [B, V], and every sequence that ends by it has ended."""
    knobs, ends = given
    slots = jnp.where(state.live, state.slots + 1, state.slots)
    token, shares = draw_tokens(kind, knobs, logits, state.numbers, slots)
    rows = jnp.arange(len(token), dtype=jnp.int32)
    at = jnp.where(state.live, state.count, state.tokens.shape[1])  # outside: nothing is written
    live = state.live & ~jnp.any(token[:, None] == ends[None, :], axis=-1)
    return DrawState(
        state.numbers,
        token,
        slots,
        state.count + state.live.astype(jnp.int32),
        live,
        jnp.any(live),
        state.drawn + 1,
        state.tokens.at[rows, at].set(token, mode="drop"),
        state.logprobs.at[rows, at].set(shares, mode="drop"),
        state.cache,
    )
