"""The shape of the package: rooms, who may import what, what the wheel holds, and documents that are current."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache

from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.policies import KEYS
from precaudit.workflows.schemas import FILES, write_schemas
from tests.helpers.paths import ROOT

PACKAGE = ROOT / "precaudit"
ROOMS = [room["name"] for room in tomllib.loads((ROOT / "docs" / "rooms.toml").read_text())["room"]]
BELOW = {"errors", "writing", "caching", "progress", "buckets", "mirrors"}  # at the root, for every room
JAX = ("interpreters/", "models/jax_decoder/", "recording/", "references/", "diagnosis/", "checks/")
HEAVY = {
    "distributed": ("numbers/cluster.py",),
    "jax": JAX,
    "pandas": ("schema/frames.py", "reports/"),
    "rich": ("reports/", "cli/"),
    "textual": ("reports/session/",),
    "click": ("cli/",),
    "transformers": ("models/checkpoints/",),
    "torch": (),
    "numba": ("numbers/compiling.py", "numbers/rounding_kernels.py", "models/numpy_decoder/", "schema/metrics/"),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != "__init__.py":
            yield path, name


@cache
def imports(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "precaudit":
            found += (f"precaudit.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def floor(name):
    """Return how high a room or a module at the root lies."""
    return 0 if name in BELOW else len(ROOMS) - ROOMS.index(name) if name in ROOMS else len(ROOMS) + 1


def test_every_folder_is_a_room():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert folders == set(ROOMS)
    assert {p.stem for p in PACKAGE.glob("*.py")} == BELOW | {"__init__", "__main__"}


def test_every_room_has_its_tests_and_helpers_hold_none():
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert {path.parts[0] for path in tests} == {*ROOMS, "project", "exams"}
    assert not [path for path in tests if not (ROOT / "tests" / path).with_name("__init__.py").is_file()]


def test_no_module_is_longer_than_a_reader_s_patience():
    longer = {name: n for path, name in modules() if (n := len(path.read_text().splitlines())) > 350}
    assert not longer


def test_imports_only_go_down():
    climbs = [
        (name, other)
        for path, name in modules()
        for other in imports(path)
        if other.startswith("precaudit.")
        and (to := other.split(".")[1]) != (room := name.split("/")[0].removesuffix(".py"))
        and to != "__version__"
        and floor(to) >= floor(room) > 0
    ]
    assert not climbs


def test_heavy_libraries_stay_where_they_belong():
    for path, name in modules():
        for other in imports(path):
            allowed = HEAVY.get(other.split(".")[0])
            assert allowed is None or name.startswith(allowed), (name, other)


def test_comparing_and_reporting_import_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import precaudit.judging.gate, precaudit.references.comparison.compare\n"
        "import precaudit.reports.terminal, precaudit.reports.pages, precaudit.reports.gate\n"
        "import precaudit.reports.comparison\n"
        "import precaudit.models.checkpoints, precaudit.references.comparison.between\n"
        "import precaudit.cli.compare, precaudit.cli.report"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_references_alone_know_the_textbook_and_judging_neither():
    """Comparing knows references by their protocol; judging stands on records and the rows of the graph."""
    for path, name in modules():
        if name.startswith(("references/comparison/", "judging/")):
            never = ("precaudit.models.numpy_decoder", "precaudit.schema.configuration")
            assert not [x for x in imports(path) if x.startswith(never)], path
    code = (
        "import sys, precaudit.judging.gate, precaudit.judging.programs\n"
        "assert not [m for m in sys.modules if m.startswith(('precaudit.models.numpy_decoder', 'precaudit.references', "
        "'precaudit.models.configs', 'precaudit.recording.programs'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_two_decoders_share_no_numerics():
    apart = {
        "models/numpy_decoder/": ("precaudit.models.jax_decoder", "precaudit.interpreters", "precaudit.recording"),
        "models/jax_decoder/": ("precaudit.models.numpy_decoder",),
    }
    for path, name in modules():
        for part, never in apart.items():
            assert not name.startswith(part) or not [x for x in imports(path) if x.startswith(never)], name


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


def test_the_architecture_names_every_room_and_files_every_point_and_policy_key():
    for page, names in (("ARCHITECTURE.md", ROOMS), ("docs/files.md", [*POINTS, *KEYS])):
        text = (ROOT / page).read_text()
        assert not [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)], page


def definitions(path, name):
    """Whether a file defines a function or class, or ``Class.method``."""
    nodes = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in nodes if getattr(node, "name", None) == part]
        if not found:
            return False
        nodes = getattr(found[0], "body", [])
    return True


def test_the_architecture_is_short_and_what_it_names_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 1500
    named = re.findall(r"`((?:tests/)?[\w/]+\.py)(?::([\w.]+))?`", text)
    assert len([name for file, name in named if name and not file.startswith("tests/")]) >= 20
    for file, name in named:
        path = ROOT / file if file.startswith("tests/") else PACKAGE / file
        assert path.is_file(), file
        assert not name or definitions(path, name), (file, name)


def test_nothing_large_is_committed():
    """Caches and runs stay out: the largest file is the bundled model."""
    if not (ROOT / ".git").exists():
        return  # a source archive
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in names.split("\0") if name and (ROOT / name).is_file()}
    assert max(sizes.values()) <= 4e6
    assert sum(sizes.values()) <= 20e6
    assert not [name for name in sizes if name.startswith(("refs/cache/", "traces/runs/")) and ".gitkeep" not in name]
