from decoder import *

from precaudit import Program

P = weights()
less, least, none = (Program(**from_nothing(Options(eps=eps), P, steps=0)) for eps in (3e-6, 1e-6, 0.0))
