from decoder import *

from precaudit import Program

P = weights()
bug = Program(**from_nothing(Options(page=4, wrong_page=2), P, steps=11))
ok = Program(**from_nothing(Options(page=4), P, steps=11))
