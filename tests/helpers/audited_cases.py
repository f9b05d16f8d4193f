"""The programs of tests/helpers/cases, audited as a user does: traced, compared (by a map if it has one), gated."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from precaudit import gate
from precaudit.diagnosis.programs import Diagnosed, diagnose_program
from precaudit.judging.judgement import Judgement
from precaudit.recording.programs.loading import load_program
from precaudit.recording.programs.tracing import ProgramTraceOptions, trace_program
from precaudit.references.comparison.programs import compare_program
from precaudit.references.names_map import names_of
from precaudit.schema.records.errors import ErrorRecord
from tests.helpers.paths import CASES

MAP = CASES / "decoder.toml"


class Audited(NamedTuple):
    """What comparing, gating and diagnosing say of a case."""

    records: tuple[ErrorRecord, ...]
    judgement: Judgement
    diagnosis: Diagnosed

    def broken(self):
        """Return {(call, layer, point)} of what the gate fails."""
        return {(v.step, v.layer, v.point) for v in self.judgement.verdicts if v.status in ("fail", "nonfinite")}


@cache
def program(name: str):
    """Return the program a case holds: ``page_scale.py:bug``."""
    return load_program(f"{CASES}/{name}")


def audited(folder: Path, name: str, mapped: bool = False) -> Audited:
    """Trace, compare, gate and diagnose a case into a folder; cases mix formats as users' code does."""
    with jax.numpy_dtype_promotion("standard"):
        subject = program(name)
        run = trace_program(subject, folder / "run", options=ProgramTraceOptions(f"{CASES}/{name}", force=True))
        names = names_of(MAP if mapped else None, None, None)
        found = compare_program(run, subject, names)
        case = Audited(tuple(found), gate(found), diagnose_program(run, subject))
        assert (case.judgement.exit_code == 1) == (case.diagnosis.exit_code == 1), "gate and diagnose contradict"
        return case
