"""The verb ``init``: the files that hold a user's own program, or a checkpoint, to its numbers in CI."""

import json
from contextlib import suppress
from importlib import resources
from pathlib import Path

from precaudit.errors import UserError
from precaudit.models.checkpoints.hub import is_hub_id
from precaudit.models.checkpoints.opening import NAMES
from precaudit.schema.program_names import require_name
from precaudit.workflows.audit import beside_program, is_program
from precaudit.workflows.package_source import package_source
from precaudit.writing import write_whole

RUN = "traces/runs/audit"
IGNORED = ("/traces/runs/", "/.cache/", "/precaudit.xml", "/precaudit.md", "/precaudit.txt", "/precaudit.html")


def init(subject: str, folder: Path | str = ".", reference: str | None = None, force: bool = False) -> list[Path]:
    """Write precaudit.toml, budgets.toml, a GitHub workflow and lines of .gitignore; return what was written.

    ``subject``: a program, whose code is run to see that it is one, or a checkpoint; ``reference``: of a program, a
    function as ``precaudit compare --reference`` takes it. Paths are relative to ``folder``. Raises UserError for a
    subject that is none, or where a file is there (``force``: replaces it); then nothing is written.
    """
    root = Path(folder)
    own = _is_program(subject, reference, root)
    limits = _fill("budgets.toml", subject, None) + ("" if own else _fill("logits.toml", "", None))
    files: dict[Path, bytes | str] = {
        root / "precaudit.toml": _fill("program.toml" if own else "model.toml", subject, reference),
        root / "budgets.toml": limits,
        root / ".github/workflows/precaudit.yml": _fill("workflow.yml", subject, None),
    }
    there = [path for path in files if path.exists()]
    if there and not force:
        names = ", ".join(map(str, there))
        raise UserError(f"{names}: there already, nothing was written; delete what should go, or replace: --force")
    if added := _gitignore(root / ".gitignore"):
        files[root / ".gitignore"] = added
    _write_all(files)
    return list(files)


def _is_program(subject: str, reference: str | None, root: Path) -> bool:
    """Return whether a subject is a program; raises UserError where it, or its reference, is none."""
    if not (subject + (reference or "")).isprintable():
        raise UserError(f"{subject!r}: a subject with characters that cannot be printed")
    if is_program(subject, root):
        from precaudit.recording.programs.loading import load_function, load_program

        load_program(beside_program(root, subject))
        if reference is not None:
            load_function(beside_program(root, reference))
        return True
    if reference is not None:
        raise UserError(f"--reference is for a program, and {subject} is none: FILE.py:NAME or module:NAME")
    require_name(subject if root == Path() else str(root / subject))
    if subject not in NAMES and not (root / subject).expanduser().exists() and not is_hub_id(subject):
        raise UserError(
            f"{subject}: no such checkpoint; give FILE.py:NAME, module:NAME, a folder, a .gguf file or a hub id"
        )
    return False


def _fill(template: str, subject: str, reference: str | None) -> str:
    """Return a template with what it leaves open: strings as TOML writes them."""
    text = (resources.files("precaudit") / "templates" / template).read_text(encoding="utf-8")
    line = '# reference = "FILE.py:NAME"' if reference is None else f"reference = {_quote_toml(reference)}"
    where = {"@SUBJECT@": _quote_toml(subject), "@REFERENCE@": line, "@RUN@": RUN}
    where["@PACKAGE@"] = package_source().requirement
    for mark, value in where.items():
        text = text.replace(mark, value)
    return text


def _quote_toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _gitignore(path: Path) -> bytes:
    """Return .gitignore with the lines it lacks, the rest as it is; nothing where it lacks none."""
    held = path.read_bytes() if path.is_file() else b""
    lines = {line.strip() for line in held.splitlines()}
    lacking = [line for line in IGNORED if line.encode() not in lines]
    if not lacking:
        return b""
    return held + (b"\n" if held and not held.endswith(b"\n") else b"") + "\n".join([*lacking, ""]).encode()


def _write_all(files: dict[Path, bytes | str]) -> None:
    """Write all files or none: what was there before is put back where one cannot be written."""
    before = {path: path.read_bytes() if path.is_file() else None for path in files}
    made = sorted({p for path in files for p in path.parents if not p.exists()}, reverse=True)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    except OSError:
        for path, held in before.items():
            with suppress(OSError):
                path.unlink() if held is None else write_whole(path, held)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise
