"""The HLO text of a compiled program, constants written out."""

import importlib
from typing import Any


def hlo_text(compiled: Any) -> str:
    """Return the optimised HLO of what ``jax.jit(f).lower(…).compile()`` gives.

    ``as_text()`` writes ``{...}`` for constants of more than ten elements, the compiler's own among them. The option to
    write them is beside the class of the module that the program holds; where it is not, the text leaves them out.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    options = getattr(importlib.import_module(type(module).__module__), "HloPrintOptions", None)
    if options is None:
        return str(compiled.as_text())
    written = options()
    written.print_large_constants = True
    return str(module.to_string(written))
