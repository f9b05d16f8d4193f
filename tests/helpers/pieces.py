"""Functions of pieces, as an executor gives them to other processes."""

import os
import pickle
import signal
import time
from uuid import uuid4

import numpy as np
from threadpoolctl import threadpool_info

from precaudit.errors import UserError
from precaudit.numbers.executors import Errand, Weighed, make_piece
from precaudit.numbers.threads import row_ranges


def square(shared, piece, _tell):
    """Return the square of a piece, after ``shared`` seconds."""
    time.sleep(shared)
    return piece * piece


def fail(_shared, piece, _tell):
    """Raise what nobody expects."""
    raise KeyError(piece)


def fail_user(_shared, piece, _tell):
    """Raise what the user is told."""
    raise UserError(f"{piece} is not there")


def die_once(folder, piece, _tell):
    """End this process when piece 2 is made first; return the piece otherwise."""
    marker = folder / "died"
    if piece == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def die(_shared, _piece, _tell):
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def split(_shared, piece, _tell):
    """Return how many rows each core has, and how many threads BLAS."""
    return row_ranges(piece, 1 << 14), {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}


class Pickled:
    """An executor of several slots whose pieces this process makes, of what was pickled, as another would."""

    here = False

    def __init__(self, slots):
        self.slots, self.peaks, self.given = slots, {}, []

    def map(self, function, shared, pieces, _tell=None, _what=""):
        """Return what the pieces give, the last one first."""
        errand, key = Errand.pickled(function, shared), uuid4().hex
        self.given += pieces
        found = [Weighed.here(make_piece(key, errand, pickle.loads(pickle.dumps(p)))) for p in reversed(pieces)]
        return [x.note(self.peaks) for x in reversed(found)]


def hold(_shared, piece, _tell):
    """Return how many bytes an array held for a while; as many MB as a piece says."""
    held = np.ones(piece * 1_000_000, np.uint8)
    time.sleep(0.2)
    return held.nbytes
