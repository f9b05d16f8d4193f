"""Processes of this machine that make pieces: each is given one after another, and one that dies has its piece redone.

They are started as ``python -c``, so that a user's script is not run again in them, and speak pickles with the process
that started them. They live as long as their executor.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from subprocess import PIPE
from threading import Event, Lock, Thread
from typing import IO, Any, BinaryIO, NamedTuple, cast
from uuid import uuid4

from precaudit.errors import PrecauditError, UserError
from precaudit.numbers.executors import Errand, Threads, Work, make_piece
from precaudit.progress import Advance, silent

RUN = "from precaudit.numbers.processes import work; work()"
TRIES = 3  # of a piece whose process dies
BROKEN = (EOFError, pickle.UnpicklingError, OSError, ValueError)  # what reading from, or writing to, the dead raises


class NotStarted(Exception):
    """No process can be started here."""


class Died(Exception):
    """A process ended while it made a piece: with which code, and what it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"a process of compare ended with {code}\n{said}")
        self.code = code


class Sent(NamedTuple):
    """What a process is given: the errand (None: as before), its name, and a piece."""

    errand: bytes | None
    key: str
    piece: Any


class Failed(NamedTuple):
    """What a piece raised."""

    error: Exception


class Made(NamedTuple):
    """What a piece gave."""

    result: Any


class Process:
    """A process that makes pieces. It finds modules where this one does (-P: not where it happens to stand)."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 it is read when the process has died
        self.key = ""
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", RUN], stdin=PIPE, stdout=PIPE, stderr=self.said, env=environment
            )
        except OSError as error:
            self.said.close()
            raise NotStarted from error

    def make(self, errand: bytes, key: str, piece: Any) -> Made | Failed:
        """Return what a piece gives; raises Died where the process ends instead."""
        sink, source = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)
        try:
            pickle.dump(Sent(None if self.key == key else errand, key, piece), sink, pickle.HIGHEST_PROTOCOL)
            sink.flush()
            self.key = key
            found = pickle.load(source)
            if not isinstance(found, Made | Failed):
                raise EOFError
            return found
        except BROKEN:
            self.process.kill() if self.process.poll() is None and self._lingers() else None
            code = self.process.wait()
            self.said.seek(0)
            raise Died(code, self.said.read().decode(errors="replace")) from None

    def _lingers(self) -> bool:
        """Whether it does not end though it has closed what it writes to."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            return True
        return False

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.said):
            with suppress(OSError):
                cast(IO[bytes], stream).close()


@dataclass
class Processes:
    """An executor of ``slots`` processes of this machine, started when they are first needed."""

    slots: int
    idle: list[Process] = field(default_factory=list)
    here = False

    def map(
        self, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance = silent, what: str = ""
    ) -> list[Any]:
        """Return what the pieces give; where no process can be started, this one makes them."""
        errand, key = Errand.pickled(function, shared), uuid4().hex
        todo, arrived = deque(enumerate(pieces)), SimpleQueue[tuple[int, Any] | Exception]()
        running: list[Process] = []
        lock, over, made = Lock(), Event(), [None] * len(pieces)

        def take() -> Process:
            with lock:
                found = self.idle.pop() if self.idle else Process()
                running.append(found)
                return found

        def give_back(process: Process, dead: bool) -> None:
            with lock:
                if process in running:
                    running.remove(process)
                    process.end() if dead else self.idle.append(process)

        def serve() -> None:
            try:
                while todo:
                    try:
                        i, piece = todo.popleft()
                    except IndexError:
                        return
                    arrived.put((i, one(piece)))
            except Exception as error:
                arrived.put(error)

        def one(piece: Any) -> Any:
            for left in reversed(range(TRIES)):
                process, dead = take(), True
                try:
                    found = process.make(errand, key, piece)
                    dead = False
                except Died as error:
                    if not left or over.is_set():
                        raise _as_told(error) from None
                    continue
                finally:
                    give_back(process, dead)
                if isinstance(found, Failed):
                    raise found.error
                return found.result
            raise AssertionError("a piece is tried at least once")

        servers = [Thread(target=serve, daemon=True) for _ in range(min(self.slots, len(pieces)))]
        for server in servers:
            server.start()
        try:
            for done in range(len(pieces)):
                tell(done, len(pieces), f"{what}, {self.slots} processes")
                found = arrived.get()
                if isinstance(found, NotStarted):
                    return Threads().map(function, shared, pieces, tell, what)
                if isinstance(found, Exception):
                    raise found
                made[found[0]] = found[1]
            return made
        finally:
            todo.clear()
            over.set()
            with lock:
                for process in running:
                    process.process.kill()
            for server in servers:
                server.join()

    def close(self) -> None:
        """End the processes."""
        while self.idle:
            self.idle.pop().end()


def _as_told(error: Died) -> Exception:
    """Return what is said of a piece whose processes died, one after another."""
    if error.code == -signal.SIGKILL:
        return UserError(
            f"{TRIES} processes were killed while they made the same piece, as where memory runs out; "
            "give fewer --jobs, or none"
        )
    return RuntimeError(str(error))


def work() -> None:
    """Make the pieces that are read from standard input, and write what they give: a process's whole life.

    The pickles are those that the parent process wrote.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no message
    errand = b""
    with suppress(EOFError):
        while True:
            sent: Sent = pickle.load(sys.stdin.buffer)
            errand = errand if sent.errand is None else sent.errand
            try:
                pickle.dump(_answer(sent, errand), out, pickle.HIGHEST_PROTOCOL)
                out.flush()
            except BrokenPipeError:
                os._exit(1)  # the parent is gone


def _answer(sent: Sent, errand: bytes) -> Made | Failed:
    try:
        return Made(make_piece(sent.key, errand, sent.piece))
    except (PrecauditError, MemoryError) as error:
        return Failed(error)
    except Exception:
        return Failed(RuntimeError(f"in a process of compare:\n{traceback.format_exc()}"))
