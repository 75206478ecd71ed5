"""Open the sides that strings or models name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.base.limits import DECODED, PROMPT_TOKENS
from dovetail.disk.untrusted import Directory
from dovetail.hf.load import Watch
from dovetail.hf.origin import origin
from dovetail.model.model import ModelModule
from dovetail.proof.compare.check import padding_token
from dovetail.proof.compare.dump import Dump
from dovetail.proof.compare.engines import engines, recorded
from dovetail.proof.compare.prompt import Prompt, ids_in, prompt_of_ids, random_prompt
from dovetail.proof.compare.sides import ModelSide, ModuleSide, NativeSide, Side, emitted, from_file
from dovetail.proof.compare.transformers_side import TransformersSide
from dovetail.text.tokenizer import TOKENIZER_FILE, Tokenizer

SideLike = str | Path | ModelModule | Callable[[], nn.Module]  # see sides.py
EMITTED, DUMP = "emit:", "dump:"
SERVER = ("http://", "https://")


def pair(
    a: SideLike, b: SideLike, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None
) -> tuple[Side, Side]:
    """The two sides that two strings or models name."""
    files = [value.removeprefix(EMITTED) if isinstance(value, str) and value.startswith(EMITTED) else None for value in (a, b)]
    if files[0] is not None and files[1] is not None:
        raise FileError(f"{a}, {b}: emitted files hold no weights; one side must be a model directory")
    if files[0] is not None:
        other = local(b, user_map, watch=watch)
        return emitted(files[0], other), other
    first = local(a, user_map, watch=watch)
    return first, local(b, user_map, watch=watch) if files[1] is None else emitted(files[1], first)


def local(value: SideLike, user_map: Mapping[str, str] | None = None, *, watch: Watch | None = None) -> Side:
    """The side that a string, a model or a function that returns a module names, run on this machine."""
    if isinstance(value, ModelModule):
        return ModelSide(value)
    if isinstance(value, nn.Module):
        name = type(value).__name__
        raise FileError(
            f"{name}: a module is also compared in float64, with constants computed in float64; give a function that returns it"
        )
    if not isinstance(value, (str, Path)):
        return ModuleSide(getattr(value, "__name__", type(value).__name__), value, user_map)
    text = str(value)
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return TransformersSide(rest)
    if colon and kind == "py":
        return from_file(rest, user_map or {})
    if not Path(text).is_dir():
        raise FileError(
            f"{text}: no such directory; a side is a directory, hf:DIR, py:FILE.py:FACTORY, emit:FILE.py, dump:DIR, "
            f"ENGINE:MODEL or http://…"
        )
    origin(Directory(text))
    return NativeSide(text, watch=watch)


def check_sides(a: SideLike, b: SideLike | None, rollouts: object, older: object) -> None:
    """Raise unless there are two sides, the first of which runs here, or one and rollouts."""
    if isinstance(a, str) and (a.startswith(SERVER) or is_recorded(a)):
        kind = "a server" if a.startswith(SERVER) else "a dump or another engine"
        raise FileError(f"{a}: {kind} can be the second side only; the first must be run here")
    if rollouts is not None and b is not None:
        raise UsageError("rollouts are compared with one model; give one side")
    if rollouts is None and b is None:
        raise UsageError("verify compares two sides; give a second one, or --rollouts FILE")
    if rollouts is None and older:
        raise UsageError("--older names the weights that sampled rollouts; also give --rollouts FILE")


def is_recorded(side: str) -> bool:
    """Whether a side is a dump, or recorded by another engine."""
    return side.startswith(DUMP) or side.partition(":")[0] in engines()


@contextmanager
def open_dump(
    side: str,
    prompt: Callable[[], Prompt],
    decode: bool,
    dtype: torch.dtype | None,
    python: str | Path | None,
    progress: Callable[[str], None],
) -> Iterator[Dump]:
    """Yield the dump of a side, which another engine records now, or has recorded."""
    if side.startswith(DUMP):
        yield Dump(side.removeprefix(DUMP))
        return
    engine, _, place = side.partition(":")
    name, ids = "float32" if dtype is None else str(dtype).removeprefix("torch."), prompt().ids()
    progress(f"recording {side}")
    with recorded(engine, place, ids, steps=DECODED if decode else 0, dtype=name, python=python) as dump:
        yield dump


def label_of(side: SideLike) -> str:
    """The name of a side in a line of progress."""
    return str(side) if isinstance(side, (str, Path)) else "a model in memory"


def module_pairs(map: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the modules that `map` pairs; strings are THEIRS=OURS."""
    if isinstance(map, Mapping):
        return {theirs: map[theirs] for theirs in map}
    pairs: dict[str, str] = {}
    for text in map:
        theirs, equals, ours = text.partition("=")
        if not equals or not theirs or not ours:
            raise FileError(f"--map takes THEIRS=OURS, not {text!r}")
        pairs[theirs] = ours
    return pairs


def first_tokenizer(*sides: SideLike) -> Tokenizer | None:
    """Return the tokenizer of the first directory that has one."""
    for side in sides:
        if isinstance(side, (str, Path)):
            path = Path(str(side).removeprefix("hf:"))
            if (path / TOKENIZER_FILE).is_file():
                return Tokenizer.load(path)
    return None


def read_prompt(
    prompt: Sequence[str] | str, rows: int, length: int | None, seed: int, tokenizer: Tokenizer | None, *sides: Side
) -> Prompt:
    """Return the token ids of the texts, or random tokens where there are none."""
    texts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    spec = next((side.spec for side in sides if side.spec is not None), None)
    if not texts:
        if spec is None:
            remedy = "give --prompt ids, e.g. --prompt '3 14 15'"
            raise SpecError("prompt", "neither side has a spec to draw a prompt from", remedy)
        avoid = padding_token(*sides)
        return random_prompt(spec, rows=rows, length=length, seed=seed, avoid=avoid)
    if tokenizer is not None:
        ids = [tokenizer.prompt(text) for text in texts]
    elif (ids := ids_in(texts)) is None:
        raise SpecError("prompt", "no side has a tokenizer", "give token ids instead: --prompt '3 14 15'")
    shortest = min(len(row) for row in ids)  # both sides read rows of one length
    if shortest > PROMPT_TOKENS:
        raise SpecError("prompt", f"{shortest:,} tokens; the limit is {PROMPT_TOKENS:,}", "give a shorter text")
    return prompt_of_ids([row[:shortest] for row in ids], None if spec is None else spec.vocab)
