"""What compiles for TPUs that are not here: every shipped policy on one chip, the decoder on four."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from precaudit.checks.lint.linting import PHASES, Lowering, apply_rules, arguments, count_by_unit, lint_model
from precaudit.checks.lint.rules import every
from precaudit.checks.lint.view import CallView
from precaudit.errors import UserError
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.target import Target, compile_for, mesh
from precaudit.models.jax_decoder.arithmetic import compiler_options
from precaudit.recording.tracing.programs import CACHE
from precaudit.recording.tracing.subject import load
from precaudit.schema.policies import load_policy, shipped_policies

CHIPS = 4
CUT = {"wq": 1, "wo": 2, "gate": 1, "up": 1, "down": 2}  # the axis of heads or of the MLP's width, of [L, out, in]
CUT_KV = {
    "wk": 1,
    "wv": 1,
    "k": 3,
    "v": 3,
}  # of key and value heads, where the chips divide them; caches [L, B, S, G, K]


def policies(model: str, targets: list[Target]) -> Iterator[tuple[str, str]]:
    """Yield (policy and target, what came of it): products of both phases by unit and passes, or why it is refused."""
    for policy in shipped_policies():
        for target in targets:
            try:
                views = lint_model(model, load_policy(policy), Lowering(target)).views
                told = "; ".join(f"{v.phase}: {_told(count_by_unit(v))}" for v in views)
            except UserError as error:
                told = f"refused: {error}"
            yield f"{policy:17} {target.name}", told


def _told(made: dict[str, int]) -> str:
    names = {"passes1": "1 pass", "passes3": "3 passes", "passes6": "6 passes", "vector": "vector unit"}
    return ", ".join(f"{made[key]} × {name}" for key, name in names.items() if made[key])


def collectives(model: str, policy: str, target: Target, tokens: int = 64) -> Iterator[tuple[str, str, int]]:
    """Yield (phase, what chips exchange and at which point, how many) of the decoder over four chips of a target."""
    for phase in PHASES:
        view = sharded(model, policy, target, phase, tokens)
        rules = [r for r in every() if r.id == "collectives"]
        counted = Counter[str]()
        for f in apply_rules([view], rules).findings:
            counted[f"{f.says} {f.point}"] += f.count
        for says, n in counted.items():
            yield phase, says.strip(), n


def sharded(model: str, policy: str, target: Target, phase: str, tokens: int = 64) -> CallView:
    """Return a phase of the decoder compiled for four chips, its heads and its MLP's width cut over them."""
    subject = load(model, policy, device="cpu")
    over = mesh(target, {"x": CHIPS})
    kv = CUT_KV if subject.config.kv_heads % CHIPS == 0 else {}

    def placed(path: tuple[Any, ...], x: Any) -> Any:
        axis = (CUT | kv).get(getattr(path[-1], "key", ""))
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "x")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(over, spec))

    given = jax.tree_util.tree_map_with_path(placed, arguments(subject, phase, tokens, 1))
    chosen = load_policy(policy)
    made = compile_for(target, getattr(subject.decoder, phase), given, (CACHE,), compiler_options(chosen))
    return CallView(phase, "tpu", made.jaxpr, chosen, target, made, parse_module(made.text))
