"""The JSON Schemas of the files a run consists of: ``python -m precaudit.schemas docs/schemas``."""

import sys
from pathlib import Path

import msgspec

from precaudit.diagnosis.records import Finding, FormulaRecord, Kept, Remedy, Shares
from precaudit.records import (
    CompareRecord,
    ErrorRecord,
    PointRecord,
    PrefillDecodeRecord,
    PromptRecord,
    RunRecord,
    StepRecord,
)

FILES = {
    "run.json": RunRecord,
    "prompts.jsonl": PromptRecord,
    "steps.jsonl": StepRecord,
    "points.jsonl": PointRecord,
    "errors.jsonl": ErrorRecord,
    "prefill_decode.jsonl": PrefillDecodeRecord,
    "compare.json": CompareRecord,
    "findings.jsonl": Finding,
    "formula.json": FormulaRecord,
    "kept.json": Kept,
    "remedies.jsonl": Remedy,
    "shares.jsonl": Shares,
}


def write_schemas(folder: Path) -> None:
    """Write the JSON Schema of every file's lines, as docs/schemas holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in FILES.items():
        schema = msgspec.json.format(msgspec.json.encode(msgspec.json.schema(kind), order="sorted"), indent=1)
        (folder / f"{name}.schema.json").write_bytes(schema + b"\n")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
