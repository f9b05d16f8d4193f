"""The JSON Schemas of the files a run consists of: ``python -m precaudit.workflows.schemas docs/schemas``."""

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

from precaudit.checks.rollouts.causes import TokenCause
from precaudit.checks.rollouts.divergence import Divergence
from precaudit.checks.rollouts.frozen import FrozenAnswers, FrozenMetric, FrozenRun
from precaudit.checks.rollouts.limits import RolloutRecord
from precaudit.checks.rollouts.origin import RolloutRun
from precaudit.checks.rollouts.program_loops import ProgramTiming
from precaudit.checks.rollouts.questions import Answers, Changed
from precaudit.checks.rollouts.timing import Timing
from precaudit.diagnosis.bisection.records import Bisection, BisectionAsked, BisectionTrial
from precaudit.diagnosis.evidence.records import Finding, FormulaRecord, Kept, LineRemedy, Remedy, Shares
from precaudit.diagnosis.sameness.records import Sameness
from precaudit.diagnosis.training.records import Training, TrainingMember, TrainingTensor
from precaudit.recording.runs.compared_programs import Compared
from precaudit.recording.runs.programs import ProgramRun
from precaudit.reports.sweep import SweepRow
from precaudit.schema.records.comparisons import CompareRecord, PrefillDecodeRecord
from precaudit.schema.records.errors import ERROR_KINDS
from precaudit.schema.records.manifests import DumpRun
from precaudit.schema.records.probe import ProbeRecord
from precaudit.schema.records.runs import PointRecord, PromptRecord, RunRecord, StepRecord
from precaudit.schema.records.sketches import SketchRecord

FILES = {
    "run.json": RunRecord | ProgramRun | DumpRun,
    "prompts.jsonl": PromptRecord,
    "steps.jsonl": StepRecord,
    "points.jsonl": PointRecord,
    "errors.jsonl": ERROR_KINDS,
    "prefill_decode.jsonl": PrefillDecodeRecord,
    "compare.json": CompareRecord,
    "findings.jsonl": Finding,
    "formula.json": FormulaRecord,
    "kept.json": Kept,
    "lines.jsonl": LineRemedy,
    "remedies.jsonl": Remedy,
    "shares.jsonl": Shares,
    "compared.json": Compared,
    "same.jsonl": Sameness,
    "sketches.jsonl": SketchRecord,
    "sweep.jsonl": SweepRow,
    "trials.jsonl": BisectionAsked | BisectionTrial,
    "bisect.json": Bisection,
    "training.json": Training,
    "training.jsonl": TrainingTensor,
    "members.jsonl": TrainingMember,
    "rollouts.jsonl": RolloutRun | RolloutRecord | Timing | Answers | Changed | Divergence | ProgramTiming | TokenCause,
    "rollout-baseline.jsonl": FrozenRun | FrozenMetric | FrozenAnswers,
    "probe.jsonl": ProbeRecord,
}


def write_schemas(folder: Path) -> None:
    """Write the JSON Schema of every file's lines, as docs/schemas holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in FILES.items():
        schema = msgspec.json.encode(_clean(msgspec.json.schema(kind)), order="sorted")
        (folder / f"{name}.schema.json").write_bytes(msgspec.json.format(schema, indent=1) + b"\n")


def _clean(x: object) -> Any:
    """Return a schema whose descriptions are docstrings without their indentation, as Python 3.13 has them."""
    if isinstance(x, dict):
        described = {"description": inspect.cleandoc(x["description"])} if isinstance(x.get("description"), str) else {}
        return {key: _clean(y) for key, y in x.items()} | described
    return [_clean(y) for y in x] if isinstance(x, list) else x


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
