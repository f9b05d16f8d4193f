"""The lines of every file precaudit writes, as frozen types (docs/files.md). JSON Schemas are generated from these."""
