from decoder import *

from precaudit import Program

P = weights()
B, T = 3, 8
N = jnp.asarray([5, 8, 6], jnp.int32)


def given(b, o, i=slice(None)):
    return (prompt(B, T)[i], jnp.zeros(b, jnp.int32), N[i], empty(b, o))


def batched(o):
    return Program(call=partial(forward, o=o), params=P, cases={"a": given(B, o)}, outputs=("logits", "cache"))


bug = batched(Options(mask_from_row0=True))
ok = batched(Options())
# each row alone, as three cases of a batch of one
o = Options(mask_from_row0=True)
alone = Program(
    call=partial(forward, o=o),
    params=P,
    cases={f"row{i}": given(1, o, slice(i, i + 1)) for i in range(B)},
    outputs=("logits", "cache"),
)


def rows(params, tokens, start, lengths, cache):  # the three rows one after another, results stacked again
    outs = [
        forward(
            params,
            tokens[i : i + 1],
            start[i : i + 1],
            lengths[i : i + 1],
            tuple(c[:, i : i + 1] for c in cache),
            Options(mask_from_row0=True),
        )
        for i in range(B)
    ]
    return jnp.concatenate([x[0] for x in outs]), tuple(jnp.concatenate([x[1][j] for x in outs], 1) for j in range(2))


by_rows = Program(call=rows, params=P, cases={"a": given(B, Options())}, outputs=("logits", "cache"))
