"""How a fault is made: in a part of one layer, in the weights as loaded, in RoPE's tables, in what a layer adds."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import msgspec

from exams.cells.cell import MIDDLE, Change
from exams.cells.switched import DECODE, PREFILL, InPart, Wrong
from precaudit.models.configs import DecoderConfig
from precaudit.models.jax_decoder import Decoder
from precaudit.models.jax_decoder.parameters import rope_tables
from precaudit.numbers.arrays import Array
from precaudit.recording.tracing.subject import Subject
from precaudit.schema.policies import Policy

Tables = tuple[list[Array], list[Array]]


@dataclass(frozen=True)
class Hooked(Decoder):
    """A decoder one of whose steps outside the parts is ``wrong``: it is given the honest step and its arguments."""

    step: str = ""
    wrong: Wrong | None = None

    def _norm(self, *args: Any) -> Any:
        return self._made("norm", super()._norm, args)

    def _logits(self, *args: Any) -> Any:
        return self._made("logits", super()._logits, args)

    def _step(self, *args: Any) -> Any:
        return self._made("step", super()._step, args)

    def _layer(self, *args: Any) -> Any:
        return self._made("layer", super()._layer, args)

    def _layers(self, *args: Any) -> Any:
        return self._made("layers", super()._layers, args)

    def _of(self, *args: Any) -> Any:
        return self._made("of", super()._of, args)

    def _made(self, step: str, honest: Wrong, args: tuple[Any, ...]) -> Any:
        if step != self.step or self.wrong is None:
            return honest(*args)
        return self.wrong(honest, *args)


@dataclass(frozen=True, repr=False)
class Turning(Subject):
    """A subject with other tables of RoPE."""

    made: Callable[[DecoderConfig, int, Policy, Any], Tables] = rope_tables

    def tables(self, positions: int, lengths: Any = None) -> Any:
        """Return cos and sin as ``made`` makes them."""
        return jax.device_put(self.made(self.config, positions, self.policy, lengths), self.device)


def _with(subject: Subject, decoder: type[Decoder], **more: Any) -> Subject:
    """Give a subject another decoder."""
    usual = {f.name: getattr(subject.decoder, f.name) for f in fields(Decoder)}
    vars(subject)["decoder"] = decoder(**usual, **more)
    return subject


def in_part(
    part: str, wrong: Wrong, call: int | None = None, phases: tuple[str, ...] = (PREFILL, DECODE), bits: bool = False
) -> Change:
    """Make a part wrong in the middle layer; ``wrong`` takes what the part takes."""
    return InPart(part, wrong, call, phases, bits)


def in_step(step: str, wrong: Wrong) -> Change:
    """Make a method of the decoder wrong; ``wrong`` takes the honest method before its arguments."""
    return lambda subject, _beside: _with(subject, Hooked, step=step, wrong=wrong)


def in_weight(name: str, wrong: Callable[[Any], Any], at: int = MIDDLE) -> Change:
    """Load one layer's tensor [...] otherwise: transposed, cut, rounded."""

    def change(layers: dict[str, Any]) -> dict[str, Any]:
        held = layers[name]
        return {name: jax.tree.map(lambda x, y: x.at[at].set(y.astype(x.dtype)), held, wrong(_row(held, at)))}

    return in_weights(change)


def _row(held: Any, layer: int) -> Any:
    return jax.tree.map(lambda x: x[layer], held)


def in_weights(wrong: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Load layers' tensors {name: [L, ...]} otherwise; ``wrong`` returns those that are."""

    def change(subject: Subject, _beside: Any) -> Subject:
        held = subject.parameters
        vars(subject)["parameters"] = held | {"layers": held["layers"] | wrong(held["layers"])}
        return subject

    return change


def in_top(name: str, wrong: Callable[[Any], Any], read: str = "") -> Change:
    """Load a tensor outside layers otherwise: embed, final_norm, lm_head; ``read``: what it is made of."""

    def change(subject: Subject, _beside: Any) -> Subject:
        held = subject.parameters
        vars(subject)["parameters"] = held | {name: wrong(held[read or name])}
        return subject

    return change


def in_tables(made: Callable[[DecoderConfig, int, Policy, Any], Tables]) -> Change:
    """Make RoPE's tables otherwise."""
    return lambda subject, _beside: _turning(subject, made)


def _turning(subject: Subject, made: Callable[[DecoderConfig, int, Policy, Any], Tables]) -> Subject:
    return Turning(**{f.name: getattr(subject, f.name) for f in fields(Subject) if f.init}, made=made)


def in_config(**fields_: Any) -> Change:
    """Let the program read other fields of its configuration than are in it: a field that was not passed on."""
    known = {k: v for k, v in fields_.items() if k in ("rope_theta", "rope_scaling", "rotary", "local_rope_theta")}

    def change(subject: Subject, _beside: Any) -> Subject:
        config = msgspec.structs.replace(subject.decoder.config, **fields_)
        other = _turning(subject, lambda c, n, p, at: rope_tables(msgspec.structs.replace(c, **known), n, p, at))
        vars(other)["decoder"] = replace(subject.decoder, config=config)
        return other

    return change


def after(honest: Wrong, then: Callable[[Any], Any]) -> Wrong:
    """Return a part whose result is ``then`` of the honest one's."""
    return lambda *args: then(honest(*args))
