"""Bisection by the keys of two policies, and by the layers that compute in float32 (JAX)."""

from dataclasses import dataclass, field
from pathlib import Path

from precaudit.diagnosis.bisection.ddmin import Changes
from precaudit.diagnosis.bisection.measuring import Measuring
from precaudit.diagnosis.bisection.tasks import Figures, Kind
from precaudit.diagnosis.evidence.remedies import candidates
from precaudit.errors import UserError
from precaudit.numbers.formats import FORMATS
from precaudit.recording.tracing.subject import Subject, load
from precaudit.schema.policies import Policy, apply_settings

BETWEEN = {"residual stream": "residual", "KV cache": "kv_cache"}  # what layers hand on, and its policy key
HEAD = "final norm and logits"


def differing_keys(good: Policy, bad: Policy) -> Changes:
    """Return the keys in which two policies differ; raises UserError where they do not."""
    there = bad.settings()
    found = tuple(key for key, x in good.settings().items() if x != there[key])
    if not found:
        raise UserError(f"policies {good.name} and {bad.name} are the same: nothing to bisect")
    return found


def mixed_policy(good: Policy, bad: Policy, changes: Changes) -> Policy:
    """Return policy A with some keys as B has them; raises UserError for keys that do not go together."""
    return apply_settings(good, {key: getattr(bad, key) for key in changes})


@dataclass
class PolicyTrials:
    """Trials of one subject under policies between two."""

    subject: str
    good: Policy
    bad: Policy
    device: str
    allow: tuple[str, ...]
    how: Measuring

    @property
    def changes(self) -> Changes:
        """The keys in which the two differ."""
        return differing_keys(self.good, self.bad)

    @property
    def kind(self) -> Kind:
        """Several trials are made in processes."""
        return "processes"

    def measure(self, changes: Changes, folder: Path) -> Figures:
        """Return the figures of A with these keys of B."""
        policy = mixed_policy(self.good, self.bad, changes)
        return self.how.measure(load(self.subject, policy, device=self.device, allow=self.allow), folder)

    def settings(self, changes: Changes) -> str:
        """Return the policy of a trial as the text of a TOML file."""
        keys = mixed_policy(self.good, self.bad, changes).settings().items()
        return "".join(f'{key} = "{x}"\n' for key, x in keys)


@dataclass
class LayerTrials:
    """Trials of one subject, of which some layers, or parts outside them, are in float32: a change takes one back."""

    subject: Subject
    how: Measuring
    wide: Policy = field(init=False)

    def __post_init__(self) -> None:
        """Find what float32 in all parts of a layer is; raises UserError where the policy has it already."""
        found = dict(candidates(self.subject.policy, self.subject.config, self.subject.platform))
        if "all" not in found:
            raise UserError(f"policy {self.subject.policy.name} computes its layers in float32: nothing to raise")
        self.wide = apply_settings(self.subject.policy, found["all"])

    @property
    def changes(self) -> Changes:
        """What lies between layers and is narrow, the layers by number, and what comes after them."""
        between = (name for name, key in BETWEEN.items() if not is_single(getattr(self.subject.policy, key)))
        return *between, *(f"layer {i}" for i in range(self.subject.config.layers)), HEAD

    @property
    def kind(self) -> None:
        """The subject is in this process: trials are made one after another."""
        return None

    def measure(self, changes: Changes, folder: Path) -> Figures:
        """Return the figures of the subject with everything in float32 but these."""
        raised, layers = [name for name in self.changes if name not in changes], self.subject.config.layers
        at = tuple(i for i in range(layers) if f"layer {i}" in raised) + ((layers,) if HEAD in raised else ())
        policy = apply_settings(self.subject.policy, {BETWEEN[name]: "float32" for name in raised if name in BETWEEN})
        return self.how.measure(self.subject.under(policy, (at, self.wide) if at else None), folder)


def is_single(name: str) -> bool:
    """Whether a format keeps as much as float32; integers do not."""
    return name in FORMATS and FORMATS[name].unit_roundoff <= FORMATS["float32"].unit_roundoff
