"""Commands that a sitting runs: each as one gives it, in a process of its own, its output as it comes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

PRECAUDIT = (sys.executable, "-m", "precaudit")


async def run_command(words: Sequence[str], columns: int, say: Callable[[str], object]) -> int:
    """Run ``precaudit`` with words, give ``say`` every line that it prints, and return its exit code.

    Where this is cancelled, the process and what it began are ended.
    """
    process = await asyncio.create_subprocess_exec(
        *PRECAUDIT,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": str(columns)},
        start_new_session=True,
        limit=1 << 20,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            say(line.decode("utf-8", "replace").rstrip("\n"))
        return await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await process.wait()
