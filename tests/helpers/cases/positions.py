from decoder import *

from precaudit import Program

P = weights()
T = 300


def pre(o):
    return Program(
        call=partial(forward, o=o),
        params=P,
        cases={"a": (prompt(1, T), jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32), empty(1, o))},
        outputs=("logits", "cache"),
    )


bug = pre(Options(positions="bf16", slots=T))
ok = pre(Options(slots=T))
