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
    from precaudit.checks.gradients.check import gradcheck
    from precaudit.checks.probing.probe import probe
    from precaudit.diagnosis.diagnose import Diagnosis
    from precaudit.interpreters.jaxpr import plant, reap, shadow
    from precaudit.judging.gate import gate
    from precaudit.judging.judgement import Judgement
    from precaudit.models.jax_decoder import Parts
    from precaudit.recording.dumps.importing import import_dump
    from precaudit.recording.programs.program import Program
    from precaudit.recording.runs.reader import Run, open_run
    from precaudit.recording.runs.written import Comparison
    from precaudit.recording.tracing.subject import Subject, load
    from precaudit.reports.charts import plot
    from precaudit.schema.selection import Selection
    from precaudit.workflows.assertions import assert_close, assert_gradients_close, assert_within_budget
    from precaudit.workflows.repeat import repeat
    from precaudit.workflows.verbs import compare, diagnose, trace

# Imported on first use: `precaudit --help` answers at once, and comparing needs no JAX.
_LAZY = {
    "load": "precaudit.recording.tracing.subject",
    "Subject": "precaudit.recording.tracing.subject",
    "trace": "precaudit.workflows.verbs",
    "Program": "precaudit.recording.programs.program",
    "repeat": "precaudit.workflows.repeat",
    "compare": "precaudit.workflows.verbs",
    "Comparison": "precaudit.recording.runs.written",
    "Selection": "precaudit.schema.selection",
    "open_run": "precaudit.recording.runs.reader",
    "Run": "precaudit.recording.runs.reader",
    "gate": "precaudit.judging.gate",
    "Judgement": "precaudit.judging.judgement",
    "diagnose": "precaudit.workflows.verbs",
    "Diagnosis": "precaudit.diagnosis.diagnose",
    "import_dump": "precaudit.recording.dumps.importing",
    "plot": "precaudit.reports.charts",
    "assert_close": "precaudit.workflows.assertions",
    "assert_within_budget": "precaudit.workflows.assertions",
    "assert_gradients_close": "precaudit.workflows.assertions",
    "gradcheck": "precaudit.checks.gradients.check",
    "probe": "precaudit.checks.probing.probe",
    "Parts": "precaudit.models.jax_decoder",
    "reap": "precaudit.interpreters.jaxpr",
    "shadow": "precaudit.interpreters.jaxpr",
    "plant": "precaudit.interpreters.jaxpr",
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
