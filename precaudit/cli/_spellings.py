"""Options as earlier versions and other tools spell them: the first work for one version, of the second we say ours."""

from collections.abc import Iterator, Sequence

import click

OLD = {
    "lint": {"--phase": "--phases"},
    "rollout": {"--policies": "--policy"},
    "sweep": {"--policies": "--policy"},
    "warmup": {"--policies": "--policy"},
    "watch": {"--json": "--functions"},
}
BARE = {("report", "--markdown"): "-"}  # options that took no value, and what they meant
# Words of JAX, transformers, vLLM and others for what our options do; the first of ours that a command has is named.
ELSEWHERE = {
    "--dtype": ("--policy",),
    "--torch-dtype": ("--policy",),
    "--torch_dtype": ("--policy",),
    "--precision": ("--policy",),
    "--kv-cache-dtype": ("--set",),
    "--tensor-parallel-size": ("--mesh",),
    "--tp": ("--mesh",),
    "--max-tokens": ("--new-tokens", "--decode-steps"),
    "--max-new-tokens": ("--new-tokens", "--decode-steps"),
    "--batch-size": ("--batch",),
    "--layer": ("--layers",),
    "--point": ("--points",),
    "--modules": ("--points",),
    "--phase": ("--phases",),
    "--position": ("--positions",),
    "--tokens": ("--positions",),
    "--cases": ("--case",),
    "--policies": ("--policy",),
    "--out": ("-o",),
    "--output-dir": ("-o",),
    "--overwrite": ("--force",),
    "--checkpoint": ("--model",),
    "--md": ("--markdown",),
    "--platform": ("--device",),
    "--text": ("--prompts",),
    "--prompt": ("--prompts",),
}
HOW = {
    "--policy": "--policy NAME, such as bf16, fp32, bf16-fp32-scores",
    "--set": "--set KEY=VALUE, such as kv_cache=float16",
    "--mesh": "--mesh model=N",
    "--prompts": '--prompts FILE, with lines such as {"id": "a", "prompt": "a text"}',
}


def current_spelling(command: click.Command, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments as they are spelled now, and a sentence for each that was not."""
    found, said = [], []
    old, end = OLD.get(command.name or "", {}), _end(command, args)
    for i, word in enumerate(args):
        name, equals, rest = word.partition("=")
        if i < end and name in old:
            said.append(f"{name} is {old[name]} now; the old word works in this version alone")
            word = f"{old[name]}{equals}{rest}"
        found.append(word)
        value = BARE.get((command.name or "", word))
        if value is not None and i < end and (i + 1 == len(args) or args[i + 1].startswith("--")):
            said.append(f"{word} takes a file now, {word} FILE, or {word} {value} for the screen")
            found.append(value)
    return found, said


def _end(command: click.Command, args: Sequence[str]) -> int:
    """Return where options of ours end: what follows ``--``, or the first word of a watched command, is another's."""
    end = args.index("--") if "--" in args else len(args)
    if command.context_settings.get("allow_interspersed_args", True):
        return end
    flags, i = {x for p in command.params if getattr(p, "is_flag", False) for x in p.opts}, 0
    while i < end and args[i].startswith("-"):
        i += 1 if "=" in args[i] or args[i] in flags else 2
    return min(i, end)


def unknown_option(error: click.NoSuchOption) -> str:
    """Return what is said of an option that a command lacks: ours, where another tool's word is known."""
    name, command = error.option_name, None if error.ctx is None else error.ctx.command
    ours = set() if command is None else set(_options(command))
    wanted = next((x for x in ELSEWHERE.get(name, ()) if x in ours), None)
    if wanted is None:
        return error.format_message()
    return f"No such option {name!r}; here it is {HOW.get(wanted, wanted)}"


def _options(command: click.Command) -> Iterator[str]:
    for p in command.params:
        yield from p.opts
