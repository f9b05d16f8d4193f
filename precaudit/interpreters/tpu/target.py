"""Which TPU is compiled for, what its compiler refuses, and programs compiled for it ahead of time by libtpu."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from precaudit.errors import UserError, close
from precaudit.interpreters.tpu.environment import allow_libtpu
from precaudit.schema.policies import Policy, check_kernel

EXTRA = "pip install 'precaudit[tpu]'"
# The smallest topology of each generation that libtpu describes.
TOPOLOGIES = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
TESTED = ("0.0.42.1",)  # of libtpu: what the tables and the reading of its programs were made with
# Presets of products that libtpu refuses to compile for each of these; tests/interpreters/tpu/test_targets.py measures
# them again.
REFUSED = frozenset(
    (
        "BF16_BF16_F32_X9",
        "F16_F16_F32",
        "F16_F16_F16",
        "BF16_BF16_BF16",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "F32_F32_F32",
    )
)


@dataclass(frozen=True)
class Target:
    """A generation of TPU and the topology of chips a program is compiled for; one chip unless it is sharded."""

    generation: str
    topology: str

    @property
    def name(self) -> str:
        """As it is written: ``v5e:2x2``."""
        return f"{self.generation}:{self.topology}"


@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for a target: its optimised text, seconds it took, bytes on the chip, and flops.

    ``aliased``: bytes of outputs that take the place of donated arguments. ``flops``: as the compiler counts them, of
    one pass whatever the precision. ``jaxpr``: what was lowered (a closed jaxpr). ``given``, ``made``: how arguments
    and results are cut over its chips, flat.
    """

    target: Target
    libtpu: str
    text: str
    seconds: float
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    flops: float
    jaxpr: Any = field(repr=False, compare=False)
    given: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    made: tuple[Any, ...] = field(default=(), repr=False, compare=False)


class TooLarge(UserError):
    """A program that does not fit a chip's memory: an answer, not a failure of ours."""


def parse_target(text: str, option: str = "--tpu ") -> Target:
    """Return the target written ``v5e`` or ``v5e:2x2``; raises UserError for what is none, given by ``option``."""
    generation, _, topology = text.partition(":")
    if generation not in TOPOLOGIES:
        raise UserError(f"{option}{text}: unknown TPU; known: {', '.join(TOPOLOGIES)}{close(generation, TOPOLOGIES)}")
    if topology and not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        raise UserError(f"{option}{text}: a topology is written {TOPOLOGIES[generation]}, chips along each axis")
    return Target(generation, topology or TOPOLOGIES[generation])


def libtpu_version() -> str | None:
    """Return the version of libtpu; None where it is not installed."""
    try:
        return metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return None


def untested_version(version: str) -> str | None:
    """Return what to say of a libtpu that nothing here was measured with."""
    if version in TESTED:
        return None
    return f"libtpu {version} was not tried: what is known of its programs is of {', '.join(TESTED)}"


def check_policy(policy: Policy, target: Target) -> None:
    """Raise UserError for a policy whose products the target's compiler refuses."""
    check_kernel(policy, "tpu")
    if policy.matmul in REFUSED:
        raise UserError(
            f"policy {policy.name}: matmul = {policy.matmul} does not compile for {target.generation} (libtpu "
            f"{TESTED[-1]}); use default, high or highest"
        )


def compile_for(
    target: Target,
    function: Callable[..., Any],
    arguments: object,
    donated: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
    out: object = None,
) -> CompiledProgram:
    """Compile ``function(*arguments)`` for one chip of a target; arrays or shapes with formats are given.

    For several chips every argument is a ``jax.ShapeDtypeStruct`` with a sharding over their ``mesh``; where that is
    set (``jax.set_mesh``), one without a sharding lies as the compiler likes. ``out``: how its results are cut, where
    that is not the compiler's choice. Every argument stays one, used or not. Raises UserError without libtpu or for a
    topology it does not know, TooLarge where the chip's memory does not hold the program, and what tracing raises.
    """
    version = libtpu_version()
    if version is None:
        raise UserError(f"compiling for a TPU needs libtpu: {EXTRA}")
    allow_libtpu()
    import jax

    from precaudit.interpreters.tpu.texts import hlo_text

    one = jax.sharding.NamedSharding(mesh(target, {"x": 1}), jax.sharding.PartitionSpec())
    unsaid = one if jax.sharding.get_mesh().empty else None

    def place(x: Any) -> Any:
        own = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own or unsaid)

    shaped = jax.tree.map(place, arguments)
    how: dict[str, Any] = {} if out is None else {"out_shardings": out}
    how |= {"donate_argnums": donated, "compiler_options": dict(options or {}) or None}
    jitted = jax.jit(function, keep_unused=True, **how)
    traced = jitted.trace(*shaped)
    lowered = traced.lower(lowering_platforms=("tpu",))
    started = time.perf_counter()
    with _without_cache():
        try:
            made = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise _refusal(str(error), target) from None
    seconds = time.perf_counter() - started
    memory, cost = made.memory_analysis(), made.cost_analysis() or {}
    return CompiledProgram(
        target,
        version,
        hlo_text(made),
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        float(cost.get("flops", 0.0)),
        traced.jaxpr,
        tuple(jax.tree.leaves(made.input_shardings[0])),
        tuple(jax.tree.leaves(made.output_shardings)),
    )


def mesh(target: Target, axes: Mapping[str, int], types: tuple[Any, ...] | None = None) -> Any:
    """Return a mesh of the target's first chips, as many along each axis. Raises UserError as ``compile_for`` does.

    ``types``: of its axes, automatic ones unless said.
    """
    if libtpu_version() is None:
        raise UserError(f"compiling for a TPU needs libtpu: {EXTRA}")
    allow_libtpu()
    import jax
    import numpy as np

    chips = _chips(target)
    sizes = tuple(axes.values())
    if (needed := math.prod(sizes)) > len(chips):
        raise UserError(f"{target.name} has {len(chips)} chips, not {needed}")
    return jax.sharding.Mesh(np.array(chips[:needed]).reshape(sizes), tuple(axes), axis_types=types)


def check_topology(target: Target) -> None:
    """Raise UserError where libtpu, which is there, knows no such chips."""
    allow_libtpu()
    _chips(target)


@cache
def _chips(target: Target) -> tuple[Any, ...]:
    """Return the target's chips; those of another description of it would be others to JAX."""
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices)
    except Exception as error:  # libtpu raises errors of several kinds here
        raise UserError(f"{target.name}: libtpu has no such topology ({str(error).splitlines()[0]})") from None


@contextmanager
def _without_cache() -> Iterator[None]:
    """Keep JAX's cache of compiled programs out: it would load one for a device, and there is none."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _refusal(text: str, target: Target) -> UserError:
    """Return what a compiler's refusal says to a user."""
    if "RESOURCE_EXHAUSTED" not in text:
        first = next((line for line in text.splitlines() if line.strip()), "no reason given")
        return UserError(f"{target.name}: the compiler refuses the program: {first}")
    size = "it does not fit the chip's memory"
    if needed := re.search(r"required for (.*?) \(([\d.]+\w)\) exceeds available (\w+) \(([\d.]+\w)\)", text):
        size = f"{needed[1]} take {needed[2]}iB of the chip's {needed[4]}iB of {needed[3]}"
    elif used := re.search(r"Used ([\d.]+\w) of ([\d.]+\w) (\w+)", text):
        size = f"it takes {used[1]}iB of the chip's {used[2]}iB of {used[3]}"
    largest = re.findall(r"Size: ([\d.]+\w+)\n.*?(?:Operator: op_name=\"([^\"]*)\"|Shape: (\S+))", text, re.DOTALL)
    told = "; largest: " + ", ".join(f"{n} {op or shape}" for n, op, shape in largest[:3]) if largest else ""
    return TooLarge(f"{target.name}: too large: {size}{told}. Shard it over chips, or give fewer tokens")
