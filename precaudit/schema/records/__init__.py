"""The lines of every file precaudit writes, as frozen types (design §4). JSON Schemas are generated from these."""
