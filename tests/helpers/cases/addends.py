from decoder import *

from precaudit import Program

P = weights()
factor = Program(**from_nothing(Options(fed=0.75), P, steps=0))
near = Program(**from_nothing(Options(fed=1.02), P, steps=0))
bent = Program(**from_nothing(Options(bent=0.1), P, steps=0))
subtracted = Program(**from_nothing(Options(attended=-1.0), P, steps=0))
