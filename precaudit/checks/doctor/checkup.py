"""Everything ``precaudit doctor`` tells, and what of it is broken."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precaudit.checks.doctor import caches, machine, packages


@dataclass(frozen=True)
class Checkup:
    """What is here. ``broken``: what must be mended, each with what to do; ``heard``: what JAX said of a device.

    ``lacking``: what is not supported here, in sentences; ``disk``: bytes free {folder: bytes}. ``sums``: which
    products JAX's default device sums in 16 bits.
    """

    broken: tuple[str, ...]
    versions: dict[str, str]
    devices: dict[str, int]
    heard: tuple[str, ...]
    caches: tuple[caches.CacheFolder, ...]
    disk: dict[str, int | None]
    memory: dict[str, int]
    extras: tuple[packages.Extra, ...]
    terminal: dict[str, str]
    completion: tuple[str, str]
    lacking: tuple[str, ...]
    sums: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 where something is broken."""
        return 1 if self.broken else 0


def examine() -> Checkup:
    """Look at this machine; raises nothing for what is broken."""
    from precaudit.recording.tracing.devices import visible_devices

    kinds, platforms, heard = visible_devices()
    here, kept = Path.cwd(), caches.folder("references").parent
    return Checkup(
        broken=tuple(_breakages(platforms, heard)),
        versions=packages.computing_versions(),
        devices=kinds,
        heard=tuple(heard),
        caches=caches.find_caches(),
        disk={str(kept): machine.free_bytes(kept), str(here): machine.free_bytes(here)},
        memory=machine.memory(),
        extras=packages.extras(),
        terminal=machine.terminal_features(),
        completion=machine.completion(),
        lacking=tuple(_lacking(platforms)),
        sums=_sums(platforms),
    )


def _breakages(platforms: list[str], heard: list[str]) -> Iterator[str]:
    """Yield what nothing works without, or what is kept nowhere."""
    for text in packages.missing_packages():
        yield f"needed and not here: {text}. Next: pip install --upgrade precaudit"
    if not platforms:
        why = heard[-1] if heard else "no device"
        yield f"JAX does not start: {why}. Next: unset JAX_PLATFORMS, or mend the plugin named"
    for kind in ("references", "programs"):
        if (refused := caches.unwritable(kind)) is not None:
            yield f"{caches.SAYS[kind]} cannot be kept: {refused}. Next: set PRECAUDIT_CACHE to a folder of yours"
            return


def _lacking(platforms: list[str]) -> Iterator[str]:
    """Yield what is not supported here."""
    from precaudit.models.checkpoints.opening import named_models
    from precaudit.schema.policies import PRECISIONS, PRESETS

    absent = [name for name in ("gpu", "tpu") if name not in platforms]
    if absent:
        yield f"No {' and no '.join(absent)} is seen: --device {' and '.join(absent)} are refused."
    for platform in dict.fromkeys(platforms):
        if refused := _refused_presets(platform):
            kept = [x for x in (*PRECISIONS, *PRESETS) if x not in refused]
            yield f"On {platform} matmul is {', '.join(kept)}: the other {len(refused)} dot presets are refused."
    yield "No run has been made on a TPU yet: how it multiplies is emulated from JAX's documentation."
    for name, (there, line) in named_models().items():
        if not there:
            yield f"The model {name} is not installed: {line}"
    yield "torch is not needed."


def _sums(platforms: list[str]) -> tuple[str, ...]:
    """Return which products of 16-bit floats are summed in 16 bits; that none is where all are summed in float32."""
    if not platforms:
        return ()
    from precaudit.checks.probing.narrow_sums import narrow_sums

    found = tuple(x.text(platforms[0]) for x in narrow_sums())
    return found or (f"bfloat16 and float16 products are summed in float32 on this {platforms[0]}",)


def _refused_presets(platform: str) -> list[str]:
    """Return the dot presets that a device would not honour."""
    from precaudit.errors import UserError
    from precaudit.models.jax_decoder.arithmetic import check_device
    from precaudit.schema.policies import PRESETS, Policy

    found = []
    for preset in PRESETS:
        try:
            check_device(Policy(matmul=preset), platform)
        except UserError:
            found.append(preset)
    return found
