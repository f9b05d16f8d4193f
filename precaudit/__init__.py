"""precaudit: a numerical precision audit for transformers in JAX.

``load(subject)`` opens a model, ``trace(subject, output)`` runs and records it, ``compare(run)`` computes its errors,
``gate(run)`` judges them, ``diagnose(run)`` names their cause. ``gradcheck(kernel, reference, inputs)``
holds a kernel and its gradients against FP64, ``probe()`` says what a device makes of products of attention scores.
``same(f, g)`` says whether two programs are one formula, ``check(f, x)`` judges one call, ``recording(output)`` the
calls of a loop, ``watched`` those of a function, ``watch(command)`` runs a script unedited, ``align(own, theirs)``
finds which parameter is which tensor of a checkpoint, by values. ``Program`` audits a function of your own, ``Parts``
the shipped decoder with an operation of yours; ``reap``, ``shadow`` and ``plant`` collect, widen and replace a
program's intermediate values.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from precaudit import recording as _room

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
    from precaudit.recording.opening import open_known as open_run
    from precaudit.recording.programs.program import Entry, Program
    from precaudit.recording.runs.reader import Run
    from precaudit.recording.runs.written import Comparison
    from precaudit.recording.tracing.subject import Subject, load
    from precaudit.reports.charts import plot
    from precaudit.schema.selection import Selection
    from precaudit.workflows.alignment import align
    from precaudit.workflows.assertions import assert_close, assert_gradients_close, assert_within_budget
    from precaudit.workflows.check import assert_explained, check
    from precaudit.workflows.own_calls import watched
    from precaudit.workflows.repeat import repeat
    from precaudit.workflows.same import same
    from precaudit.workflows.verbs import compare, diagnose, trace
    from precaudit.workflows.watch import watch

# Imported on first use: `precaudit --help` answers at once, and comparing needs no JAX.
_LAZY = {
    "load": "precaudit.recording.tracing.subject",
    "Subject": "precaudit.recording.tracing.subject",
    "trace": "precaudit.workflows.verbs",
    "Entry": "precaudit.recording.programs.program",
    "Program": "precaudit.recording.programs.program",
    "repeat": "precaudit.workflows.repeat",
    "same": "precaudit.workflows.same",
    "compare": "precaudit.workflows.verbs",
    "Comparison": "precaudit.recording.runs.written",
    "Selection": "precaudit.schema.selection",
    "open_run": "precaudit.recording.opening:open_known",  # of any kind
    "Run": "precaudit.recording.runs.reader",
    "align": "precaudit.workflows.alignment",
    "gate": "precaudit.judging.gate",
    "Judgement": "precaudit.judging.judgement",
    "diagnose": "precaudit.workflows.verbs",
    "Diagnosis": "precaudit.diagnosis.diagnose",
    "import_dump": "precaudit.recording.dumps.importing",
    "plot": "precaudit.reports.charts",
    "assert_close": "precaudit.workflows.assertions",
    "assert_within_budget": "precaudit.workflows.assertions",
    "assert_gradients_close": "precaudit.workflows.assertions",
    "assert_explained": "precaudit.workflows.check",
    "check": "precaudit.workflows.check",
    "watch": "precaudit.workflows.watch",
    "watched": "precaudit.workflows.own_calls",
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
    "Entry",
    "Judgement",
    "Parts",
    "Program",
    "Run",
    "Selection",
    "Subject",
    "align",
    "assert_close",
    "assert_explained",
    "assert_gradients_close",
    "assert_within_budget",
    "check",
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
    "same",
    "shadow",
    "trace",
    "watch",
    "watched",
]


class _Room(ModuleType):
    """``precaudit.recording``: the package of that name, and the function that records a loop's calls."""

    def __call__(self, *given: Any, **how: Any) -> Any:
        return import_module("precaudit.workflows.own_calls").recording(*given, **how)


_room.__class__ = _Room


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'precaudit' has no attribute {name!r}")
    module, _, called = _LAZY[name].partition(":")
    return getattr(import_module(module), called or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
