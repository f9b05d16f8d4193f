"""Error records by the name of their kind."""

from typing import get_args

from precaudit.schema.records.errors import ERROR_KINDS, ProductError

KINDS = {kind.kind: kind for kind in (*get_args(ERROR_KINDS), ProductError)}


def known_fields(kind, fields):
    """Return those of some fields that records of a kind have."""
    return {name: x for name, x in fields.items() if name in KINDS[kind].__struct_fields__}
