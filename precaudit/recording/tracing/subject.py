"""The Program that ships: the JAX decoder over a checkpoint under a policy."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from precaudit.errors import UserError
from precaudit.interpreters.tpu.target import Target, check_policy
from precaudit.interpreters.tpu.target import mesh as target_mesh
from precaudit.mirrors import takes_urls
from precaudit.models.checkpoints import Checkpoint, open_checkpoint, recorded_source
from precaudit.models.checkpoints.tensors import read_rows
from precaudit.models.configs import DecoderConfig, with_window
from precaudit.models.jax_decoder import Decoder, Parts
from precaudit.models.jax_decoder.arithmetic import Arithmetic, check_device
from precaudit.models.jax_decoder.family import family_parts as family_parts
from precaudit.models.jax_decoder.kernels import check_config
from precaudit.models.jax_decoder.parameters import parameters, rope_tables
from precaudit.models.jax_decoder.parts import check_parts
from precaudit.models.jax_decoder.sharding import Layout, check_mesh
from precaudit.numbers.arrays import Array
from precaudit.numbers.formats import FORMATS
from precaudit.recording.programs.served import ServedModel
from precaudit.recording.runs.hosts import hosts_here
from precaudit.recording.runs.reader import Run
from precaudit.recording.tracing.devices import every_device, platform_of
from precaudit.recording.tracing.predicting import EmulatedTarget, target_of
from precaudit.schema.lengths import telling
from precaudit.schema.meshes import ONE, MeshShape, parse_mesh
from precaudit.schema.policies import Policy, apply_settings, check_settings, declared_policy, load_policy

TABLES = 8  # of RoPE, kept on the device


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Subject(ServedModel):
    """A model under a policy on a device: a Program whose entry points are prefill, decode and rescore.

    ``policy``: what it computes in, and not only announces.

    ``remat``, ``raised``: the decoder's (``raised``: layers and their policy).
    ``lift``: FP64 meanings, by name, of primitives and kernels that have none of their own. ``predicted``: a TPU
    that is not here, whose compiled programs run on ``device``, a CPU. ``mesh``: how many devices it is cut over;
    ``layout``: where its arrays lie on those that are here.
    """

    policy: Policy = field()
    checkpoint: Checkpoint
    parts: Parts
    device: Any
    remat: bool = False
    raised: tuple[tuple[int, ...], Policy] | None = None
    lift: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    predicted: Target | None = None
    mesh: MeshShape = ONE
    layout: Layout | None = None
    _tables: dict[tuple[int, bytes | None], Any] = field(default_factory=dict)

    @property
    def config(self) -> DecoderConfig:
        """Sizes and constants."""
        return self.checkpoint.config

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu: of the target, where that is predicted."""
        return platform_of(self.device) if self.predicted is None else "tpu"

    @cached_property
    def decoder(self) -> Decoder:
        """The pure functions prefill, decode and init_cache."""
        raised = None if self.raised is None else (self.raised[0], Arithmetic.of(self.raised[1]))
        unroll = self.config.layers if self.policy.layers == "unrolled" else 1
        config = with_window(self.config, self.policy)
        return Decoder(config, Arithmetic.of(self.policy), self.parts, unroll, self.remat, raised)

    @cached_property
    def parameters(self) -> Any:
        """The parameters on the device."""
        activations = FORMATS[self.policy.activations].dtype
        tensors = self.checkpoint
        read, integers = partial(read_rows, tensors.tensors), tensors.integers
        place = self.layout.parameter if self.layout is not None else self._on_device
        return parameters(self.config, read, integers, activations, place, self.policy.fused)

    def _on_device(self, *_: Any) -> Any:
        return self.device

    def put_cache(self, cache: Any) -> Any:
        """Return a cache on the device, or cut over the mesh: committed, since jit else compiles once more."""
        import jax

        return jax.device_put(cache, self.device) if self.layout is None else self.layout.put(cache, self.layout.cache)

    def put_by_prompt(self, x: Any) -> Any:
        """Return what has a row for every prompt, as ``put_cache`` does."""
        import jax

        return jax.device_put(x, self.device) if self.layout is None else self.layout.put(x, self.layout.by_prompt)

    def under(self, policy: Policy, raised: tuple[tuple[int, ...], Policy] | None = None) -> "Subject":
        """Return the program under another policy, or layers of it; parameters of one format are the same arrays."""
        other = replace(self, policy=policy, raised=raised, _tables={})
        if (policy.activations, policy.fused) == (self.policy.activations, self.policy.fused):
            vars(other)["parameters"] = self.parameters
        return other

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers)."""
        return self.checkpoint.make_tokenizer()

    def tables(self, positions: int, lengths: Array | None = None) -> Any:
        """RoPE's cos and sin for the first ``positions`` positions, on the device: lists as ``rope_tables`` gives.

        ``lengths`` [B, positions]: how long each sequence was when a row of it was turned (schema/lengths.py).
        """
        import jax

        lengths = telling(self.config, lengths)
        key = (positions, None if lengths is None else lengths.tobytes())
        if key not in self._tables:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            tables = rope_tables(self.config, positions, self.policy, lengths)
            layout = self.layout
            self._tables[key] = (
                jax.device_put(tables, self.device) if layout is None else layout.put(tables, layout.tables(tables))
            )
        return self._tables[key]


def program_of(
    run: Run, device: str = "cpu", model: str | None = None, mesh: MeshShape | None = None
) -> Subject | None:
    """Return the program a run was made with, on a device: the shipped decoder; None where it was another.

    ``model``: where its weights lie now; ``mesh``: None is one device. Raises UserError where the device is not
    there, or other weights are.
    """
    record = run.record
    if record.program != "shipped":
        return None
    policy = declared_policy(record)
    where = model or recorded_source(record.model.reference)
    subject = load(where, policy, None, device, allow=record.model.allowed, mesh=mesh)
    if subject.checkpoint.hashes.sha256() != record.model.sha256:
        raise UserError(f"{subject.reference}: the weights are not those of this run; give the right ones with --model")
    return subject


@takes_urls
def load(
    subject: str,
    policy: str | Policy = "bf16",
    settings: dict[str, str] | None = None,
    device: str = "auto",
    parts: Parts | None = None,
    allow: Collection[str] = (),
    mesh: str | MeshShape | None = None,
) -> Subject:
    """Open ``tiny``, ``smollm2``, a Hugging Face folder or a GGUF file under a policy, on a device.

    ``settings`` replaces single policy keys; ``parts`` replaces operations of the decoder; ``allow``: unknown fields of
    config.json to pass over; ``mesh``: how many devices it is cut over, ``data=2,model=4``. Raises UserError.
    """
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh or ONE
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    chosen = apply_settings(chosen, settings or {})
    check_settings(chosen)
    checkpoint = open_checkpoint(subject, allow).under(chosen).with_factor(chosen.embed_factor)
    if not checkpoint.rounds_factor:
        chosen = replace(chosen, embed_factor="exact")
    target = target_of(device)
    devices = every_device(device if target is None else "cpu")
    found = devices[0]
    check_mesh(shape, checkpoint.config)
    if shape.devices > 1 and isinstance(target, EmulatedTarget):
        raise UserError(f"--device {device} emulates the products of one chip: leave --mesh out, or use tpu-predicted")
    if target is None:
        check_device(chosen, platform_of(found))
    else:
        check_policy(chosen, target)
        if shape.devices > 1:
            target_mesh(target, shape.axes)
    check_config(chosen, with_window(checkpoint.config, chosen))
    made = parts or family_parts(checkpoint.config)
    check_parts(chosen, made)
    here = shape.devices > 1 and target is None
    if (several := hosts_here().count) > 1 and not here:
        raise UserError(f"{several} processes run a model cut over all their devices: give --mesh data=N,model=N")
    layout = Layout.of(shape, checkpoint.config, devices) if here else None
    return Subject(
        policy=chosen,
        reference=subject,
        checkpoint=checkpoint,
        parts=made,
        device=found,
        predicted=target,
        mesh=shape,
        layout=layout,
    )
