"""A program as a TPU that is not here would run it: compiled for it, the compiled text run on a CPU as it rounds.

Taps may change what the compiler does. So a run keeps the counts of products without taps and with them, the points
whose precision differs (``unknown``, kind neutrality), and by how much outputs change where bfloat16 results inside
fusions are not rounded. docs/tpu.md says what this rests on.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precaudit.errors import UserError
from precaudit.interpreters.jaxpr.keys import key_bits, wrap_key
from precaudit.interpreters.tpu.calls import Rule
from precaudit.interpreters.tpu.emulated import emulate_passes
from precaudit.interpreters.tpu.execute import function, rounds_inside
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.hlo import Module
from precaudit.interpreters.tpu.kernels import kernel_names, kernel_rule
from precaudit.interpreters.tpu.scanner import HloError
from precaudit.interpreters.tpu.sharded import compile_for_chips, mesh_of_host, on_no_mesh
from precaudit.interpreters.tpu.target import (
    EXTRA,
    TESTED,
    CompiledProgram,
    Target,
    check_topology,
    compile_for,
    libtpu_version,
    mesh,
    parse_target,
)
from precaudit.interpreters.tpu.texts import hlo_text
from precaudit.interpreters.tpu.units import count_products, other_precisions, products_of
from precaudit.numbers.arrays import to_single
from precaudit.recording.tracing.cutting import ChipProgram
from precaudit.schema.metrics.sizes import norm, ratio
from precaudit.schema.records.base import json_number
from precaudit.schema.records.devices import FROM_JAXPR, device_kind
from precaudit.schema.records.runs import Prediction, Products

PREFIX = "tpu-predicted"
COARSER = "tpu-emulated"
MISSED = "which unit multiplies, what the compiler stores as bfloat16 and which roundings it leaves out"
DEFAULT = "v5e"
RECORDED_ON_TPUS = 0  # files of numbers from real TPUs that predictions were compared with


@dataclass(frozen=True)
class CompilerOutput:
    """A program compiled for a target: its text, the function that runs it on a CPU, and its outputs' shapes, a tree.

    ``custom``: rules of its custom calls; ``kernels``: Pallas kernels that run in interpret mode, by name. ``host``:
    devices of this host on which arguments and results lie as on the target's chips.
    """

    module: Module
    run: Callable[..., Any]
    outputs: Any
    custom: Mapping[str, Rule] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    compiled: CompiledProgram | None = None
    host: Mesh | None = None

    @classmethod
    def of(cls, made: CompiledProgram, outputs: object, chips: int, host: Mesh | None = None) -> "CompilerOutput":
        """Return what a compiler made, for so many chips."""
        module = parse_module(made.text)
        custom = kernel_rule(module, made.jaxpr)
        one = cls(module, _nothing, outputs, custom, kernel_names(module, made.jaxpr), made, host)
        return replace(one, run=one.running(chips))

    def running(self, chips: int, rounded_inside: bool = True) -> Callable[..., Any]:
        """Return what runs it on a CPU, called with whole arrays."""
        once = function(self.module, self.custom, rounded_inside, chips)
        return (
            once
            if chips == 1 or self.compiled is None
            else ChipProgram(once, chips, self.compiled.given, self.compiled.made, self.host)
        )

    @property
    def chips(self) -> int:
        """How many chips it is partitioned for."""
        return self.run.chips if isinstance(self.run, ChipProgram) else 1

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run it on flat arguments; its text has PRNG keys as their bits."""
        bits = list(map(key_bits, leaves))
        with on_no_mesh():
            found = self.run(*bits)
        likes, tree = jax.tree.flatten(self.outputs)
        made = found if isinstance(found, tuple) else (found,)
        return jax.tree.unflatten(tree, [wrap_key(x, like) for x, like in zip(made, likes, strict=True)])

    @cached_property
    def wide_inside(self) -> "CompilerOutput":
        """The same with bfloat16 results inside fusions left unrounded."""
        return replace(self, run=self.running(self.chips, rounded_inside=False))


def _nothing(*_: Any) -> Any:
    raise AssertionError("a program that nothing runs")


@dataclass(frozen=True)
class ChipLayout:
    """A mesh of chips: its axes, how a program's arguments are cut over them, and its results (None: as it likes)."""

    axes: Mapping[str, int]
    given: Callable[..., Any]
    made: Any = None

    @property
    def chips(self) -> int:
        """How many there are."""
        return prod(self.axes.values())

    def place(self, target: Target, shaped: Any) -> tuple[Any, Any]:
        """Return shapes of arguments that lie on the target's chips, and where the results lie."""
        chips = mesh(target, self.axes)
        where = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(chips, spec)),
            shaped,
            self.given(*shaped),
        )
        specs = self.made
        named = jax.tree.map(partial(NamedSharding, chips), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return where, None if specs is None else named


def place_on_host(x: object) -> NamedSharding | None:
    """Return where an array lies on several devices of this host; None of what lies on one."""
    where = getattr(x, "sharding", None)
    return where if isinstance(where, NamedSharding) and where.mesh.size > 1 else None


@dataclass
class PredictedProgram:
    """A program, called as ``jax.jit``'s; compiled for the target once for every shape of its arguments.

    ``cut``: of several chips, what gives how arguments and results are cut over them; without it the shardings of
    arguments, and what the program says, do.
    """

    target: Target
    program: Callable[..., Any]
    donated: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: ChipLayout | None = None
    _made: dict[Any, CompilerOutput] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """Run it; raises UserError where the target's compiler refuses it, or what it made cannot be followed."""
        return self.made(*args)(jax.tree.leaves(args))

    def made(self, *args: Any) -> CompilerOutput:
        """Return what is made of it for arguments of these shapes; raises UserError as calling it does."""
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((np.shape(x), jax.numpy.result_type(x), place_on_host(x)) for x in leaves)
        if (tree, shapes) not in self._made:
            shaped = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype, where in shapes]
            self._made[tree, shapes] = self._compile(jax.tree.unflatten(tree, shaped))
        return self._made[tree, shapes]

    def _compile(self, shaped: Any) -> CompilerOutput:
        """Return what is made of it for arguments that are described."""
        outputs = jax.eval_shape(self.program, *shaped)
        if self.cut is not None:
            placed, out = self.cut.place(self.target, shaped)
            made = compile_for(self.target, self.program, placed, self.donated, self.options, out)
            return CompilerOutput.of(made, outputs, self.cut.chips)
        if jax.device_count() > 1:
            host = mesh_of_host(jax.make_jaxpr(self.program)(*shaped), shaped)
            if host is not None:
                made = compile_for_chips(self.target, self.program, shaped, host)
                return CompilerOutput.of(made, outputs, host.size, host)
        made = compile_for(self.target, self.program, shaped, self.donated, self.options)
        return CompilerOutput.of(made, outputs, 1)


def compare_predictions(captured: Any, given: Sequence[Any], bare: Any, bare_given: Sequence[Any]) -> Prediction | None:
    """Return what two predicted programs differ in, and what rounding inside fusions changes; None of others.

    ``captured``, ``bare``: the same program with taps and without; each with the arguments it was called with.
    """
    if not isinstance(captured, PredictedProgram) or not isinstance(bare, PredictedProgram):
        return None
    plain = bare.made(*bare_given)
    without, with_taps = products_of(plain.module), products_of(captured.made(*given).module)
    return Prediction(
        bare=Products(**count_products(without)),
        captured=Products(**count_products(with_taps)),
        moved=tuple(
            f"{place or 'a product'}: {' and '.join(sorted(a))} without taps, {' and '.join(sorted(b))} with them"
            for place, (a, b) in other_precisions(without, with_taps).items()
        ),
        kernels=plain.kernels,
        inside=json_number(fusion_rounding(plain, jax.tree.leaves(bare_given))),
    )


def compiler_output(program: Any, given: Sequence[Any], platform: str, several: bool = False) -> Module | None:
    """Return what a compiler made of a program; None where it cannot be read.

    Of one that is on one device of a CPU it is not asked for; ``several``: arguments lie on several devices.
    """
    if isinstance(program, PredictedProgram):
        return program.made(*given).module
    if not (several or platform in ("tpu", "gpu")) or not hasattr(program, "lower"):
        return None
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x)), tuple(given))
    try:
        return parse_module(hlo_text(program.lower(*(given if several else shaped)).compile()))
    except HloError:
        return None


def fusion_rounding(made: CompilerOutput, leaves: Sequence[Any]) -> float:
    """Return the largest ‖a − b‖ / ‖a‖ of an output, bfloat16 results inside fusions rounded (a) and not (b)."""
    if not rounds_inside(made.module):
        return 0.0
    pairs = zip(jax.tree.leaves(made(leaves)), jax.tree.leaves(made.wide_inside(leaves)), strict=True)
    floats = [(to_single(a), to_single(b)) for a, b in pairs if jax.numpy.issubdtype(a.dtype, jax.numpy.floating)]
    return max((ratio(norm(a - b), norm(a)) for a, b in floats), default=0.0)


@dataclass(frozen=True)
class EmulatedTarget(Target):
    """A target of which products alone are emulated, from the jaxpr: coarser, and without its compiler."""


def program_for(
    target: Target,
    program: Callable[..., Any],
    donated: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
    cut: ChipLayout | None = None,
) -> Callable[..., Any]:
    """Return a program as a target that is not here would run it: predicted, or emulated from its jaxpr."""
    if isinstance(target, EmulatedTarget):
        return jax.jit(emulate_passes(program), compiler_options={"xla_allow_excess_precision": False})
    return PredictedProgram(target, program, donated, options or {}, cut)


def target_of(device: str) -> Target | None:
    """Return the target of ``tpu-predicted:v5e`` or ``tpu-emulated:v5e``, None for devices that are there.

    Raises UserError for a target that is none, and for a prediction without libtpu or of chips that it does not know.
    """
    kind, _, name = device.partition(":")
    if kind not in (PREFIX, COARSER):
        return None
    target = parse_target(name or DEFAULT, f"--device {kind}:")
    if kind == COARSER:
        return EmulatedTarget(target.generation, target.topology)
    if libtpu_version() is None:
        raise UserError(
            f"--device {device} needs libtpu, which compiles for a TPU: {EXTRA}. Without it, --device "
            f"{COARSER}:{target.generation} emulates products from the jaxpr: coarser, it misses {MISSED}"
        )
    check_topology(target)
    return target


def program_target(device: str, strict: bool) -> Target | None:
    """Return the target that a program runs as, of which no compiler options are its own; raises UserError."""
    if (target := target_of(device)) is not None and strict:
        raise UserError(f"--strict is for JAX's own device, not for {device}")
    return target


def device_name(target: Target) -> str:
    """Return what a run made so says it was made on."""
    return f"TPU {target.name} {FROM_JAXPR if isinstance(target, EmulatedTarget) else '(predicted)'}"


def asked_device(name: str) -> str:
    """Return what ``--device`` takes for the device that a run says it was made on."""
    found = re.fullmatch(r"TPU (\S+) \(.*\)", name)
    return device_kind(name) if found is None else f"{COARSER if name.endswith(FROM_JAXPR) else PREFIX}:{found[1]}"


def assumptions(target: Target) -> tuple[str, ...]:
    """Return what a prediction rests on, for every report of it."""
    if isinstance(target, EmulatedTarget):
        return (
            f"emulated from the jaxpr, coarser than a prediction: products in the bfloat16 passes their precision asks "
            f"for on {target.name}, run on a CPU; it misses {MISSED}",
        )
    version = libtpu_version() or "?"
    tested = "" if version in TESTED else f", which was not tried (tried: {', '.join(TESTED)})"
    return (
        f"predicted: what libtpu {version}{tested} compiles for {target.name}, run on a CPU; bfloat16 results inside "
        f"fusions are taken as rounded; files from real TPUs it was compared with: {RECORDED_ON_TPUS}",
    )
