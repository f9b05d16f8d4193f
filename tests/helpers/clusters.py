"""A scheduler of dask.distributed and its workers on this machine, as a user starts them."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

from tests.helpers.paths import ROOT


def start(kind, *options):
    """Start a scheduler or a worker, which finds this package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--no-dashboard", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def running_cluster(workers, folder):
    """Yield (address, the scheduler, its workers, each of one thread and no nanny)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    scheduler = start("scheduler", "--host", "127.0.0.1", "--port", str(port))
    given = (address, "--nthreads", "1", "--no-nanny", "--local-directory", str(folder))
    others = [start("worker", *given) for _ in range(workers)]
    try:
        yield address, scheduler, others
    finally:
        for process in (*others, scheduler):
            process.kill()
            process.wait()
