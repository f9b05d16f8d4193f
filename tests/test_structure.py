"""The shape of the package: floors, who may import what, what the wheel holds, and documents that are current."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precaudit.graphs.decoder import POINTS
from precaudit.policies import KEYS
from precaudit.schemas import FILES, write_schemas

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "precaudit"
FLOORS = {
    "__main__": 6, "pytest_plugin": 6, "schemas": 5, "cli": 5, "assertions": 4.5, "reports": 4, "audit": 4.15,
    "verbs": 4.1, "sweep": 4.3, "starter": 4.2, "several": 4.2,
    "diagnosis": 3.7, "between": 3.4, "evidence": 3.3, "mutations": 2.9, "comparison": 3, "references": 2.7,
    "judging": 2.5, "programs": 2.3, "lint": 3, "tracing": 2, "dumps": 1.9, "runs": 1.7, "store": 1.5,
    "jax_decoder": 1, "numpy_decoder": 1, "checkpoints": 1, "transforms": 1, "metrics": 1, "limits": 0.5,
    "formats": 0, "policies": 0, "selection": 0, "records": 0, "errors": 0, "configs": 0, "prompts": 0, "graphs": 0,
    "places": 0, "lengths": 0, "progress": 0, "threads": 0, "allocation": 0, "coverage": 0, "arrays": 0,
    "integers": 0, "rounding_kernels": 0, "row_hashes": 0, "row_sums": 0, "filed": 0,
    "caching": 0, "compiling": 0, "writing": 0, "toml": 0, "frames": 0, "brief": 0, "keywords": 4.05,
    "glossary": 0, "doctor": 3, "tpu": 1.6, "gpu": 1.7, "gradients": 2.8, "kernels": 0, "rollouts": 3.1, "probing": 2.8,
}  # fmt: skip
JAX = {
    "jax_decoder", "transforms", "tracing", "references", "evidence", "diagnosis", "programs", "tpu", "gpu", "lint",
    "gradients", "kernels", "rollouts", "probing",
}  # fmt: skip


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "__init__":
            yield path, parts[0]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(("path", "part"), modules(), ids=lambda x: x.stem if isinstance(x, Path) else x)
def test_imports_only_go_down(path, part):
    for name in imports(path):
        if name.startswith("precaudit."):
            other = name.split(".")[1]
            assert other == part or FLOORS[other] < FLOORS[part] or FLOORS[other] == FLOORS[part] == 0, (
                path.name,
                name,
            )


def test_heavy_libraries_stay_where_they_belong():
    allowed = {
        "jax": JAX, "pandas": {"frames", "reports"}, "rich": {"reports", "cli"}, "click": {"cli"},
        "transformers": {"checkpoints"}, "torch": set(),
        "numba": {"compiling", "rounding_kernels", "numpy_decoder", "metrics"},
    }  # fmt: skip
    for path, part in modules():
        for name in imports(path):
            top = name.split(".")[0]
            assert top not in allowed or part in allowed[top], (path, name)


def test_comparing_and_reporting_import_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import precaudit.judging.gate, precaudit.comparison.compare\n"
        "import precaudit.reports.terminal, precaudit.reports.markdown, precaudit.reports.judgement\n"
        "import precaudit.checkpoints, precaudit.cli.compare, precaudit.cli.report, precaudit.between"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_references_alone_know_the_textbook_and_judging_neither():
    """Comparing knows references by their protocol; judging stands on records and the rows of the graph."""
    for path, part in modules():
        if part in ("comparison", "judging"):
            names = {name.split(".")[1] for name in imports(path) if name.startswith("precaudit.")}
            assert "numpy_decoder" not in names, path
            assert "DecoderConfig" not in re.findall(r"import .*\b(DecoderConfig)\b", _at_run_time(path)), path
    code = (
        "import sys, precaudit.judging.gate, precaudit.judging.programs\n"
        "assert not [m for m in sys.modules if m.startswith(('precaudit.numpy_decoder', 'precaudit.comparison', "
        "'precaudit.references', 'precaudit.configs', 'precaudit.programs'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _at_run_time(path):
    """Return a file's text without what only type checkers import."""
    return re.sub(r"if TYPE_CHECKING:\n(    .*\n)+", "", path.read_text())


def test_the_two_decoders_share_no_numerics():
    for path, part in modules():
        others = {name.split(".")[1] for name in imports(path) if name.startswith("precaudit.")}
        if part == "numpy_decoder":
            assert not others & {"jax_decoder", "transforms", "tracing"}
        if part == "jax_decoder":
            assert "numpy_decoder" not in others


def test_the_wheel_s_only_top_level_is_precaudit():
    found = subprocess.run(
        [sys.executable, "-c", "from setuptools import find_packages as f; print(f(include=['precaudit*']))"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    config = (ROOT / "setup.cfg").read_text()
    assert "include = precaudit*" in config
    if found.returncode == 0:  # setuptools need not be installed where the package is
        assert all(name.split(".")[0] == "precaudit" for name in ast.literal_eval(found.stdout))
    for folder in ("traces", "refs"):
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_schemas_are_current(tmp_path):
    write_schemas(tmp_path)
    for name in FILES:
        file = f"{name}.schema.json"
        assert (ROOT / "docs" / "schemas" / file).read_bytes() == (tmp_path / file).read_bytes(), "make schemas"


def test_the_design_names_every_point_policy_key_and_module():
    text = (ROOT / "docs" / "design.md").read_text()
    for name in [*POINTS, *KEYS, *FLOORS.keys() - {"__main__"}]:
        assert re.search(rf"\b{re.escape(name)}\b", text), name


def test_nothing_large_is_committed():
    """Caches and runs stay out: the largest file is the bundled model."""
    if not (ROOT / ".git").exists():
        return  # a source archive
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in names.split("\0") if name and (ROOT / name).is_file()}
    assert max(sizes.values()) <= 4e6
    assert sum(sizes.values()) <= 20e6
    assert not [name for name in sizes if name.startswith(("refs/cache/", "traces/runs/")) and ".gitkeep" not in name]


# Words that are names of points and of something else, too: what they are there.
HOMONYMS = {
    "checkpoints/gguf_files.py": "GGUF's names of tensors",
    "configs/huggingface.py": "a field of the configuration",
    "jax_decoder/family.py": "names of parameters",
    "jax_decoder/parameters.py": "names of parameters",
    "numpy_decoder/operators.py": "a place of Rounding",
    "numpy_decoder/rounding.py": "keys of a policy",
    "evidence/remedies.py": "keys of a policy",
    "policies/__init__.py": "keys of a policy",
}


def test_what_is_known_of_operations_is_one_table():
    literals, tables = set(), set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        said = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in set(POINTS)]
        if said:
            literals.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict | ast.Set | ast.Tuple | ast.List | ast.Compare | ast.BoolOp):
                inside = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & set(POINTS)
                if len(inside) > 1:
                    tables.add(name)
    assert HOMONYMS.keys() <= literals, "an exception that is none any more"
    decoders = {"jax_decoder/decoder.py", "jax_decoder/parts.py", "numpy_decoder/operations.py"}  # what runs them
    assert literals - HOMONYMS.keys() == {"graphs/decoder.py", *decoders}
    assert tables - HOMONYMS.keys() == {"graphs/decoder.py", "jax_decoder/decoder.py"}  # there, fields of the cache
    assert len(literals) <= 12
