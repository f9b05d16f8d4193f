"""Programs compiled for a TPU that is not there."""

import os
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precaudit.tpu.texts import hlo_text

try:
    LIBTPU = version("libtpu")
except PackageNotFoundError:
    LIBTPU = ""
needs_libtpu = pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed: pip install precaudit[tpu]")


@cache
def _device(topology):
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return NamedSharding(Mesh(np.array(found.devices[:1]), ("x",)), PartitionSpec())


def text_for(function, *args, topology="v5e:2x2", **how):
    """Return the optimised HLO of a function of arrays of these shapes and formats, on one device of a topology."""
    there = _device(topology)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), args)
    traced = jax.jit(function, keep_unused=True, **how).trace(*shapes)
    with _no_cache():
        return hlo_text(traced.lower(lowering_platforms=("tpu",)).compile())


@contextmanager
def _no_cache():
    """Compile anew: a program for a device that is not there cannot be read back. JAX asks once whether to cache."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
