"""``python -m precaudit``."""

from precaudit.cli import main

main()
