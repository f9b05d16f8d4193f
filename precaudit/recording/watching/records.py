"""What is seen of a watched script, as its process tells it to the one that started it."""

from precaudit.schema.records.base import Count, Number, Record


class Picking(Record, frozen=True, omit_defaults=False):
    """Which calls of which jitted function are recorded, and what of them.

    ``name``, ``file``: the function's, and how the name of its file ends; ``calls``: their numbers, -1 of the last, or
    none for the first of every shape. ``layers``, ``points``, ``positions``: filters, as ``trace`` takes them.
    """

    name: str = ""
    file: str = ""
    calls: tuple[int, ...] = ()
    layers: str | None = None
    points: str | None = None
    positions: str | None = None


class WatchedCommand(Record, frozen=True, omit_defaults=False):
    """The command that made the calls of a run, so that it can be run again.

    ``words``: the interpreter with its options, the script and its arguments; ``folder``: where it was run; ``script``:
    the SHA-256 of the script, none of a module; ``environment``: the variables that JAX and XLA read; ``picked``:
    what was asked for, and ``first``, ``last``: the calls that this run holds.
    """

    words: tuple[str, ...]
    folder: str
    script: str | None
    environment: dict[str, str]
    picked: Picking
    first: Count = 0
    last: Count = 0


class WatchOrder(Record, frozen=True, omit_defaults=False):
    """What is recorded of calls, and what becomes of it.

    ``picked``: of which calls, and what of them; ``command``: what makes the calls, none of a function of one's own;
    ``output``: the folder of the run, none to count calls alone; ``again``: the run whose calls are compared when the
    script has made them once more; ``accum``, ``model``: as ``compare`` takes them; ``diagnose``: runs
    that fail are diagnosed, too; ``most``: bytes that may be
    recorded; ``result``: the file for ``SeenScript``; ``said``: the command, in words. Of a run that is made again,
    ``values``: the file that its FP64 values go to, ``beside``: tensors that it is held against, and ``answer``: the
    file for what is found; none of these: it is compared.
    """

    picked: Picking
    output: str | None
    command: WatchedCommand | None = None
    result: str = ""
    compare: bool = True
    force: bool = False
    most: Count | None = None
    again: str | None = None
    accum: tuple[str, ...] | None = None
    model: str | None = None
    diagnose: bool = False
    said: str = ""
    values: str = ""
    beside: str = ""
    answer: str = ""


class SeenFunction(Record, frozen=True, omit_defaults=False):
    """A jitted function: its name, FILE:LINE, and what was called of it.

    ``within``: calls inside what JAX traces; ``compiled``: for how many shapes, formats and placements of arguments;
    ``shapes``: the formats and shapes of arrays, of each; ``seconds``: that calls took until they came back;
    ``equations``: 0 where it could not be traced again; ``kept``: the numbers of calls that were kept; ``unseen``: what
    was not watched, and why.
    """

    name: str
    place: str
    calls: Count
    within: Count
    compiled: Count
    seconds: Number
    equations: Count
    formats: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    kept: tuple[Count, ...]
    unseen: tuple[str, ...]


class SeenRun(Record, frozen=True, omit_defaults=False):
    """A run that was made of kept calls: its folder, which calls of what, and how many points it has.

    ``compared``: whether they were compared with FP64; ``diagnosis``: what is said of a run that fails, where that was
    asked.
    """

    folder: str
    calls: str
    points: Count
    compared: bool
    diagnosis: tuple[str, ...] = ()


class SeenScript(Record, frozen=True, omit_defaults=False):
    """A script that has ended: its exit code, functions, runs, and what a reader should know."""

    code: Count
    functions: tuple[SeenFunction, ...]
    runs: tuple[SeenRun, ...] = ()
    notes: tuple[str, ...] = ()
