"""What a call of a program holds, written: in a file, or by several processes as parts of arrays (JAX)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.mirrors import commit
from precaudit.recording.runs.arrays import TENSORS, arrays_hash, read_arrays, write_tensors
from precaudit.recording.runs.hashes import tensor_hash
from precaudit.recording.runs.hosts import Hosts, hosts_here
from precaudit.recording.runs.programs import MANIFEST, ProgramRun, file_name, write_manifest
from precaudit.recording.runs.shards import Shards, check_shared
from precaudit.recording.tracing.parts import Spread


@dataclass
class CallWriter:
    """Writes what calls hold below a run's folder, one case after another; ``shards``: of several processes.

    ``pending``: names of what this case wrote whose hash is not known yet, since parts lie with several processes.
    """

    folder: Path
    hosts: Hosts = field(default_factory=hosts_here)
    shards: Shards = field(init=False)
    pending: list[str] = field(default_factory=list)
    bytes: int = 0

    def write(
        self, record: ProgramRun, at: tuple[str, int], inputs: Any, held: Any, named: Mapping[str, Any]
    ) -> dict[str, str]:
        """Write what a call holds; return the hash of each file that is whole."""
        if record.sketch is not None:
            return self._write(file_name(record, *at, "taps"), sketched(inputs, held))
        outputs = {p.name for p in record.outputs}
        hashes = dict[str, str]()
        named = {n: x for n, x in named.items() if n in outputs}
        for kind, tensors in (("taps", held), ("inputs", _leaves(inputs)), ("outputs", named)):
            hashes |= self._write(file_name(record, *at, kind), tensors)
        return hashes

    def _write(self, name: str, tensors: Mapping[str, Any]) -> dict[str, str]:
        if self.hosts.several:
            self._write_parts(name, tensors)
            return {}
        arrays = {k: np.asarray(on_host(x), order="C") for k, x in tensors.items()}
        digest, nbytes = write_tensors(self.folder, name, arrays)
        self.bytes += nbytes
        return {name: digest}

    def _write_parts(self, name: str, tensors: Mapping[str, Any]) -> None:
        first, below = self.hosts.first, name.removeprefix(f"{TENSORS}/")
        arrays = [Spread.of(x, first).whole(f"{below}/{k}") for k, x in tensors.items()]
        self.bytes += self.shards.arrays.write(arrays, metadata=first)
        self.pending.append(name)

    def end(self, case: str) -> tuple[dict[str, str], int]:
        """Return the hashes that were not known, and the bytes of a case, once every process has written its parts.

        Each reader (``Shards``) reads some of what all wrote, as it lies on the disk.
        """
        hosts, what = self.hosts, f"writing {case}"
        names, written, self.pending, self.bytes = self.pending, self.bytes, [], 0
        if not hosts.several:
            return {}, written
        self.shards.share(what, [case], written)
        readers = self.shards.readers
        mine = names[hosts.index :: readers] if hosts.index < readers else []
        own = {name: arrays_hash(read_arrays(self.folder, name)) for name in mine}
        found, total = dict[str, str](), 0
        for said in hosts.share(what, msgspec.json.encode((own, written)).decode()):
            hashes, nbytes = msgspec.json.decode(said, type=tuple[dict[str, str], int])
            found, total = found | hashes, total + nbytes
        return found, total

    def manifest(self, record: ProgramRun) -> None:
        """Write program.json, of several processes the first."""
        if self.hosts.first:
            write_manifest(self.folder, record)
            commit(self.folder)

    def begin(self) -> None:
        """Return once program.json is there; raises UserError where a process does not see it."""
        if self.hosts.several:
            check_shared(self.folder / MANIFEST, self.hosts)
            self.shards = Shards(self.folder, self.hosts)

    def finish(self, record: ProgramRun) -> None:
        """Write program.json of a run that is whole; return once it is there."""
        self.manifest(record)
        if self.hosts.several:
            self.shards.finish()


def sketched(inputs: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that are kept of a call in place of its tensors: of points their parts, of tokens a hash."""
    found = {f"{name}/{part}": x for name, of in held.items() if isinstance(of, dict) for part, x in of.items()}
    for i, x in _leaves(inputs).items():
        if jnp.issubdtype(jnp.result_type(x), jnp.integer):
            digest = bytes.fromhex(tensor_hash(on_host(x)).partition(":")[2])
            found[f"inputs/{i}"] = np.frombuffer(digest, np.uint8)
    return found


def _leaves(inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(jax.tree.leaves(inputs))}
