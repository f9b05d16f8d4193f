from decoder import *

from precaudit import Program

P = weights()
bug = Program(**from_nothing(Options(advance_before_query=True), P, steps=7))
