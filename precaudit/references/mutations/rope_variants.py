"""What may have been done instead of RoPE on q and k."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from precaudit.models.configs import DecoderConfig
from precaudit.numbers.arrays import Array, rounder
from precaudit.references.mutations.forms import at_positions, constant, on_result
from precaudit.references.mutations.rotation import (
    as_for_pairs,
    cosines_in,
    exchange_sines,
    interleave,
    no_rope,
    positions_in,
    shift_positions,
    sines_in,
    tables_in,
    with_angles,
    with_frequencies,
    with_tables,
)
from precaudit.references.mutations.variants import NARROW, STORED, Variant

semantics = partial(Variant, kind="semantics")


def rotation_variants(config: DecoderConfig, layer: int | None) -> Iterator[Variant]:
    """Yield variants of RoPE in a layer's q and k."""
    for by in (1, -1):
        yield semantics(f"positions {by:+d}", says=f"RoPE takes positions wrong by {by:+d}", form=shift_positions(by))
    yield semantics(
        "positions -1, at least 0",
        says="RoPE takes positions wrong by -1, 0 at 0",
        form=shift_positions(-1, 0),
    )
    yield semantics("pairs interleaved", says="RoPE rotates pairs (2i, 2i + 1)", form=interleave())
    yield semantics(
        "pairs interleaved, stored as halves",
        says="RoPE rotates pairs (2i, 2i + 1) and stores their first dimensions before their second",
        form=interleave(replaced=False),
    )
    if config.rotary is not None:
        says = f"RoPE turns every dimension of a head, not the first {config.rotary} alone"
        yield semantics("every dimension turned", says=says, form=constant(rotary=None), last=True)
    says = "rows of the weights lie in the order of pairs (2i, 2i + 1), and RoPE rotates halves"
    yield semantics("weights permuted as for pairs", says=says, form=as_for_pairs, last=True)
    yield semantics("no RoPE", says="RoPE is omitted", form=no_rope())
    yield semantics("RoPE twice", says="RoPE is applied twice", form=at_positions(lambda at: at * 2), last=True)
    yield semantics(
        "RoPE turned back",
        says="RoPE turns the other way: sin has the other sign",
        form=at_positions(np.negative),
        last=True,
    )
    for name in STORED[2:]:
        says = f"RoPE's tables are rounded to {name}"
        yield Variant(f"RoPE tables in {name}", "format", says, change=tables_in(rounder(name)), last=True)
    local = config.local_rope_theta is not None and config.window_of(layer) is not None  # never stretched
    if config.rope_scaling is not None and not local:
        yield semantics("RoPE not stretched", says="RoPE's scaling is omitted", form=constant(rope_scaling=None))
    for name in NARROW:
        narrow = rounder(name)
        yield Variant(
            f"RoPE tables in {name}", "format", f"RoPE's tables are rounded to {name}", change=tables_in(narrow)
        )
        for what, half in (("sines", sines_in), ("cosines", cosines_in)):
            yield Variant(
                f"RoPE {what} in {name}", "format", f"RoPE's {what} alone are rounded to {name}", change=half(narrow)
            )
        yield Variant(
            f"RoPE frequencies in {name}",
            "format",
            f"RoPE's frequencies are rounded to {name}",
            with_frequencies(narrow),
        )
        yield Variant(f"positions in {name}", "format", f"RoPE takes positions rounded to {name}", positions_in(narrow))
        yield from _angles_in(name)
    yield from _tables()


def _angles_in(name: str) -> Iterator[Variant]:
    """Yield RoPE by angles that are rounded to a narrow format, made of frequencies as they are or rounded, too."""
    narrow = rounder(name)
    ways: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
        f"RoPE angles in {name}": (f"RoPE's angles are rounded to {name}", lambda p, f: narrow(p * f)),
        f"RoPE frequencies and angles in {name}": (
            f"RoPE's frequencies are rounded to {name}, and its angles",
            lambda p, f: narrow(p * narrow(f)),
        ),
    }
    for cause, (says, angles) in ways.items():
        yield Variant(cause, "format", says, with_angles(angles), last=True)


def _tables() -> Iterator[Variant]:
    """Yield RoPE by cosines and sines that lie otherwise."""
    yield semantics(
        "cos and sin exchanged",
        says="RoPE's cosines and sines are exchanged",
        form=with_tables(exchange_sines),
        last=True,
    )
    ways: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
        "RoPE frequencies in reverse": ("pairs turn by RoPE's frequencies in reverse", lambda p, f: p * f[..., ::-1]),
        "RoPE frequencies shifted by +1": (
            "every pair turns by the frequency of the one before",
            lambda p, f: p * np.roll(f, 1, -1),
        ),
        "RoPE frequencies shifted by -1": (
            "every pair turns by the frequency of the next",
            lambda p, f: p * np.roll(f, -1, -1),
        ),
        "half of each head turned": (
            "RoPE turns the first half of a head alone, by its first frequencies",
            lambda p, f: p * f[..., : f.shape[-1] // 2],
        ),
        "half of each head turned, by every other frequency": (
            "RoPE turns the first half of a head alone, by every other frequency",
            lambda p, f: p * f[..., : f.shape[-1] // 2 * 2 : 2],
        ),
    }
    for cause, (says, angles) in ways.items():
        yield semantics(cause, says=says, form=with_angles(angles), last=True)
    yield semantics(
        "halves of heads exchanged",
        says="the halves of what RoPE turned are exchanged",
        last=True,
        form=on_result(_swap_halves, twice=True),
    )


def _swap_halves(out: Array) -> Array:
    return np.roll(out, out.shape[-1] // 2, axis=-1)
