"""The default limits, from what honest programs leave: limits.toml beside this file."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Local:
    """Limits on what the best emulation leaves of a local error, in units of honest noise."""

    tensor: float
    token: float
    head: float
    channel: float
    gain: float
    mean: float
    head_gain: float
    head_mean: float
    componentwise: float


@dataclass(frozen=True)
class Limits:
    """``narrow``: results below float32; ``ratio``, ``kl``: forward error and logits over pooled emulated noise."""

    narrow: Local
    float32: Local
    ratio: float
    kl: float

    def local(self, dtype: str | None) -> Local:
        """Return the limits of a result's format."""
        return self.float32 if dtype in ("float32", "float64") else self.narrow

    def with_excess(self, scope: str, limit: float) -> "Limits":
        """Return the limits with another one on excess at a scope."""
        changed: dict[str, float] = {scope: limit}
        return replace(self, narrow=replace(self.narrow, **changed), float32=replace(self.float32, **changed))


@cache
def default_limits() -> Limits:
    """Return the limits the package ships."""
    table = tomllib.loads((resources.files("precaudit.judging") / "limits.toml").read_text())
    return Limits(Local(**table["narrow"]), Local(**table["float32"]), **table["forward"])
