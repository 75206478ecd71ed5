"""Rollouts in JSON lines: what a sampler recorded. Two forms of a line are read, told apart by their keys.

    ours      {"prompt_ids": [3, 14], "completion_ids": [15, 9], "logprobs": [-0.2, -1.7]}      and, where recorded,
              "mask" (0: a token that was not sampled, such as a tool's answer), "trainer_logprobs", "temperature", "top_p",
              "top_k", "min_p", "weights_version"
    NeMo-RL   train_data_stepN.jsonl: "token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs",
              "input_lengths", "sample_loss_mask"; each value may be a batch of one: [[…]]

A file is untrusted input: bytes, lines and tokens are bounded, and a number that is not finite, a log-prob above 0 or a list of
another length is refused with the number of its line.
"""

from __future__ import annotations

import dataclasses as dc
import os
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from dovetail.base.errors import FileError, names_or_nearest, printable
from dovetail.base.limits import ROLLOUT_BYTES, ROLLOUT_LINE_BYTES, ROLLOUT_LINES, ROLLOUT_TOKENS, ROLLOUT_TOTAL
from dovetail.disk.untrusted import open_regular, parse_object, problem
from dovetail.proof.rollouts.sampling import Settings

OURS = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("mask", "trainer_logprobs", "temperature", "top_p", "top_k", "min_p", "weights_version")
NEMO = ("token_ids", "token_loss_mask", "generation_logprobs")
PER_ROW = ("input_lengths", "sample_loss_mask")  # of NeMo-RL's keys, those with one number per row
ABOVE_ZERO = 1e-3  # a log-prob may be above 0 by rounding


@dc.dataclass(frozen=True)
class Rollout:
    """One sequence: the sampler's log-prob of each token at its own position, 0 where `sampled` is False."""

    line: int
    tokens: list[int]
    logprobs: list[float]
    sampled: list[bool]
    settings: Settings | None = None  # as recorded; None: not recorded
    version: int | str | None = None  # of the weights that sampled it
    trainer: list[float] | None = None  # the trainer's log-probs as recorded

    @property
    def first(self) -> int:
        """The position of the first sampled token."""
        return self.sampled.index(True)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Read every rollout of a file; a line without a sampled token is left out."""
    rollouts, total = [], 0
    for number, data in _lines(Path(path)):
        where = f"{path}:{number}"
        rollout = _rollout(parse_object(data, where), number, where)
        if rollout is None:
            continue
        total += len(rollout.tokens)
        if total > ROLLOUT_TOTAL:
            raise FileError(f"{where}: the file holds more than {ROLLOUT_TOTAL:,} tokens; give fewer rollouts")
        rollouts.append(rollout)
    if not rollouts:
        raise FileError(f"{path}: holds no sampled token; write one JSON object per line with {', '.join(OURS)}")
    return rollouts


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every line that is not empty."""
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{path}: cannot be read ({problem(error)})") from error
    with os.fdopen(open_regular(real, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > ROLLOUT_BYTES:
            raise FileError(f"{path}: has {size:,} bytes; the limit is {ROLLOUT_BYTES:,}")
        number = 0
        while data := file.readline(ROLLOUT_LINE_BYTES + 1):
            number += 1
            if len(data) > ROLLOUT_LINE_BYTES:
                raise FileError(f"{path}:{number}: is longer than {ROLLOUT_LINE_BYTES:,} bytes, the limit for a line")
            if number > ROLLOUT_LINES:
                raise FileError(f"{path}: has more than {ROLLOUT_LINES:,} lines; give fewer rollouts")
            if data.strip():
                yield number, data


def _rollout(data: Mapping[str, Any], number: int, where: str) -> Rollout | None:
    rollout = _nemo(data, number, where) if NEMO[0] in data else _ours(data, number, where)
    if rollout is None or not any(rollout.sampled):
        return None
    if len(rollout.tokens) > ROLLOUT_TOKENS:
        raise FileError(f"{where}: has {len(rollout.tokens):,} tokens; the limit is {ROLLOUT_TOKENS:,}")
    if rollout.first == 0:
        raise FileError(f"{where}: the first token has no token before it; give at least one prompt token")
    return rollout


def _ours(data: Mapping[str, Any], number: int, where: str) -> Rollout:
    for name in OURS:
        if name not in data:
            known = f"a line has {', '.join(OURS)}, or NeMo-RL's {', '.join(NEMO)}"
            raise FileError(f"{where}: {name} is missing; {known}")
    for name in data:
        if name in (*OURS, *OPTIONAL) or name.startswith("_"):
            continue
        nearest = names_or_nearest(name, (*OURS, *OPTIONAL), "keys")
        raise FileError(f"{where}: {printable(name)!r} is no key of a rollout; {nearest}")
    prompt, completion = _ids(data, "prompt_ids", where), _ids(data, "completion_ids", where)
    logprobs = _logprobs(data, "logprobs", len(completion), where)
    mask = _mask(data, "mask", len(completion), where)
    trainer = _logprobs(data, "trainer_logprobs", len(completion), where) if "trainer_logprobs" in data else None
    before = len(prompt)
    return Rollout(
        number,
        prompt + completion,
        [0.0] * before + logprobs,
        [False] * before + mask,
        _settings(data, where),
        _version(data, where),
        None if trainer is None else [0.0] * before + trainer,
    )


def _nemo(data: Mapping[str, Any], number: int, where: str) -> Rollout | None:
    """A line of NeMo-RL: padded to the longest row of its batch, the log-prob of a token at the token's own position."""
    for name in NEMO:
        if name not in data:
            raise FileError(f"{where}: {name} is missing; a line of NeMo-RL has {', '.join(NEMO)}")
    row = {name: _unbatched(name, value) for name, value in data.items()}
    if "sample_loss_mask" in row and not row["sample_loss_mask"]:
        return None
    tokens = _ids(row, "token_ids", where)
    mask = _mask(row, "token_loss_mask", len(tokens), where)
    logprobs = _logprobs(row, "generation_logprobs", len(tokens), where, mask)
    trainer = _logprobs(row, "prev_logprobs", len(tokens), where, mask) if "prev_logprobs" in row else None
    length = row.get("input_lengths", len(tokens))
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise FileError(f"{where}: input_lengths is {printable(str(length))}, and there are {len(tokens)} tokens")
    cut = slice(0, length)
    return Rollout(number, tokens[cut], logprobs[cut], mask[cut], trainer=None if trainer is None else trainer[cut])


def _unbatched(name: str, value: Any) -> Any:
    """The row of a batch of one; of a number per row, the number."""
    one = isinstance(value, list) and len(value) == 1
    return value[0] if one and (isinstance(value[0], list) or name in PER_ROW) else value


def _column(data: Mapping[str, Any], name: str, where: str, count: int | None = None, of: str = "numbers") -> list[Any]:
    """The list under a name, with one value for each of `count` tokens."""
    values = data[name]
    if not isinstance(values, list):
        raise FileError(f"{where}: {name} is not a list")
    if count is not None and len(values) != count:
        raise FileError(f"{where}: {name} has {len(values)} {of} for {count} tokens")
    return values


def _refuse(where: str, name: str, i: int, value: Any, wanted: str) -> NoReturn:
    raise FileError(f"{where}: {name}[{i}] is {printable(repr(value))}, not {wanted}")


def _ids(data: Mapping[str, Any], name: str, where: str) -> list[int]:
    values = _column(data, name, where)
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            _refuse(where, name, i, value, "a token id")
    return values


def _logprobs(data: Mapping[str, Any], name: str, count: int, where: str, mask: list[bool] | None = None) -> list[float]:
    values = _column(data, name, where, count)
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            _refuse(where, name, i, value, "a finite number")
        if value > ABOVE_ZERO and (mask is None or mask[i]):
            raise FileError(f"{where}: {name}[{i}] is {value:g}; a log-prob is at most 0")
    return [float(value) for value in values]


def _mask(data: Mapping[str, Any], name: str, count: int, where: str) -> list[bool]:
    values = _column(data, name, where, count, "values") if name in data else [1] * count
    for i, value in enumerate(values):
        if value not in (0, 1):
            _refuse(where, name, i, value, "0 or 1")
    return [bool(value) for value in values]


def _settings(data: Mapping[str, Any], where: str) -> Settings | None:
    """The recorded settings; null, top_p of 1, top_k of 0 or −1 and min_p of 0 keep every token."""
    given = {name: data[name] for name in ("temperature", "top_p", "top_k", "min_p") if data.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise FileError(f"{where}: {name} is {printable(repr(value))}, not a finite number")
    if not given:
        return None
    temperature, top_p, min_p, top_k = (given.get(name, 0) for name in ("temperature", "top_p", "min_p", "top_k"))
    if temperature < 0 or top_p < 0 or top_p > 1 or min_p < 0 or min_p > 1 or top_k != int(top_k):
        raise FileError(f"{where}: temperature is 0 or more, top_p and min_p are from 0 to 1, top_k is a whole number")
    return Settings(
        temperature=float(temperature) or 1.0,  # greedy decoding has no tempered log-probs
        min_p=float(min_p) or None,
        top_k=int(top_k) if top_k > 0 else None,
        top_p=float(top_p) if 0 < top_p < 1 else None,
    )


def _version(data: Mapping[str, Any], where: str) -> int | str | None:
    version = data.get("weights_version")
    if version is None or (isinstance(version, (int, str)) and not isinstance(version, bool)):
        return version
    raise FileError(f"{where}: weights_version is {printable(repr(version))}, not a number or a string")
