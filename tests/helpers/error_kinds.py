"""Error records by the name of their kind."""

from precaudit.schema.records.errors import KINDS


def known_fields(kind, fields):
    """Return those of some fields that records of a kind have."""
    return {name: x for name, x in fields.items() if name in KINDS[kind].__struct_fields__}
