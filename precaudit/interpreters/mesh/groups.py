"""Which devices a collective goes over, as HLO writes it. No JAX here."""

import math
import re
from typing import Any

import numpy as np

from precaudit.interpreters.tpu.hlo import Instruction

Groups = tuple[tuple[int, ...], ...]
LISTED = re.compile(r"\{([\d,]+)\}")  # {{0,1},{2,3}}
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")  # [2,2]<=[2,2]T(1,0): reshaped, then turned
# mesh['a'=2,'b'=4] {'b'}: axes, and those that it goes over; device_ids=([4,2]T(1,0)): turned before they have axes
MESH = re.compile(r"mesh\[([^\]]*)\]\s*(?:\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^{}]*)\}")
AXIS = re.compile(r"'(\w+)'=(\d+)")


def device_groups(x: Instruction, devices: int) -> Groups:
    """Return the groups of devices of a collective, each in its order. Raises ValueError for what is no such text."""
    text = x.attributes.get("replica_groups", "").strip()
    if text in ("", "{}"):
        return (tuple(range(devices)),)
    found = _written(x)
    if sorted(n for group in found for n in group) != list(range(devices)):
        raise ValueError(f"groups of devices {text!r}, of {devices}")
    return found


def group_size(x: Instruction) -> int:
    """Return over how many devices a collective goes; 1 where its text does not say."""
    return len(next(iter(_written(x)), (0,)))


def source_of(x: Instruction, devices: int) -> tuple[int, ...]:
    """Return from which device each takes what a permutation sends, -1 from none. Raises ValueError."""
    pairs = [tuple(map(int, pair.split(","))) for pair in LISTED.findall(x.attributes.get("source_target_pairs", ""))]
    if not pairs or any(len(pair) != 2 or max(pair) >= devices for pair in pairs):
        raise ValueError(f"pairs of devices {x.attributes.get('source_target_pairs', '')!r}, of {devices}")
    sources = {target: source for source, target in pairs}
    return tuple(sources.get(n, -1) for n in range(devices))


def _written(x: Instruction) -> Groups:
    """Return the groups that the text names; none where it names none, or in no way that is known."""
    text = x.attributes.get("replica_groups", "").strip()
    return _listed(text) or _iota(text) or _over_axes(f"{text} {x.attributes.get('device_ids', '')}".strip())


def _listed(text: str) -> Groups:
    whole = re.fullmatch(r"\{(\{[\d,]+\},?)+\}", text)
    return tuple(tuple(map(int, group.split(","))) for group in LISTED.findall(text)) if whole else ()


def _iota(text: str) -> Groups:
    if (found := IOTA.fullmatch(text)) is None:
        return ()
    return _in_groups(_turned(found[2], found[3]), _numbers(found[1])[-1])


def _over_axes(text: str) -> Groups:
    if (found := MESH.fullmatch(text)) is None or not (axes := AXIS.findall(found[1])):
        return ()
    names, sizes = zip(*axes, strict=True)
    over, whole = [name.strip(" '") for name in found[4].split(",")], tuple(map(int, sizes))
    ids = np.arange(math.prod(whole)) if found[2] is None else _turned(found[2], found[3])
    if not set(over) <= set(names) or ids.size != math.prod(whole):
        return ()
    last = [names.index(n) for n in over]
    others = [i for i in range(len(names)) if i not in last]
    return _in_groups(ids.reshape(whole).transpose(others + last), math.prod(whole[i] for i in last))


def _turned(shape: str, axes: str | None) -> Any:
    """Return the numbers of devices in a shape, its axes in another order."""
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids if axes is None else ids.transpose(_numbers(axes))


def _in_groups(ids: Any, size: int) -> Groups:
    return tuple(tuple(map(int, group)) for group in ids.reshape(-1, size))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
