"""Several policies at once: a folder of runs of one model on the same tokens, traced and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_row

from precaudit.errors import UserError, enough_memory
from precaudit.judging.gate import gate
from precaudit.progress import Advance, Progress
from precaudit.recording.opening import holds_run
from precaudit.recording.runs.folders import check_folder
from precaudit.recording.runs.kinds import tag_of
from precaudit.recording.runs.manifest import read_manifest
from precaudit.recording.runs.point_lines import safe_name
from precaudit.recording.runs.reader import Run, open_run
from precaudit.reports.comparison import comparison_page
from precaudit.reports.headline import headline
from precaudit.reports.pages import as_markdown
from precaudit.reports.policies import PolicyRow, policy_differences, row_of
from precaudit.schema.policies import Policy
from precaudit.schema.records.base import Number, Record, json_number
from precaudit.schema.records.lines import read_lines, write_lines
from precaudit.schema.records.manifests import MANIFEST
from precaudit.writing import write_whole

if TYPE_CHECKING:
    from precaudit.recording.runs.written import Comparison
    from precaudit.recording.tracing.subject import Subject
    from precaudit.recording.tracing.trace import TraceOptions
    from precaudit.references.comparison.compare import CompareOptions as CompareOptions
    from precaudit.schema.selection import Selection

REFUSED = "refused.jsonl"  # beside the runs: the policies that were asked for and could not run


class Refused(Record, frozen=True):
    """A policy that could not run, and why."""

    policy: str
    why: str


@dataclass(frozen=True)
class PolicyTrace:
    """What became of a policy: its run, or why there is none."""

    policy: str
    folder: Path
    run: Run | None
    why: str = ""


@dataclass(frozen=True)
class PolicySubjects:
    """Policies, and how a subject is loaded under one: when its turn comes."""

    policies: Sequence[Policy]
    load: "Callable[[Policy], Subject]"


def trace_policies(
    subjects: PolicySubjects,
    output: Path,
    prompts: Any = None,
    select: "Selection | None" = None,
    options: "TraceOptions | None" = None,
    progress: Progress | None = None,
) -> list[PolicyTrace]:
    """Trace the subject of every policy into ``output/POLICY``; the later ones are fed the first one's tokens.

    A policy that cannot run is told with its reason and kept as a row of ``compare``; the others run. Raises UserError
    where none can, and, before anything is written, where two policies have one name or a folder is in use.
    """
    from precaudit.recording.tracing.trace import TraceOptions, trace

    options, progress = options or TraceOptions(), progress or Progress()
    policies = subjects.policies
    folders = folders_of(policies, output)
    if options.resume and not output.is_dir():
        raise UserError(f"{output}: no runs here to go on with; leave out --resume")
    for folder in () if options.resume else folders:
        check_folder(folder, options.force)
    found: list[PolicyTrace] = []
    given = options.tokens_from
    generates = options.decode_steps > 0 and (select is None or select.phases != ("prefill",))
    for i, (policy, folder) in enumerate(zip(policies, folders, strict=True)):
        part = _part(progress, policy.name, i, len(policies))
        try:
            with enough_memory():
                here = _resume_options(replace(options, tokens_from=given), folder)
                run = trace(subjects.load(policy), folder, prompts, select, here, part)
        except UserError as error:
            progress.say(f"{policy.name} cannot run: {error}")
            found.append(PolicyTrace(policy.name, folder, None, str(error)))
            continue
        found.append(PolicyTrace(policy.name, folder, run))
        given = folder if given is None and generates else given
    if not any(t.run for t in found):
        raise UserError(f"none of {len(found)} policies can run: {found[0].why}")
    write_lines(output / REFUSED, [Refused(policy=t.policy, why=t.why) for t in found if t.run is None])
    return found


def folders_of(policies: Sequence[Policy], output: Path) -> list[Path]:
    """Return the folder of each policy's run; raises UserError where two have one."""
    folders = [output / safe_name(p.name) for p in policies]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise UserError(f"--policy names {policies[i].name} twice")
    return folders


def _resume_options(options: "TraceOptions", folder: Path) -> "TraceOptions":
    """Return how to trace into a folder where ``--resume`` was said: from the start where no run has begun."""
    begun = holds_run(folder)
    return replace(options, force=True, resume=False) if options.resume and not begun else options


def _part(progress: Progress, name: str, i: int, n: int) -> Progress:
    """Return the progress of one of several traces, of as many tokens each."""
    return Progress(
        progress.say, lambda done, total, what: progress.advance(i * total + done, n * total, f"{name}: {what}")
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the runs that a folder holds, the one whose tokens the others were fed first; none where it is a run."""
    if not folder.is_dir() or holds_run(folder):
        return []
    found = [p for p in folder.iterdir() if tag_of(p) == "model"]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[bool, str, str]:
    try:
        record = read_manifest(path / MANIFEST)
    except UserError:
        return True, "~", path.name
    return record.requested.tokens_from is not None, record.started, path.name


def compare_policies(folder: Path, options: "CompareOptions", tell: Advance) -> tuple[list[PolicyRow], list[str]]:
    """Compare every run in a folder with FP64 and judge it; return a row a run, and what differs from the first.

    A run that cannot be compared, and a policy that could not run, is a row with its reason. Raises UserError where
    none can be compared.
    """
    rows: list[PolicyRow] = []
    said: list[str] = []
    first: Comparison[Run] | None = None
    for path in runs_in(folder):
        name = path.name
        try:
            name = read_manifest(path / MANIFEST).policy["name"]
            found, row = _compare(path, options, _name_progress(tell, name))
        except UserError as error:
            rows.append(PolicyRow(policy=name, run=path.name, why=str(error)))
            continue
        rows.append(row)
        said += [] if first is None else policy_differences(first, found)
        first = first or found
    if first is None:
        raise UserError(f"{folder}: none of {len(rows)} runs can be compared: {rows[0].why}")
    refused = read_lines(folder / REFUSED, Refused) if (folder / REFUSED).is_file() else []
    rows += [PolicyRow(policy=r.policy, run="", why=f"not recorded: {r.why}") for r in refused]
    return rows, said


def _name_progress(tell: Advance, name: str) -> Advance:
    return lambda done, total, what: tell(done, total, f"{name}: {what}")


def _compare(path: Path, options: "CompareOptions", tell: Advance) -> "tuple[Comparison[Run], PolicyRow]":
    from precaudit.references.comparison.compare import compare

    found = compare(open_run(path), None, None, options, tell)
    tell(0, 1, "judging")
    judged = gate(found)
    page = comparison_page(found, headline(judged, str(path)))
    write_whole(path / "report.md", as_markdown(page, 1, None), inside=True)
    return found, replace_row(row_of(found, judged), stored_kl=_stored_kl(found, options, tell))


def _stored_kl(found: "Comparison[Run]", options: "CompareOptions", tell: Advance) -> Number | None:
    """Return the largest KL from FP64 of the weights as they are stored; None where those are the run's own."""
    record = found.run.record
    if record.policy["weights"] == "as-stored":
        return None
    from precaudit.models.checkpoints import open_checkpoint, recorded_source
    from precaudit.recording.runs.recorded import Recorded
    from precaudit.references.stored_weights import stored_kl

    where = options.model or recorded_source(record.model.reference)
    checkpoint = open_checkpoint(where, record.model.allowed).with_factor(record.policy["embed_factor"])
    largest = stored_kl(Recorded.of(found.run), checkpoint, tell)
    return None if largest is None else json_number(largest)
