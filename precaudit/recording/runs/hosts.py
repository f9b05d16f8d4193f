"""The processes that run one program together (jax.distributed): what they tell each other, where they wait."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from precaudit.errors import PrecauditError, ToldElsewhere, UserError
from precaudit.mirrors import by_url

STATUS = "PRECAUDIT_HOSTS_STATUS"  # the descriptor by which a process tells the one that started it (cli/_hosts.py)
WAIT = 300.0  # seconds that a process waits for others, unless it is said
STAY = 30.0  # seconds that the first stays for others that have yet to leave a run that is whole
GRACE = 1.0  # seconds in which processes that fail alike say so, of which one speaks
# What JAX is told of each process by itself.
OWN = ("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_BIND_ADDRESS")
FAILED, LEFT = "precaudit/failed", "precaudit/left"


@dataclass
class Hosts:
    """Which process this is, of how many; ``client``: JAX's, by which they tell each other; ``seconds``: to wait.

    Of one process all is done at once, and nothing is exchanged.
    """

    index: int = 0
    count: int = 1
    client: Any = None
    seconds: float = WAIT
    _asked: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the tables."""
        return self.index == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def share(self, what: str, text: str = "") -> list[str]:
        """Return what each process says, once all have; raises UserError where one does not in time."""
        if not self.several:
            return [text]
        number = self._asked[what] = self._asked.get(what, 0) + 1
        name, until = f"precaudit/{what}/{number}", time.monotonic() + self.seconds
        self.client.key_value_set(f"{name}/{self.index}", "=" + text)
        return [self._answer(f"{name}/{i}", i, what, until)[1:] for i in range(self.count)]

    def _answer(self, key: str, process: int, what: str, until: float) -> str:
        try:
            left = max(until - time.monotonic(), 0.1)
            return str(self.client.blocking_key_value_get(key, int(left * 1000)))
        except Exception as error:
            late = "DEADLINE" in str(error)
            why = f"did not come within {self.seconds:.0f} s" if late else "cannot be reached any more"
            raise UserError(f"process {process} of {self.count} {why}, at: {what}") from None

    def agree(self, what: str, facts: Mapping[str, str]) -> None:
        """Raise UserError where processes say other things of what all have to have alike, with what and who."""
        each = [msgspec.json.decode(x, type=dict[str, str]) for x in self.share(what, _json(facts))]
        for name in dict.fromkeys(name for said in each for name in said):
            values = [said.get(name, "nothing") for said in each]
            if odd := [i for i, x in enumerate(values) if x != values[0]]:
                pair = [x if len(x) < 100 else "another" for x in (values[0], values[odd[0]])]
                told = "" if pair == ["another"] * 2 or _opaque(values[0]) else f" ({pair[0]} and {pair[1]})"
                raise UserError(f"process 0 and process {odd[0]} differ in {name}{told}: all have to be alike")

    def fail(self, said: str) -> bool:
        """Tell the others that this process cannot go on; return whether it is the one of all that has to say why."""
        if not self.several:
            return True
        with suppress(Exception):
            self.client.key_value_set(f"{FAILED}/{self.index:06d}", said or "failed")
            time.sleep(GRACE)
            named = [name.rpartition("/")[2] for name, _ in self.client.key_value_dir_get(FAILED)]
            return min(map(int, named)) == self.index
        return True

    def leave(self, code: int) -> None:
        """End this process with an exit code, without waiting for others; the first stays until they have gone."""
        tell_parent(b"left")
        with suppress(Exception):
            self.client.key_value_set(f"{LEFT}/{self.index}", "left")
            until = time.monotonic() + (4 * GRACE if code else STAY)
            while self.first and time.monotonic() < until and len(self._left()) < self.count:
                time.sleep(0.05)
            if self.first:
                time.sleep(GRACE / 2)  # JAX ends those of whom the first is gone
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    def _left(self) -> list[Any]:
        return list(self.client.key_value_dir_get(LEFT))

    def watch(self) -> None:
        """Leave, in a thread of its own, once another process has failed and this one does not say so itself."""

        def look() -> None:
            with suppress(Exception):
                while not self.client.key_value_dir_get(FAILED):
                    time.sleep(0.2)
                time.sleep(2 * GRACE)
                self.leave(2)

        threading.Thread(target=look, name="precaudit-hosts", daemon=True).start()


ALONE = Hosts()


def tell_parent(word: bytes) -> None:
    """Tell the process that started this one how far it is: after the last word it does not matter how JAX ends it."""
    with suppress(Exception):
        if STATUS in os.environ:
            os.write(int(os.environ[STATUS]), word)


@lru_cache(maxsize=1)
def _hosts(seconds: float) -> Hosts:
    from jax._src import distributed

    state = distributed.global_state
    found = Hosts(state.process_id, state.num_processes, state.client, seconds)
    found.watch()
    return found


def hosts_here() -> Hosts:
    """Return the processes that JAX was told of (jax.distributed.initialize); one alone where it was told of none."""
    if "jax" not in sys.modules:
        return ALONE
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return ALONE
    return _hosts(float(os.environ.get("PRECAUDIT_HOSTS_WAIT", WAIT)))


@contextmanager
def failing_together() -> Iterator[None]:
    """Have all processes end where one cannot go on; only one of them says why. Nothing else of one process."""
    try:
        yield
    except BaseException as error:
        hosts = hosts_here()
        if not hosts.several or isinstance(error, KeyboardInterrupt):
            raise
        if not hosts.fail(str(error)):
            raise ToldElsewhere from None
        if lost_others(error):
            raise UserError(
                f"process {hosts.index} lost another one of {hosts.count}: what is written is a part"
            ) from None
        raise


def lost_others(error: BaseException) -> bool:
    """Whether an error of JAX's says that another process is gone."""
    signs = ("Gloo", "Connection closed by peer", "heartbeat", "coordination", "Connection reset")
    return not isinstance(error, PrecauditError) and any(sign in str(error) for sign in signs)


def _json(facts: Mapping[str, str]) -> str:
    """Return facts as text; what follows a bucket lies in a folder of each process's own, and has its URL here."""
    return msgspec.json.encode({by_url(name): by_url(x) for name, x in facts.items()}).decode()


def _opaque(text: str) -> bool:
    """Whether a text is a hash, which tells nobody anything."""
    return len(text) in (32, 64) and all(c in "0123456789abcdef" for c in text)


def join(coordinator: str, processes: int | None, process: int | None, seconds: float) -> None:
    """Start JAX as one of several processes; ``auto``: as the cluster says that it knows. Raises UserError.

    JAX ends the process by itself where the others do not come (``cli/_hosts.py`` says so).
    """
    import jax

    os.environ["PRECAUDIT_HOSTS_WAIT"] = str(seconds)
    if hasattr(jax.config, "jax_cpu_collectives_implementation"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    beats = int(max(10, min(100, seconds)))
    given = (
        {}
        if coordinator == "auto"
        else {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
    )
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=int(seconds), heartbeat_timeout_seconds=beats, shutdown_timeout_seconds=30
        )
    except (RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "of this cluster" if coordinator == "auto" else f"at {coordinator}"
        raise UserError(f"cannot join the processes {where}: {said[:200]}") from None


def common_facts(given: Mapping[str, str]) -> dict[str, str]:
    """Return what processes have to have alike before anything is run: what they are ``given``, versions, flags."""
    from importlib.metadata import version

    facts = {f"the version of {name}": version(name) for name in ("precaudit", "jax", "jaxlib", "numpy")}
    names = sorted(n for n in os.environ if n.startswith("JAX_") and n not in OWN)
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", *names) if name in os.environ}
    return {**given, **facts, **flags, "how many processes there are": str(hosts_here().count)}
