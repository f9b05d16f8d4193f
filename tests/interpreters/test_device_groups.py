"""Which devices a collective goes over, in every way that HLO writes it."""

import pytest

from precaudit.interpreters.mesh.groups import device_groups, source_of
from precaudit.interpreters.tpu.hlo import Instruction


def collective(**attributes):
    return Instruction("x", "all-reduce", (), (), "", attributes, False, 1)


ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ROWS), ("{{1,0},{3,2}}", ((1, 0), (3, 2))), ("", ((0, 1, 2, 3),)), ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ROWS), ("[2,2]<=[2,2]T(1,0)", COLUMNS), ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'b'}", ROWS), ("mesh['a'=2,'b'=2] {'a'}", COLUMNS),
        ("mesh['a'=2,'b'=1,'c'=2] {'a','c'}", ((0, 1, 2, 3),)),
    ],
)  # fmt: skip
def test_groups_are_read(text, groups):
    assert device_groups(collective(replica_groups=text), 4) == groups


def test_devices_of_a_mesh_may_be_turned():
    turned = collective(replica_groups="mesh['a'=2,'b'=1,'c'=2]", device_ids="([2,2]T(1,0)) {'a'}")
    assert device_groups(turned, 4) == ROWS


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1}}",
        "{{0,1},{1,2}}",
        "{{0,1},{2,3}",
        "[2,4]<=[8]",
        "mesh['a'=4] {'b'}",
        "mesh['a'=2] {'a'}",
        "mesh[] {'a'}",
        "all",
    ],
)
def test_what_is_no_whole_set_of_devices_is_refused(text):
    with pytest.raises(ValueError, match="groups of devices"):
        device_groups(collective(replica_groups=text), 4)


def test_a_permutation_says_who_sends():
    assert source_of(collective(source_target_pairs="{{0,1},{1,2},{3,0}}"), 4) == (3, 0, 1, -1)
    for text in ("", "{{0,4}}", "{{0,1,2}}"):
        with pytest.raises(ValueError, match="pairs of devices"):
            source_of(collective(source_target_pairs=text), 4)
