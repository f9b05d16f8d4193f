"""URLs on a command line: each becomes the path of what follows it here."""

from collections.abc import Sequence

from precaudit.buckets import check_known, is_url
from precaudit.mirrors import local_path

NO_PATHS = ("--text", "--scheduler", "--coordinator")  # options whose values may look like URLs


def paths_for(arguments: Sequence[str]) -> list[str]:
    """Return arguments with paths in place of URLs that fsspec opens; raises UserError where it does not.

    What ``watch`` gives to a script is the script's.
    """
    if arguments[:1] == ["watch"]:
        return list(arguments)
    found = []
    for before, word in zip(("", *arguments), arguments, strict=False):
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if before in NO_PATHS or name in NO_PATHS or "://" not in value:
            found.append(word)
            continue
        check_known(value)
        found.append(f"{name}{equals}{local_path(value)}" if is_url(value) else word)
    return found
