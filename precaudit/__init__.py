"""precaudit: a numerical precision audit for transformers in JAX.

``load(subject)`` opens a model, ``trace(subject, output)`` runs and records it, ``compare(run)`` computes its errors,
``gate(run)`` judges them, ``diagnose(run)`` names their cause. ``gradcheck(kernel, reference, inputs)``
holds a kernel and its gradients against FP64, ``probe()`` says what a device makes of products of attention scores.
``Program`` audits a function of your own, ``Parts`` the shipped decoder with an operation of yours; ``reap``,
``shadow`` and ``plant`` collect, widen and replace a program's intermediate values.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from precaudit.assertions import assert_close, assert_gradients_close, assert_within_budget
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.dumps.importing import import_dump
    from precaudit.gradients.check import gradcheck
    from precaudit.jax_decoder import Parts
    from precaudit.judging.gate import Judgement, gate
    from precaudit.probing.probe import probe
    from precaudit.programs.program import Program
    from precaudit.reports.charts import plot
    from precaudit.runs.written import Comparison
    from precaudit.selection import Selection
    from precaudit.store import Run, open_run
    from precaudit.tracing.repeat import repeat
    from precaudit.tracing.subject import Subject, load
    from precaudit.transforms import plant, reap, shadow
    from precaudit.verbs import compare, diagnose, trace

# Imported on first use: `precaudit --help` answers at once, and comparing needs no JAX.
_LAZY = {
    "load": "precaudit.tracing.subject",
    "Subject": "precaudit.tracing.subject",
    "trace": "precaudit.verbs",
    "Program": "precaudit.programs.program",
    "repeat": "precaudit.tracing.repeat",
    "compare": "precaudit.verbs",
    "Comparison": "precaudit.runs.written",
    "Selection": "precaudit.selection",
    "open_run": "precaudit.store",
    "Run": "precaudit.store",
    "gate": "precaudit.judging.gate",
    "Judgement": "precaudit.judging.gate",
    "diagnose": "precaudit.verbs",
    "Diagnosis": "precaudit.diagnosis.diagnose",
    "import_dump": "precaudit.dumps.importing",
    "plot": "precaudit.reports.charts",
    "assert_close": "precaudit.assertions",
    "assert_within_budget": "precaudit.assertions",
    "assert_gradients_close": "precaudit.assertions",
    "gradcheck": "precaudit.gradients.check",
    "probe": "precaudit.probing.probe",
    "Parts": "precaudit.jax_decoder",
    "reap": "precaudit.transforms",
    "shadow": "precaudit.transforms",
    "plant": "precaudit.transforms",
}
__all__ = [
    "Comparison",
    "Diagnosis",
    "Judgement",
    "Parts",
    "Program",
    "Run",
    "Selection",
    "Subject",
    "assert_close",
    "assert_gradients_close",
    "assert_within_budget",
    "compare",
    "diagnose",
    "gate",
    "gradcheck",
    "import_dump",
    "load",
    "open_run",
    "plant",
    "plot",
    "probe",
    "reap",
    "repeat",
    "shadow",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'precaudit' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
