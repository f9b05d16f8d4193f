"""What a call of a program holds, written: in a file, or by several processes as parts of arrays (JAX)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from precaudit.interpreters.jaxpr.keys import on_host
from precaudit.mirrors import commit
from precaudit.numbers.arrays import Array
from precaudit.recording.runs.arrays import TENSORS, arrays_hash, read_arrays, write_tensors
from precaudit.recording.runs.hashes import file_hash, tensor_hash
from precaudit.recording.runs.hosts import Hosts, hosts_here
from precaudit.recording.runs.kinds import write_manifest
from precaudit.recording.runs.point_lines import place_record
from precaudit.recording.runs.program_places import not_taken, step_values, steps_of
from precaudit.recording.runs.programs import POINTS, ProgramRun, file_name
from precaudit.recording.runs.shards import Shards, check_shared
from precaudit.recording.runs.writer import Lines
from precaudit.recording.tracing.parts import Spread
from precaudit.schema.places import Place
from precaudit.schema.records.lines import decode_lines, write_lines
from precaudit.schema.records.manifests import MANIFEST
from precaudit.schema.records.runs import PointRecord


@dataclass
class CallWriter:
    """Writes what calls hold below a run's folder, one case after another; ``shards``: of several processes.

    ``pending``: what this case wrote whose hash is not known yet, since parts lie with several processes. ``lines``:
    of the tensors that it wrote, for points.jsonl.
    """

    folder: Path
    hosts: Hosts = field(default_factory=hosts_here)
    shards: Shards = field(init=False)
    pending: list["Stored"] = field(default_factory=list)
    lines: list[PointRecord] = field(default_factory=list)
    bytes: int = 0

    def write(
        self, record: ProgramRun, at: tuple[str, int], inputs: Any, held: Any, named: Mapping[str, Any]
    ) -> dict[str, str]:
        """Write what a call holds; return the hash of each file that is whole."""
        if record.sketch is not None:
            return self._write(Stored(record, *at, "taps"), sketched(inputs, held))
        outputs = {p.name for p in record.outputs}
        hashes = dict[str, str]()
        named = {n: x for n, x in named.items() if n in outputs}
        for kind, tensors in (("taps", held), ("inputs", _leaves(inputs)), ("outputs", named)):
            hashes |= self._write(Stored(record, *at, kind), tensors)
        return hashes

    def _write(self, made: "Stored", tensors: Mapping[str, Any]) -> dict[str, str]:
        if self.hosts.several:
            self._write_parts(made, tensors)
            return {}
        arrays = {k: np.asarray(on_host(x), order="C") for k, x in tensors.items()}
        digest, nbytes = write_tensors(self.folder, made.name, arrays)
        self.bytes += nbytes
        self.lines += made.lines(arrays)
        return {made.name: digest}

    def _write_parts(self, made: "Stored", tensors: Mapping[str, Any]) -> None:
        first, below = self.hosts.first, made.name.removeprefix(f"{TENSORS}/")
        arrays = [Spread.of(x, first).whole(f"{below}/{k}") for k, x in tensors.items()]
        self.bytes += self.shards.arrays.write(arrays, metadata=first)
        self.pending.append(made)

    def end(self, case: str) -> tuple[dict[str, str], int]:
        """Return the hashes that were not known, and the bytes of a case, once every process has written its parts.

        Each reader (``Shards``) reads some of what all wrote, as it lies on the disk.
        """
        hosts, what = self.hosts, f"writing {case}"
        every, lines, written = self.pending, self.lines, self.bytes
        self.pending, self.lines, self.bytes = [], [], 0
        if not hosts.several:
            self._add_lines(lines)
            return {}, written
        self.shards.share(what, [case], written)
        readers = self.shards.readers
        own = dict[str, str]()
        if hosts.index < readers:
            for made in every[hosts.index :: readers]:
                arrays = read_arrays(self.folder, made.name)
                own[made.name] = arrays_hash(arrays)
                lines += made.lines(arrays)
            self.shards.put_lines(lines)
        found, total = dict[str, str](), 0
        for said in hosts.share(what, msgspec.json.encode((own, written)).decode()):
            hashes, nbytes = msgspec.json.decode(said, type=tuple[dict[str, str], int])
            found, total = found | hashes, total + nbytes
        if hosts.first:
            order = {made.name: i for i, made in enumerate(every)}
            self._add_lines(sorted(chain(*self.shards.take_lines()), key=lambda p: order[p.file]))
        return found, total

    def _add_lines(self, lines: Sequence[PointRecord]) -> None:
        """Add to points.jsonl, before run.json says that the case is whole."""
        if not lines:
            return
        growing = Lines(self.folder / POINTS)
        growing.add(lines)
        growing.close()

    def manifest(self, record: ProgramRun) -> None:
        """Write run.json, of several processes the first."""
        if self.hosts.first:
            write_manifest(self.folder, record)
            commit(self.folder)

    def begin(self, there: Collection[str]) -> None:
        """Return once run.json is there; raises UserError where a process does not see it.

        ``there``: the cases that are written whole, of a run that goes on: lines of others are left out.
        """
        path = self.folder / POINTS
        if self.hosts.first and path.is_file():
            held = decode_lines(path.read_bytes(), PointRecord, str(path), tolerate_tail=True)
            write_lines(path, [p for p in held if p.prompt in there])
        if self.hosts.several:
            check_shared(self.folder / MANIFEST, self.hosts)
            self.shards = Shards(self.folder, self.hosts)

    def finish(self, record: ProgramRun) -> None:
        """Write run.json of a run that is whole, with the hash of points.jsonl; return once it is there."""
        if self.hosts.first and (path := self.folder / POINTS).is_file():
            record = msgspec.structs.replace(record, hashes={**record.hashes, POINTS: file_hash(path)})
        self.manifest(record)
        if self.hosts.several:
            self.shards.finish()


@dataclass(frozen=True)
class Stored:
    """What a call has in a file: its ``taps``, ``inputs`` or ``outputs``."""

    record: ProgramRun
    case: str
    call: int
    kind: str

    @property
    def name(self) -> str:
        """The file, below the run's folder."""
        return file_name(self.record, self.case, self.call, self.kind)

    def lines(self, arrays: Mapping[str, Array]) -> Iterator[PointRecord]:
        """Yield the lines of points.jsonl of its arrays, one a step of the scans; sketches have none.

        Axes have no names here, and rows no positions. What was not run, in a branch or a loop, has no line.
        """
        run = self.record
        points = {"taps": run.points, "outputs": run.outputs}.get(self.kind, ()) if run.sketch is None else ()
        for p in points:
            for layer in steps_of(run, p):
                if not_taken(run, p, layer, arrays) is not None:
                    continue
                values = step_values(run, p, layer, arrays[p.name])
                place = Place(self.case, run.phase, self.call, layer, p.name)
                yield place_record(place, values, (self.name, p.name), support=p.support)


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
