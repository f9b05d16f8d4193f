from decoder import *

from precaudit import Program

P = weights()
bug_after = Program(**after_prefill(Options(past=1), P))
small_after = Program(**after_prefill(Options(past=-1), P))
ok_after = Program(**after_prefill(Options(), P))
full = Program(**recomputed(Options(), P))


def skip(inputs, outputs):  # prompt of 4 tokens fed one by one; then the past length is one too large
    token, start, lengths, cache = greedy(inputs, outputs)
    return token, jnp.where(start == 4, 5, start), lengths, cache


bug_nothing = Program(**from_nothing(Options(), P, advance=skip))
ok_nothing = Program(**from_nothing(Options(), P))
