"""Operations of honest runs, and what their recorded values may be instead."""

from dataclasses import replace
from functools import cache

import numpy as np

from precaudit.models.checkpoints import open_checkpoint
from precaudit.models.numpy_decoder.model import Model
from precaudit.numbers.formats import FORMATS
from precaudit.recording.runs.recorded import Recorded
from precaudit.references.textbook.operations import parts, prepare
from precaudit.schema.graphs.decoder import POINTS
from precaudit.schema.places import Place
from precaudit.schema.policies import load_policy
from precaudit.schema.selection import Selection
from tests.helpers.fixture_runs import fixture_run
from tests.helpers.paths import FIXTURES

ALL = Selection.parse(points="all,logits:all", phases="prefill")


def honest_operations(folder):
    """Return a function that gives (operation, model, policy) of a point of a layer of a fixture's honest run."""

    @cache
    def recorded(name, policy):
        return Recorded.of(fixture_run(folder / f"{name}-{policy}", name, policy, ALL))

    @cache
    def found(name, point, policy, layer):
        return operation_of(recorded(name, policy), name, point, policy, layer)

    return found


def operation_of(run, name, point, policy, layer):
    checkpoint = open_checkpoint(str(FIXTURES / name))
    model = Model(checkpoint.config, checkpoint.tensors.read_tensor)
    place = Place("p0", "prefill", 0, layer if POINTS[point].per_layer else None, point)
    return prepare(run, model, place, parts(run, place)[0]), model, load_policy(policy)


def holding(o, values):
    """Return an operation whose recorded values are these."""
    with np.errstate(all="ignore"):
        stored = values.astype(np.float32).astype(FORMATS[o.stored.dtype.name].dtype)
    return replace(o, part=replace(o.part, values=stored))
