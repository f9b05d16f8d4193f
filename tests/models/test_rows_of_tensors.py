"""Rows of a tensor are read without the others, so that a host brings the parts of its devices alone from a bucket."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from precaudit.models.checkpoints import open_checkpoint, safetensors_files
from precaudit.models.checkpoints.fused import SplitTensors
from precaudit.models.checkpoints.safetensors_files import SafetensorsFiles
from precaudit.models.checkpoints.scaled import ScaledTensors
from precaudit.models.checkpoints.tensors import Rounded, read_rows
from precaudit.models.jax_decoder.parameters import parameters

X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture
def brought(monkeypatch):
    """The bytes that were asked for of files of a bucket."""
    found = []
    monkeypatch.setattr(safetensors_files, "bring", lambda _path, begin, end: found.append((begin, end)))
    return found


@pytest.fixture
def files(tmp_path, brought):
    save_file({"x": X, "y": X[:2].astype(ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    made = SafetensorsFiles.open([tmp_path / "model.safetensors"])
    brought.clear()
    return made


def test_rows_bring_their_bytes_alone(files, brought):
    begin = files.entries["x"].begin
    for some in (slice(2, 5), slice(None, 3), slice(7, None), slice(-2, None), slice(0, 0), slice(5, 2)):
        assert read_rows(files, "x", some).tobytes() == X[some].tobytes()
    assert brought == [(begin + 12 * a, begin + 12 * b) for a, b in ((2, 5), (0, 3), (7, 8), (6, 8))]
    assert read_rows(files, "y", slice(1, 2)).dtype == ml_dtypes.bfloat16


def test_rows_of_what_is_cut_scaled_or_rounded(files, brought):
    split = SplitTensors(files, {"a": ("x", slice(0, 3)), "b": ("x", slice(3, 8))})
    for tensors, name, whole in (
        (split, "b", X[3:]),
        (ScaledTensors(files, {}, None), "x", X),
        (Rounded(files, "bfloat16"), "x", X.astype(ml_dtypes.bfloat16)),
    ):
        brought.clear()
        assert read_rows(tensors, name, slice(1, 3)).tobytes() == whole[1:3].tobytes()
        size = 96 if isinstance(tensors, Rounded) else 24  # what is rounded is read whole
        assert [b - a for a, b in brought] == [size]


def test_the_part_of_one_of_two_hosts_is_half_of_what_is_cut_by_rows(brought, monkeypatch):
    opened = open_checkpoint("tiny")
    brought.clear()
    rows = {"wq": slice(0, 64), "wo": slice(None)}  # of 128, as two hosts of model=2 have them

    def first_host(shape, where, part):
        name = where.spec[0]
        index = [slice(None)] * len(shape)
        if name in rows:  # after the axis of the layers
            index[1] = rows[name]
        return jax.numpy.asarray(part(tuple(index)))

    def place(name, _field, _shape):
        return NamedSharding(Mesh(np.array(jax.devices()[:1]), (name,)), PartitionSpec(name))

    monkeypatch.setattr(jax, "make_array_from_callback", first_host)
    sizes = {}

    def read(name, some):
        before = len(brought)
        found = read_rows(opened.tensors, name, some)
        sizes[name] = sizes.get(name, 0) + sum(b - a for a, b in brought[before:])
        return found

    made = parameters(opened.config, read, lambda _name: None, ml_dtypes.bfloat16, place)
    shapes = opened.tensors.shapes()
    for name, share in (("q_proj", 2), ("o_proj", 1)):
        full = f"model.layers.1.self_attn.{name}.weight"
        assert sizes[full] * share == np.prod(shapes[full]) * opened.tensors.read_tensor(full).itemsize
    assert made["layers"]["wq"].shape[1] == 64
