"""The default limits, from what honest programs leave: limits.toml beside this file."""

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import sqrt
from statistics import NormalDist

from precaudit.schema.toml import toml_table

LIMITS = "limits.toml"
RATE = 1e-6  # of false alarms a record that the growth of a limit with n is made for


@dataclass(frozen=True)
class Limit:
    """The largest of ``n`` slices may be ``value``; ``n`` None: of any number. ``power``: 2 for squares."""

    value: float
    n: int | None = None
    power: int = 1

    def at(self, n: int) -> float:
        """Return the limit on the largest of ``n``: as quantiles of the largest of n normal variates grow.

        value · z(n) / z(n₀) above n₀, with z(n) = Φ⁻¹(1 − RATE/2n) (the union bound); below n₀ it stays.
        """
        if self.n is None or n <= self.n:
            return self.value
        return self.value * (quantile(n) / quantile(self.n)) ** self.power


@cache
def quantile(n: int) -> float:
    """Return what |z| of n standard normal variates goes past with probability RATE at most."""
    return -NormalDist().inv_cdf(RATE / (2 * n))


@dataclass(frozen=True)
class Median:
    """The median of n prompts may be ``least`` + ``room`` / √n."""

    least: float
    room: float

    def at(self, n: int) -> float:
        """Return the limit on the median of n prompts."""
        return self.least + self.room / sqrt(n)


@dataclass(frozen=True)
class Local:
    """Limits on what the best emulation leaves of a local error, in units of honest noise."""

    tensor: Limit
    token: Limit
    head: Limit
    channel: Limit
    gain: Limit
    mean: Limit
    head_gain: Limit
    head_mean: Limit
    componentwise: Limit

    @classmethod
    def of(cls, table: dict[str, list[float]]) -> "Local":
        """Return the limits of a table of [value, n]."""
        return cls(**{name: Limit(float(v), int(n)) for name, (v, n) in table.items()})


@dataclass(frozen=True)
class Limits:
    """``narrow``, ``float32``: on local error.

    The others are on forward error over pooled emulated noise: ``ratio`` of the tensor, ``token``, ``head``, ``kl``
    of a row of logits; ``pooled``, ``pooled_gain``: of the medians of ratios, and of gains over their noise,
    ``float32_ratio``, ``float32_gain``: of results in float32; ``pair_ratio``: of what two runs differ by over what
    both roundings make; ``sums``, ``token_sums``: of sums of rows over what rounding leaves of them, their root mean
    square and the largest.
    """

    narrow: Local
    float32: Local
    ratio: Limit
    token: Limit
    head: Limit
    kl: Limit
    pooled: Median
    pooled_gain: Median
    float32_ratio: Median
    float32_gain: Median
    pair_ratio: Median
    sums: Median
    token_sums: Limit

    def local(self, dtype: str | None) -> Local:
        """Return the limits of a result's format."""
        return self.float32 if dtype in ("float32", "float64") else self.narrow

    def with_excess(self, scope: str, limit: float) -> "Limits":
        """Return the limits with another one on excess at a scope."""
        changed: dict[str, Limit] = {scope: Limit(limit)}
        return replace(self, narrow=replace(self.narrow, **changed), float32=replace(self.float32, **changed))


@cache
def default_limits() -> Limits:
    """Return the limits the package ships."""
    table = toml_table((resources.files("precaudit.schema.limits") / LIMITS).read_bytes(), LIMITS)
    forward = {name: Limit(float(v), int(n), 1 + (name == "kl")) for name, (v, n) in table["forward"].items()}
    medians = {name: Median(*map(float, table["pooled"][name])) for name in table["pooled"]}
    return Limits(
        Local.of(table["narrow"]),
        Local.of(table["float32"]),
        pooled=medians["ratio"],
        pooled_gain=medians["gain"],
        float32_ratio=medians["float32_ratio"],
        float32_gain=medians["float32_gain"],
        pair_ratio=medians["pair_ratio"],
        sums=Median(*map(float, table["sums"]["rms"])),
        token_sums=Limit(float(table["sums"]["token"][0]), int(table["sums"]["token"][1])),
        **forward,
    )
