"""Arrays cut over chips that are not here, and joined again, on a CPU that runs what these would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from precaudit.errors import UserError


@dataclass(frozen=True)
class ChipProgram:
    """A partitioned program, of [chips, …] of every argument, called with whole arrays.

    ``given``, ``made``: how arguments and results are cut, flat. What was cut is kept as long as the array is the same.
    ``host``: devices of this host, on which results then lie as on the chips; None: they are joined.
    """

    program: Callable[..., Any]
    chips: int
    given: Sequence[Any]
    made: Sequence[Any]
    host: Mesh | None = None
    _kept: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Run it; returns results."""
        found = self.program(*map(self._cut, range(len(leaves)), leaves))
        each = found if isinstance(found, tuple) else (found,)
        if self.host is None:
            return tuple(join_parts(x, how) for x, how in zip(each, self.made, strict=True))
        return tuple(parts_on_host(x, how, self.host) for x, how in zip(each, self.made, strict=True))

    def _cut(self, i: int, x: object) -> Any:
        kept = self._kept.get(i)
        if kept is None or kept[0] is not x:
            self._kept[i] = kept = (x, cut_parts(x, self.given[i]))
        return kept[1]


def cut_parts(x: Any, how: Any) -> Any:
    """Return what each chip has of an array [chips, …]; of one that lies so already, what each device has."""
    wanted = _indices(how, np.shape(x))
    if len(wanted) > 1 and isinstance(x, jax.Array) and _indices(x.sharding, x.shape) == wanted:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        parts = [np.asarray(shards[device]) for device in x.sharding.devices_indices_map(x.shape)]
    else:
        whole = np.asarray(x)
        parts = [whole[index] for index in wanted]
    return jnp.asarray(np.stack(parts))


def parts_on_host(parts: object, how: Any, host: Mesh) -> jax.Array:
    """Return an array of what each chip has of it [chips, …], each part on a device of this host."""
    held = np.asarray(parts)
    shape = _whole_shape(how, held.shape[1:])
    each = [jax.device_put(part, device) for part, device in zip(held, host.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(host, how.spec), each)


def join_parts(parts: object, how: object) -> jax.Array:
    """Return the array of what each chip has of it [chips, …]; raises UserError where two have one part otherwise."""
    held = np.asarray(parts)
    shape = _whole_shape(how, held.shape[1:])
    out, seen = np.empty(shape, held.dtype), set[Any]()
    for part, index in zip(held, _indices(how, shape), strict=True):
        key = str(index)
        if key in seen and not np.array_equal(out[index].view(np.uint8), part.view(np.uint8)):
            raise UserError("chips that should hold the same part of a result hold others")
        seen.add(key)
        out[index] = part
    return jnp.asarray(out)


def _whole_shape(how: Any, part: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array of which a chip holds a part."""
    probe = [n * how.num_devices for n in part]  # every number of parts divides it
    held = how.shard_shape(tuple(probe))
    return tuple(n * (whole // own) for n, whole, own in zip(part, probe, held, strict=True))


def _indices(how: Any, shape: Sequence[int]) -> list[Any]:
    """Return each chip's part of an array, in the order of the chips' numbers."""
    return list(how.devices_indices_map(tuple(shape)).values())
