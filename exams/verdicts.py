"""The verdicts of one program: recorded, compared with FP64 and judged by the default limits."""

import tempfile
from pathlib import Path

from precaudit import Program
from precaudit.judging.gate import gate
from precaudit.judging.judgement import Judgement
from precaudit.recording.programs.tracing import trace_program
from precaudit.references.comparison.programs import compare_program


def judge_program(program: Program) -> Judgement:
    """Return the judgement of a program's run, which is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        opened = trace_program(program, Path(folder) / "run")
        compare_program(opened, program)
        return gate(opened.folder)
