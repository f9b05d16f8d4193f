"""One operation as a row: everything that is known of it without running it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from precaudit.schema.configuration import DecoderConfig


Kind = Literal["stream", "norm", "projection", "cache", "score", "softmax", "mix", "sum", "route", "gate", "head"]


def always(_config: "DecoderConfig") -> bool:
    """Every configuration."""
    return True


def no_tensor(_config: "DecoderConfig") -> None:
    """No tensor, in any configuration."""
    return


@dataclass(frozen=True)
class InsidePlaces:
    """Places of ``Rounding`` inside an operation that a compiler may leave unrounded: all of them or none.

    ``where``: the configurations whose operation has them.
    """

    places: tuple[str, ...]
    where: "Callable[[DecoderConfig], bool]" = always


@dataclass(frozen=True)
class Point:
    """An operation, and the named place in the program where its result is seen.

    ``axes``: T positions, D width, H query heads, G key/value heads, K head dimension, S key positions, F MLP width,
    E experts, V vocabulary. ``inputs``: the points its local error is computed from; ``with_experts``: those of a
    mixture of experts, where they are others. ``only``: the models that have it. ``within``: the operation it is a part
    of, which is judged from its own inputs. ``state``: expected equal to the rows earlier steps recorded, bit for bit,
    instead of close to FP64; ``cache``: the point that holds its rows; ``handed``: the point of the layer before that
    it has to equal.

    ``place``: of ``Rounding``, that rounds its result. Of a policy, ``format``: the key of the format it is stored in;
    ``operands``: those of the factors its sums multiply (none: it sums no products); ``inner``: those of what it rounds
    inside; ``arithmetic``: the one whose arithmetic is emulated in float32 alone. ``inside``: places that a compiler
    may leave unrounded. ``tensors``: whether it reads the model's; ``norm``: the tensor it normalises with; of a
    configuration, ``bias`` and ``cap``: the fields that say whether it has one. ``milestone``: FP64's formula is always
    compared there. ``shows``: parts of a policy whose raising is told by what it does to this operation's own error.
    """

    name: str
    kind: Kind
    axes: str
    inputs: tuple[str, ...]
    text: str
    per_layer: bool = True
    with_experts: tuple[str, ...] | None = None
    only: Literal["dense", "sparse"] | None = None
    within: str | None = None
    state: bool = False
    cache: str | None = None
    handed: str | None = None
    place: str = ""
    format: str = "activations"
    operands: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    arithmetic: str | None = None
    inside: tuple[InsidePlaces, ...] = ()
    tensors: bool = True
    norm: "Callable[[DecoderConfig], str | None]" = no_tensor
    bias: str | None = None
    cap: str | None = None
    milestone: bool = False
    shows: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """The operation it is a part of, or itself."""
        return self.within or self.name

    @property
    def shares_terms(self) -> bool:
        """Whether its product's terms are a layer's heads or the MLP's width, of which several devices have a part."""
        return self.kind == "projection" and self.axes == "TD"

    @property
    def sums(self) -> bool:
        """Whether it adds up products."""
        return bool(self.operands)

    @property
    def over_keys(self) -> bool:
        """Whether its last axis is the keys a row may read: [H, T, S]."""
        return self.axes == "HTS"

    @property
    def by_row(self) -> bool:
        """Whether it has a row of one size for each position, whatever came before."""
        return not self.state and not self.over_keys

    @property
    def heads(self) -> bool:
        """Whether its elements belong to heads."""
        return self.over_keys or self.axes.endswith("K")

    @property
    def attends(self) -> bool:
        """Whether it is a part of attention."""
        return self.kind in ("score", "softmax", "mix")

    @property
    def reads_keys(self) -> bool:
        """Whether it reads keys, in decode those of a cache."""
        return self.kind in ("score", "mix")

    @property
    def weighs(self) -> bool:
        """Whether softmax is in it."""
        return self.kind in ("softmax", "mix")

    @property
    def rotates(self) -> bool:
        """Whether RoPE is in it."""
        return "rope" in self.inner

    @property
    def projects(self) -> bool:
        """Whether it multiplies a layer's rows with a layer's matrix."""
        return self.per_layer and self.tensors and self.sums

    @property
    def inexact(self) -> bool:
        """Whether a device's reciprocal, root or tanh is common to its elements."""
        return self.kind in ("norm", "softmax", "mix", "gate", "route")

    def activates(self, config: "DecoderConfig") -> bool:
        """Whether the MLP's activation is in it."""
        return any("gate" in part.places and part.where(config) for part in self.inside)

    def normalises_inside(self, config: "DecoderConfig") -> bool:
        """Whether it normalises a sum it made itself: QK norm, norms after attention and MLP."""
        return self.kind != "norm" and self.norm(config) is not None

    def adds_bias(self, config: "DecoderConfig") -> bool:
        """Whether it adds a bias."""
        experts = config.sparse and self.with_experts is not None  # whose projections have none
        return self.bias is not None and not experts and getattr(config, self.bias)

    def has_cap(self, config: "DecoderConfig") -> bool:
        """Whether its result is capped."""
        return self.cap is not None and getattr(config, self.cap) is not None

    def inner_places(self, config: "DecoderConfig") -> tuple[tuple[str, ...], ...]:
        """Return the places inside it, those that are elided together in one tuple."""
        return tuple(part.places for part in self.inside if part.where(config))
