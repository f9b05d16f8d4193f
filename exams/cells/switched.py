"""Faults in one program, of which a number beside the weights chooses one: it is compiled once for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, named_scope
from jax.ad_checkpoint import checkpoint_name as tap

from exams.cells.cell import MIDDLE
from precaudit.models.jax_decoder import Decoder
from precaudit.models.jax_decoder.arithmetic import dot
from precaudit.recording.tracing.subject import Subject

PREFILL, DECODE = "prefill", "decode"
FAULT = "fault"  # the name of the number: [L] of layers, 0 where they are honest, and one of what is outside layers
Wrong = Callable[..., Any]
One = tuple[int, Wrong]  # the number of a fault, and what it does


@dataclass(frozen=True)
class InPart:
    """A part that is ``wrong`` in the middle layer: the ``call``-th time a layer calls it, None each.

    ``bits``: it works on the bits of numbers, which have no meaning in FP64: it is in a program of such alone.
    """

    part: str
    wrong: Wrong
    call: int | None = None
    phases: tuple[str, ...] = (PREFILL, DECODE)
    bits: bool = False

    def __call__(self, subject: Subject, beside: Sequence[Any]) -> Subject:
        """Return the subject with this fault."""
        return _chosen(subject, self, [x for x in beside if isinstance(x, InPart) and x.part == self.part], Parted)


@dataclass(frozen=True)
class InActivation:
    """An activation whose ``function`` of (gate, up) in float32 or whose ``then`` of (act, gate, up, a) is wrong."""

    function: Wrong | None = None
    then: Wrong | None = None

    def __call__(self, subject: Subject, beside: Sequence[Any]) -> Subject:
        """Return the subject with this fault."""
        return _chosen(subject, self, [x for x in beside if isinstance(x, InActivation)], Activated)


@dataclass(frozen=True)
class InStream:
    """Sums of the middle layer that are wrong.

    ``mid``, ``out``: of (stream before, what is added, stream that came in); ``reads``: what the second norm reads, of
    (stream, stream that came in); ``came``: the stream as it came in; ``bits``: as of a part.
    """

    mid: Wrong | None = None
    out: Wrong | None = None
    reads: Wrong | None = None
    came: Wrong | None = None
    bits: bool = False

    def __call__(self, subject: Subject, beside: Sequence[Any]) -> Subject:
        """Return the subject with this fault."""
        return _chosen(subject, self, [x for x in beside if isinstance(x, InStream)], Streamed)


@dataclass(frozen=True)
class InLogits:
    """Logits [B, R, V] in float32 that are changed before they are recorded."""

    wrong: Wrong

    def __call__(self, subject: Subject, beside: Sequence[Any]) -> Subject:
        """Return the subject with this fault."""
        return _chosen(subject, self, [x for x in beside if isinstance(x, InLogits)], Headed)


@dataclass(frozen=True)
class Switched(Decoder):
    """A decoder with faults, numbered from 1."""

    faults: tuple[Any, ...] = ()

    def having(self, name: str) -> list[One]:
        """Return the faults that have a field of this name."""
        return [(i, way) for i, f in enumerate(self.faults, 1) if (way := getattr(f, name)) is not None]

    def choose(self, number: Any, ways: Sequence[One], honest: Wrong, *args: Any) -> Any:
        """Return what the numbered way makes of the arguments, in the honest way's formats; honest where it is none."""
        if not ways:
            return honest(*args)
        at = np.zeros(len(self.faults) + 1, np.int32)
        at[[i for i, _ in ways]] = np.arange(1, len(ways) + 1)
        like = jax.eval_shape(lambda: honest(*args))

        def cast(way: Wrong) -> Wrong:
            return lambda: jax.tree.map(lambda y, as_: y.astype(as_.dtype), way(*args), like)

        return lax.switch(jnp.asarray(at)[number], [cast(honest), *(cast(way) for _, way in ways)])


@dataclass(frozen=True)
class Parted(Switched):
    """Faults of one part."""

    def _layer(self, x: Any, cache: Any, w: Any, layer: Any, step: Any) -> Any:
        name, count, here = self.faults[0].part, 0, DECODE if step.slots is not None else PREFILL
        honest = getattr(self.parts, name)

        def part(*args: Any) -> Any:
            nonlocal count
            ways = [(i, f.wrong) for i, f in enumerate(self.faults, 1) if f.call in (None, count) and here in f.phases]
            count += 1
            return self.choose(w[FAULT], ways, honest, *args)

        return Decoder._layer(replace(self, parts=replace(self.parts, **{name: part})), x, cache, w, layer, step)


@dataclass(frozen=True)
class Activated(Switched):
    """Faults of the activation."""

    def _layer(self, x: Any, cache: Any, w: Any, layer: Any, step: Any) -> Any:
        def activate(gate: Any, up: Any, a: Any) -> Any:
            wide = gate.astype(jnp.float32), up.astype(jnp.float32)
            with named_scope("gate_out"):
                y = self.choose(w[FAULT], self.having("function"), lambda gate, _up: jax.nn.silu(gate), *wide)
                act = tap(y.astype(a.mlp), "gate_out")
            product = self.choose(w[FAULT], self.having("then"), times_up, act, gate, up, a)
            return product.astype(a.activations)

        return Decoder._layer(replace(self, parts=replace(self.parts, activate=activate)), x, cache, w, layer, step)


def times_up(act: Any, _gate: Any, up: Any, a: Any) -> Any:
    """The product of a gated unit."""
    return act * up.astype(a.mlp)


def added(before: Any, more: Any, _came: Any) -> Any:
    """The usual sum of the stream."""
    return before + more.astype(before.dtype)


@dataclass(frozen=True)
class Streamed(Switched):
    """Faults of the residual stream."""

    def _layer(self, x: Any, cache: Any, w: Any, layer: Any, step: Any) -> Any:
        def chosen(name: str, honest: Wrong, *args: Any) -> Any:
            return self.choose(w[FAULT], self.having(name), honest, *args)

        x = came = tap(chosen("came", lambda x: x, x), "resid_in")
        h = tap(self._norm(x, w, "attn_norm"), "attn_norm")
        got, cache = self._attention(h, cache, w, layer, step)
        proj = tap(self.parts.project(got.reshape(*x.shape[:2], -1), w["wo"], None, self.arithmetic), "attn_proj")
        x = tap(chosen("mid", added, x, proj, came), "resid_mid")
        h = tap(self._norm(chosen("reads", lambda x, _came: x, x, came), w, "mlp_norm"), "mlp_norm")
        mlp = tap(self._dense(h, w), "mlp_out")
        return tap(chosen("out", added, x, mlp, came), "resid_out"), cache


@dataclass(frozen=True)
class Headed(Switched):
    """Faults of logits."""

    def _logits(self, params: Any, x: Any, logit_rows: Any) -> Any:
        a, head = self.arithmetic, params.get("lm_head", params["embed"])
        h = tap(self._norm(x, params, "final_norm"), "final_norm")
        h = jnp.take_along_axis(h, logit_rows[:, :, None], axis=1)
        y = dot(h, head, (2, 1), a.logits, a)
        return tap(self.choose(params[FAULT], self.having("wrong"), lambda y: y, y), "logits")


def _chosen(subject: Subject, fault: Any, alike: Sequence[Any], decoder: type[Switched]) -> Subject:
    """Give a subject the program of all faults that are alike, and choose one."""
    together = [x for x in alike if getattr(x, "bits", False) == getattr(fault, "bits", False)]
    faults = tuple(together) if any(x is fault for x in together) else (*together, fault)
    number = next(i for i, x in enumerate(faults, 1) if x is fault)
    usual = {f.name: getattr(subject.decoder, f.name) for f in fields(Decoder)}
    held, layers = subject.parameters, subject.config.layers
    of_layers = jnp.zeros(layers, jnp.int32).at[MIDDLE].set(number)
    vars(subject)["decoder"] = decoder(**usual, faults=faults)
    vars(subject)["parameters"] = held | {"layers": held["layers"] | {FAULT: of_layers}, FAULT: jnp.int32(number)}
    return subject
