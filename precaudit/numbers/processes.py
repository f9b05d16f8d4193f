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
from precaudit.numbers.allocation import peak_memory
from precaudit.numbers.bytes_text import bytes_text
from precaudit.numbers.executors import Errand, Threads, Weighed, Work, make_piece
from precaudit.progress import Advance, silent

RUN = "from precaudit.numbers.processes import work; work()"
TRIES = 3  # of a piece whose process dies
LOOKS = 0.05  # seconds after which it is looked how much memory processes hold
BROKEN = (EOFError, pickle.UnpicklingError, OSError, ValueError)  # what reading from, or writing to, the dead raises


class NotStarted(Exception):
    """No process can be started here."""


class Died(Exception):
    """A process ended while it made a piece: with which code, and what it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"a process that computes ended with {code}\n{said}")
        self.code = code


class TooLarge(Exception):
    """A process held more memory than it may while it made a piece."""


class Sent(NamedTuple):
    """What a process is given: the errand (None: as before), its name, and a piece."""

    errand: bytes | None
    key: str
    piece: Any


class Failed(NamedTuple):
    """What a piece raised."""

    error: Exception


class Made(NamedTuple):
    """What a piece gave, and what its process held."""

    result: Weighed


class Process:
    """A process that makes pieces. It finds modules where this one does (-P: not where it happens to stand)."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        self.pieces, self.ended = 0, False  # how many it was given; whether it held too much memory
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
        """Return what a piece gives; raises Died where the process ends instead, TooLarge where it held too much."""
        self.pieces += 1
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
            if self.ended:
                raise TooLarge from None
            self.said.seek(0)
            raise Died(code, self.said.read().decode(errors="replace")) from None

    def look(self, memory: int) -> None:
        """End it where it has held more memory than it may."""
        if self.process.poll() is None and peak_memory(self.process.pid) > memory:
            self.ended = True
            self.process.kill()

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
    """An executor of ``slots`` processes of this machine, started when they are first needed.

    Several threads may ask it at once. ``memory``: the most bytes that may be resident in each (None: any number).
    ``idle``, ``busy``: its processes.
    """

    slots: int
    memory: int | None = None
    idle: list[Process] = field(default_factory=list)
    busy: list[Process] = field(default_factory=list)
    closed: Event = field(default_factory=Event)
    peaks: dict[str, int] = field(default_factory=dict)
    here = False
    _lock: Any = field(default_factory=Lock)
    _watching: Thread | None = None

    def map(
        self, function: Work, shared: Any, pieces: Sequence[Any], tell: Advance = silent, what: str = ""
    ) -> list[Any]:
        """Return what the pieces give; where no process can be started, this one makes them."""
        call = Call(self, Errand.pickled(function, shared), uuid4().hex, deque(enumerate(pieces)), what, len(pieces))
        servers = [Thread(target=call.serve, daemon=True) for _ in range(min(self.slots, len(pieces)))]
        for server in servers:
            server.start()
        made = [None] * len(pieces)
        try:
            for done in range(len(pieces)):
                tell(done, len(pieces), f"{what}, {self.slots} processes")
                found = call.arrived.get()
                if isinstance(found, NotStarted) and self.memory is not None:
                    raise UserError("--memory: no other process can be started here; leave out --jobs and --memory")
                if isinstance(found, NotStarted):
                    return Threads().map(function, shared, pieces, tell, what)
                if isinstance(found, Exception):
                    raise found
                made[found[0]] = found[1]
            return made
        finally:
            call.stop()
            for server in servers:
                server.join()

    def take(self, new: bool = False) -> Process:
        """Return a process that does nothing else; ``new``: one that has made no piece."""
        with self._lock:
            if self.closed.is_set():
                raise Died(-signal.SIGKILL, "")
            if self.memory is not None and self._watching is None:
                self._watching = Thread(target=self._watch, args=(self.memory,), daemon=True)
                self._watching.start()
            found = self.idle.pop() if self.idle and not new else Process()
            self.busy.append(found)
            return found

    def _watch(self, memory: int) -> None:
        """End processes that hold more memory than they may, as long as this is open."""
        while not self.closed.wait(LOOKS):
            with self._lock:
                for process in self.busy:
                    process.look(memory)

    def give_back(self, process: Process, dead: bool) -> None:
        """Keep a process for what comes next; end one that is dead."""
        with self._lock:
            self.busy.remove(process)
            if dead or self.closed.is_set():
                process.end()
            else:
                self.idle.append(process)

    def close(self) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            self.closed.set()
            for process in self.busy:
                process.process.kill()
            while self.idle:
                self.idle.pop().end()


@dataclass
class Call:
    """One call of ``map``: its pieces that nobody has begun, and what has arrived of the others."""

    owner: Processes
    errand: bytes
    key: str
    todo: deque[tuple[int, Any]]
    what: str
    pieces: int
    arrived: SimpleQueue[tuple[int, Any] | Exception] = field(default_factory=SimpleQueue)
    mine: list[Process] = field(default_factory=list)
    over: Event = field(default_factory=Event)

    def serve(self) -> None:
        """Have pieces made as long as there are any."""
        try:
            while self.todo:
                try:
                    i, piece = self.todo.popleft()
                except IndexError:
                    return
                self.arrived.put((i, self._make(i, piece)))
        except Exception as error:
            self.arrived.put(error)

    def _make(self, i: int, piece: Any) -> Any:
        new = False
        for left in reversed(range(TRIES)):
            process, dead = self.owner.take(new), True
            self.mine.append(process)
            try:
                found = self._within_memory(process.make(self.errand, self.key, piece))
                dead = False
            except TooLarge:
                if process.pieces == 1 or not left:
                    raise self._too_large(i, piece) from None
                new = True  # what it kept of other pieces may have been too much
                continue
            except Died as error:
                if not left or self.over.is_set():
                    raise _as_told(error) from None
                continue
            finally:
                self.mine.remove(process)
                self.owner.give_back(process, dead)
            if isinstance(found, Failed):
                raise found.error
            return found.result.note(self.owner.peaks)
        raise AssertionError("a piece is tried at least once")

    def _within_memory(self, found: Made | Failed) -> Made | Failed:
        """Return what a process gave; raises TooLarge where it held too much and nobody had looked."""
        if isinstance(found, Made) and self.owner.memory is not None and found.result.peak > self.owner.memory:
            raise TooLarge
        return found

    def _too_large(self, i: int, piece: Any) -> UserError:
        """Return what is said of a piece that does not fit a process that makes nothing else."""
        what = ": ".join(filter(None, (self.what, str(getattr(piece, "text", "")))))
        return UserError(
            f"piece {i + 1} of {self.pieces} ({what}) does not fit --memory {bytes_text(self.owner.memory or 0)}, in a "
            "process of its own; give more, with fewer --jobs"
        )

    def stop(self) -> None:
        """Begin no more pieces, and end the processes that make one."""
        self.todo.clear()
        self.over.set()
        for process in list(self.mine):
            process.process.kill()


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
        return Made(Weighed.here(make_piece(sent.key, errand, sent.piece)))
    except (PrecauditError, MemoryError) as error:
        return Failed(error)
    except Exception:
        return Failed(RuntimeError(f"in a process that computes:\n{traceback.format_exc()}"))
