"""Records that are found by their places in their file are those of a dictionary of them."""

from array import array

import msgspec
import pytest

from precaudit.judging.placed import Placed
from precaudit.schema.records.base import Record


class Mark(Record, frozen=True):
    """A record that is found by its place."""

    at: int
    told: str

    @property
    def place(self):
        return self.at


def placed(path, marks, hashed=hash):
    """Write records, an empty line after each, and return them by place."""
    starts, hashes = array("Q", [0]), array("q")
    with path.open("wb") as f:
        for m in marks:
            hashes.append(hashed(m.place))
            f.write(msgspec.json.encode(m) + b"\n\n")
            starts.append(f.tell())
    return Placed(path, msgspec.json.Decoder(Mark).decode, starts, hashes)


MARKS = [Mark(at=i * i - 40, told=f"{'ä' * i}{i}") for i in range(50)]


def test_records_are_found_by_their_places(tmp_path):
    found = placed(tmp_path / "f", MARKS)
    assert list(found.items()) == [(m.at, m) for m in MARKS]
    assert len(found) == len(MARKS)
    assert found.get(1) is None
    assert -40 in found


def test_of_several_records_of_a_place_the_last_counts(tmp_path):
    again = [*MARKS, *(Mark(at=m.at, told="again") for m in MARKS[5:9]), Mark(at=MARKS[6].at, told="last")]
    found = placed(tmp_path / "f", again)
    wanted = {m.at: m for m in again}
    assert dict(found) == wanted
    assert len(found) == len(wanted) == len(list(found))


def test_places_whose_hashes_are_the_same_are_told_apart(tmp_path, monkeypatch):
    class Place(int):
        def __hash__(self):
            return 7

    monkeypatch.setattr(Mark, "place", property(lambda m: Place(m.at)))
    again = [*MARKS, Mark(at=MARKS[3].at, told="again")]
    found = placed(tmp_path / "f", again)
    assert {int(at): found[Place(at)] for at in found} == {m.at: m for m in again}
    with pytest.raises(KeyError):
        found[Place(2)]
