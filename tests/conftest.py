"""Strict JAX, and what several test files share."""

import os

from precaudit.caching import cache_folder
from precaudit.interpreters.tpu.environment import allow_libtpu

# compiled programs are shared by all workers and runs of the tests; references are not
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder("xla")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# what numba compiles is of each worker, since two that write at once may exchange their files
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder("numba") / os.environ.get("PYTEST_XDIST_WORKER", "alone")))

import jax
import pytest
from hypothesis import settings

from exams.cut import Cut, cut

allow_libtpu()
settings.register_profile("precaudit", deadline=None)  # timings are no tests
settings.load_profile("precaudit")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# files of more than a minute: begun first, so that none runs beside an idle core at the end
LONG = {f"test_{name}" for name in ("audited_cases", "predicted_runs", "program_textbook", "programs", "smollm2")}


def pytest_addoption(parser):
    parser.addoption("--part", type=cut, default=Cut(), help="K/N: the K-th of N parts of the tests; today/N")


@pytest.hookimpl(trylast=True)  # of what -m has chosen
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.stem not in LONG)
    functions = dict.fromkeys(item.nodeid.partition("[")[0] for item in items)
    chosen = set(config.getoption("--part").of(list(functions)))
    left_out = [item for item in items if item.nodeid.partition("[")[0] not in chosen]
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in chosen]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory):
    """Keep references out of the working folder."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PRECAUDIT_CACHE", str(tmp_path_factory.mktemp("refs")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def neutral():
    """Take it that capturing changes no logits, without compiling the program without taps to see it.

    For tests of faults, where that is a sixth of the time. Those of decoders, kernels, layouts, integers, masks and
    batches hold that it changes none.
    """
    from precaudit.recording.tracing.session import Session
    from precaudit.schema.records.runs import Neutrality

    def taken(self, call, batch, shape, _run, _bare):
        ids = tuple(p.id for p in batch.prompts)
        same = {"bitwise": True, "max_diff": 0.0, "apart": (0.0,) * len(ids)}
        self.neutrality.append(Neutrality(phase=call.phase, step=call.step, prompts=ids, shape=tuple(shape), **same))

    patch = pytest.MonkeyPatch()
    patch.setattr(Session, "_compare", taken)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def operation(tmp_path_factory):
    """Return (operation, model, policy) of a point of a layer of a fixture's honest run."""
    from tests.helpers.recorded_operations import honest_operations

    return honest_operations(tmp_path_factory.mktemp("operations"))


@pytest.fixture
def own_programs():
    """Compile anew: programs are kept by their decoder, and a patched one is the same decoder."""
    from precaudit.recording.tracing.programs import _compile

    _compile.cache_clear()
    yield
    _compile.cache_clear()
