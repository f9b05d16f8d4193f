"""Rollouts made elsewhere: token ids and their log-probabilities, a sequence a line (docs/rollouts.md)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precaudit.errors import UserError

FORM = '{"id": "r1", "prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}'


@dataclass(frozen=True)
class Rollout:
    """A generated sequence: token ids of its prompt and of what was drawn, and the engine's log-probabilities [T].

    Log-probabilities are as they stand in the file: NaN and infinities, too.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def read_rollouts(path: Path) -> list[Rollout]:
    """Read JSONL of rollouts: our form, vLLM's RequestOutput or SGLang's answer; raises UserError with the line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no rollouts at {path}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    found: dict[str, Rollout] = {}
    for i, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{i}"
        try:
            raw = json.loads(line)  # Python's, since its NaN and Infinity are what engines in Python write
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}") from None
        for rollout in _rollouts(raw, where, str(i)):
            if rollout.id in found:
                raise UserError(f"{where}: id {rollout.id!r} is used twice")
            found[rollout.id] = rollout
    if not found:
        raise UserError(f"{path}: no rollout in it; a line is like {FORM}")
    return list(found.values())


def format_rollouts(rollouts: Iterable[tuple[str, Rollout]], temperature: float) -> str:
    """Return (policy, rollout) pairs as JSONL that ``read_rollouts`` takes, NaN as Python writes it."""
    lines = [
        json.dumps(
            {
                "id": r.id,
                "prompt_token_ids": r.prompt,
                "token_ids": r.tokens,
                "logprobs": r.logprobs,
                "policy": policy,
                "temperature": temperature,
            }
        )
        for policy, r in rollouts
    ]
    return "".join(f"{line}\n" for line in lines)


def _rollouts(raw: object, where: str, number: str) -> Iterator[Rollout]:
    """Yield the rollouts of a line: one, or one for each of vLLM's outputs."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: an object is wanted, such as {FORM}")
    if "outputs" in raw:
        request = str(raw.get("request_id", number))
        outputs = raw["outputs"]
        if not isinstance(outputs, list) or not all(isinstance(o, dict) for o in outputs):
            raise UserError(f"{where}: outputs is not a list of objects")
        for n, output in enumerate(outputs):
            name = request if len(outputs) == 1 else f"{request}/{output.get('index', n)}"
            ids = _ids(output, "token_ids", where)
            yield _check_rollout(where, name, _ids(raw, "prompt_token_ids", where), ids, _values(output, ids, where))
    elif "meta_info" in raw:
        yield _sglang(raw, where, number)
    else:
        ids = _ids(raw, "token_ids", where)
        name = str(raw.get("id", number))
        yield _check_rollout(where, name, _ids(raw, "prompt_token_ids", where), ids, _values(raw, ids, where))


def _sglang(raw: dict[str, Any], where: str, number: str) -> Rollout:
    """Return the rollout of an answer of /generate: triples (log-probability, token id, text) in meta_info."""
    info = raw["meta_info"]
    if not isinstance(info, dict):
        raise UserError(f"{where}: meta_info is not an object")
    pairs = _triples(info, "output_token_logprobs", where)
    ids = tuple(i for _, i in pairs)
    if "output_ids" in raw and _ids(raw, "output_ids", where) != ids:
        raise UserError(f"{where}: output_ids are not the ids in output_token_logprobs")
    if "prompt_token_ids" in raw:
        prompt = _ids(raw, "prompt_token_ids", where)
    else:
        prompt = tuple(i for _, i in _triples(info, "input_token_logprobs", where))
        if info.get("prompt_tokens", len(prompt)) != len(prompt):
            raise UserError(
                f"{where}: {len(prompt)} of {info['prompt_tokens']} prompt tokens are there; "
                "ask SGLang for logprob_start_len 0, or add prompt_token_ids"
            )
    return _check_rollout(where, str(info.get("id", number)), prompt, ids, [x for x, _ in pairs])


def _triples(info: dict[str, Any], key: str, where: str) -> list[tuple[Any, int]]:
    triples = info.get(key)
    if not isinstance(triples, list) or not all(isinstance(t, list) and len(t) >= 2 for t in triples):
        raise UserError(f"{where}: meta_info has no {key}, a list of [log-probability, token id, text]")
    ids = _ids({key: [t[1] for t in triples]}, key, where)
    return [(t[0], i) for t, i in zip(triples, ids, strict=True)]


def _ids(raw: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    ids = raw.get(key)
    if not isinstance(ids, list):
        raise UserError(f"{where}: {key} is missing or no list; a line is like {FORM}")
    for n, i in enumerate(ids):
        if not isinstance(i, int) or isinstance(i, bool):
            raise UserError(f"{where}: {key}[{n}] is {str(i)[:40]!r}, no token id")
    return tuple(ids)


def _values(raw: dict[str, Any], ids: tuple[int, ...], where: str) -> list[Any]:
    """Return the log-probability of every token: numbers, or vLLM's {token id: {"logprob": number}}."""
    values = raw.get("logprobs")
    if not isinstance(values, list):
        raise UserError(f"{where}: logprobs is missing or no list; was the engine asked for log-probabilities?")
    if len(values) != len(ids):
        raise UserError(f"{where}: {len(values)} log-probabilities for {len(ids)} tokens")
    return [_of(x, i, n, where) if isinstance(x, dict) else x for n, (x, i) in enumerate(zip(values, ids, strict=True))]


def _of(table: dict[str, Any], token: int, n: int, where: str) -> Any:
    if str(token) not in table:
        raise UserError(f"{where}: logprobs[{n}] has no entry for token {token}, which was sampled")
    entry = table[str(token)]
    return entry.get("logprob") if isinstance(entry, dict) else entry


def _check_rollout(where: str, name: str, prompt: tuple[int, ...], ids: tuple[int, ...], values: list[Any]) -> Rollout:
    for n, x in enumerate(values):
        if not isinstance(x, int | float) or isinstance(x, bool):
            raise UserError(f"{where}: logprobs[{n}] is {str(x)[:40]!r}, no number")
    if not prompt:
        raise UserError(f"{where}: prompt_token_ids is empty: the first token's log-probability has no input")
    try:
        return Rollout(name, prompt, ids, tuple(float(x) for x in values))
    except OverflowError:
        raise UserError(f"{where}: a log-probability has more digits than a float") from None
