"""An executor on an existing cluster of dask.distributed (extra ``[cluster]``): pieces go to its workers.

Dask hands out pieces, again where a worker dies, and the pickles that it carries run as code: only a cluster of one's
own is asked (docs/cluster.md). Its workers have this very precaudit, and read the run and the weights at their paths.
"""

import logging
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from uuid import uuid4

import precaudit
from precaudit.caching import DIAGNOSES, computed_by, numerics
from precaudit.errors import PrecauditError, UserError
from precaudit.numbers.executors import Errand, Weighed, Work, make_piece
from precaudit.numbers.threads import keep_one_blas_thread
from precaudit.progress import Advance, silent

ANSWERS = 10  # seconds in which a scheduler answers
JOINS = 30  # seconds in which a cluster without a worker gets one
LOOKS = 2  # seconds after which it is looked whether there are workers
INSTALL = "pip install 'precaudit[cluster]'"


class Code(NamedTuple):
    """What computes: versions, what NumPy computes with, and a hash of the source and of the libraries."""

    version: str
    python: str
    numerics: tuple[str, ...]
    source: str

    def lacks(self, asked: "Code") -> str:
        """Return in what this differs from what asks; nothing where it is the same."""
        for name, mine, its in zip(("precaudit", "Python", "NumPy"), self, asked, strict=False):
            if mine != its:
                shown = [x if isinstance(x, str) else ", ".join(x) for x in (mine, its)]
                return f"{name} {shown[0]}, and {shown[1]} asks"
        return "" if self.source == asked.source else "another source of precaudit, or other versions of its libraries"


@cache
def own_code() -> Code:
    """Return what computes in this process."""
    version = ".".join(map(str, sys.version_info[:2]))
    return Code(precaudit.__version__, version, numerics(), computed_by(DIAGNOSES)[:16])


class Raised(NamedTuple):
    """What a piece raised on a worker: an error of ours, or the text of another."""

    error: PrecauditError | None
    text: str = ""


def make_there(asked: Code, key: str, errand: bytes, piece: bytes) -> Any:
    """Return what a piece gives on a worker of the same code as what asks; nothing is unpickled by another."""
    if difference := own_code().lacks(asked):
        return Raised(UserError(f"a worker of the cluster has {difference}"))
    keep_one_blas_thread()
    try:
        return Weighed.here(make_piece(key, errand, pickle.loads(piece)))
    except PrecauditError as error:
        return Raised(error)
    except Exception:
        return Raised(None, traceback.format_exc())


def _same(data: bytes) -> bytes:
    """Return what is shared: a task of its own, which is done again where the worker that holds it dies."""
    return data


@dataclass(frozen=True)
class Cluster:
    """An executor on the workers of a scheduler. ``slots``: threads of all workers when it was opened."""

    client: Any
    address: str
    slots: int
    peaks: dict[str, int] = field(default_factory=dict)
    here = False

    def map(
        self, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance = silent, what: str = ""
    ) -> list[Any]:
        """Return what the pieces give; raises UserError where the cluster is lost, or its code is another."""
        key = uuid4().hex
        with self._understood(), self.client.as_current():
            errand = self.client.submit(_same, Errand.pickled(function, shared), pure=False)
            futures = [
                self.client.submit(make_there, own_code(), key, errand, pickle.dumps(piece), pure=False)
                for piece in pieces
            ]
            try:
                self._wait(futures, tell, what)
                found = self.client.gather(futures)
            finally:
                with suppress(Exception):
                    self.client.cancel([errand, *futures])
        for x in found:
            if isinstance(x, Raised):
                raise x.error or RuntimeError(f"on a worker of the cluster:\n{x.text}")
        return [x.note(self.peaks) for x in found]

    def _wait(self, futures: Sequence[Any], tell: Advance, what: str) -> None:
        """Wait for all of them, or the first that failed, as long as there are workers."""
        from distributed import wait

        left, alone_since = set(futures), None
        while left:
            tell(len(futures) - len(left), len(futures), f"{what}, {self.slots} workers")
            with suppress(TimeoutError):
                left = set(wait(left, timeout=LOOKS, return_when="FIRST_COMPLETED").not_done)
            if any(f.status in ("error", "cancelled", "lost") for f in futures):
                return
            now = time.monotonic()
            alone_since = None if _threads(self.client) else (alone_since or now)
            if alone_since is not None and now - alone_since > JOINS:
                raise UserError(f"{self.address}: the cluster has lost all its workers; nothing was written")

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raise in a sentence what goes wrong between this process, the scheduler and its workers."""
        from distributed import KilledWorker

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is large to send
                yield
        except PrecauditError:
            raise
        except KilledWorker as error:
            raise UserError(
                f"{self.address}: several workers died while they made the same piece, as where memory runs out "
                f"({error.task}); give them more: dask worker --memory-limit"
            ) from None
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if "deserializ" in text.lower() or isinstance(error, ImportError | AttributeError):
                cause = error.__cause__ or error
                raise UserError(
                    f"{self.address}: the cluster does not have this precaudit ({cause}); "
                    f"install {precaudit.__version__} of the same source for its scheduler and workers"
                ) from None
            raise UserError(f"{self.address}: the scheduler was lost ({text[:200]}); nothing was written") from None


def _threads(client: Any) -> int:
    """Return how many threads the workers have that a scheduler knows now."""
    return sum(client.nthreads().values())


@contextmanager
def open_cluster(address: str) -> Iterator[Cluster]:
    """Yield an executor on the cluster whose scheduler is at an address; raises UserError where there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise UserError(f"--scheduler needs dask.distributed: {INSTALL}") from None
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said in a line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other versions of what we do not send
        try:
            client = Client(address, timeout=ANSWERS, set_as_default=False)
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"--scheduler {address}: no scheduler answers ({text[:160]})") from None
    try:
        try:
            client.wait_for_workers(1, timeout=JOINS)
        except Exception:
            raise UserError(f"--scheduler {address}: no worker has joined it within {JOINS} s") from None
        yield Cluster(client, address, _threads(client))
    finally:
        with suppress(Exception):
            client.close(timeout=5)
