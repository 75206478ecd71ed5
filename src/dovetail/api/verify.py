"""verify: where two implementations of a model diverge, whether that is rounding or a bug, and which bug."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import silent
from dovetail.api.options import InFile, Length, RunDtype, Seed
from dovetail.api.record import STEPS
from dovetail.api.result import Event, Result, Watch, unwatched
from dovetail.core.dtypes import dtype_of
from dovetail.core.errors import FileError, SpecError, UsageError
from dovetail.core.limits import ANSWER_SECONDS
from dovetail.core.option import Option
from dovetail.views.blocks import View
from dovetail.views.page import Page

if TYPE_CHECKING:
    import torch

    from dovetail.proof.compare.check import Pass, Verdict
    from dovetail.proof.compare.comparison import Status
    from dovetail.proof.compare.opening import SideLike
    from dovetail.proof.compare.prompt import Prompt
    from dovetail.proof.compare.server import ServerRow, ServerVerdict
    from dovetail.proof.compare.sides import Side
    from dovetail.proof.rollouts.verdict import RolloutStatus, RolloutVerdict
    from dovetail.text.tokenizer import Tokenizer

MOST_ROWS, MOST_TOKENS = 256, 65_536  # of a prompt
SERVER = ("http://", "https://")


@dc.dataclass(frozen=True, repr=False)
class Verification(Result):
    """The verdict: `status` is equal, rounding, structural or non-finite; of rollouts also sampling or stale."""

    verdict: Verdict | ServerVerdict | RolloutVerdict
    every: bool = False  # whether the table has a line per tap in every layer

    @property
    def status(self) -> Status | RolloutStatus:
        """The verdict in one word."""
        return self.verdict.status

    @property
    def failed(self) -> bool:
        """Whether the sides are two functions, or hold NaN or infinity; of rollouts, whether the gap is more than settings,
        older weights and rounding."""
        return self.verdict.failed

    @property
    def exit_code(self) -> int:
        return int(self.failed)

    def to_dict(self) -> dict[str, Any]:
        return self.verdict.data()

    def view(self, width: int) -> View:
        from dovetail.views.verification import verdict_view

        return verdict_view(self.verdict, self.every)

    def page(self) -> Page:
        from dovetail.views.verification import verdict_page

        return Page(f"verify: {self.status}", verdict_page(self.verdict))


def verify(
    a: Annotated[SideLike, Option("A side: DIR, hf:DIR, py:FILE.py:FACTORY or emit:FILE.py.", argument=True)],
    b: Annotated[
        SideLike | None,
        Option(
            "Another, dump:DIR, vllm:DIR, mlx:DIR, llamacpp:FILE.gguf or http://HOST:PORT/v1; none with --rollouts.",
            argument=True,
        ),
    ] = None,
    *,
    rollouts: Annotated[
        str | Path | None,
        InFile(
            "Explain the log-probs that a sampler recorded: JSON lines with prompt_ids, completion_ids and logprobs, or "
            "NeMo-RL's train_data_stepN.jsonl."
        ),
    ] = None,
    older: Annotated[
        Sequence[SideLike] | str | Path,
        Option(
            "An earlier checkpoint that may have sampled the rollouts: DIR or hf:DIR; may be given many times.", repeat=True
        ),
    ] = (),
    prompt: Annotated[
        Sequence[str] | str,
        Option(
            "A text that both sides read, by the tokenizer of the first directory that has one; may be given many times.",
            repeat=True,
        ),
    ] = (),
    rows: Annotated[int, Option("Rows of random tokens, if no prompt is given.")] = 2,
    length: Annotated[int | None, Length("Tokens per row; by default enough to pass the edge of a short window.")] = None,
    longest: Annotated[
        int,
        Option(
            "The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."
        ),
    ] = 4096,
    decode: Annotated[bool, Option("Also decode with a cache.")] = True,
    dtype: Annotated[
        str | torch.dtype | None, RunDtype("Run both sides in this dtype; by default each in that of its weights.")
    ] = None,
    map: Annotated[
        Iterable[str] | Mapping[str, str],
        Option(
            "A module of a py: side that computes the output of one of ours: 'blocks.{}.attn.proj=layers.{}.mixer.o'; {} is "
            "the number of the layer.",
            repeat=True,
        ),
    ] = (),
    model: Annotated[str | None, Option("The name of the model on a server that has several.")] = None,
    timeout: Annotated[
        float, Option("Seconds that one answer of a server may take in all.", low=0.1, high=3600.0)
    ] = ANSWER_SECONDS,
    python: Annotated[
        str | Path | None, Option("The interpreter of another engine's environment, where B is recorded by one.")
    ] = None,
    seed: Annotated[int, Seed("The seed of the random prompts.")] = 0,
    why: Annotated[bool, Option("Search for the cause of a difference.")] = True,
    every: Annotated[bool, Option("A line per tap in every layer.")] = False,
    progress: Callable[[str], None] | None = None,
    watch: Watch = unwatched,
) -> Verification:
    """Compare two implementations on the same prompts, tap by tap, in their own dtype and in float64.

    A side is a built model, a function that returns an nn.Module of token ids, a model directory, `hf:DIR` (run by
    transformers), `py:FILE.py:FACTORY` (the file is executed), `emit:FILE.py`, or, as the second side, `http://…` (a server) or
    `dump:DIR` (activations that another engine recorded, with the ids it ran) or `vllm:DIR`, `mlx:DIR`, `llamacpp:FILE.gguf`,
    `transformers:DIR` (recorded now by the engine's own interpreter, `python`, in float32 unless `dtype` is given).
    `prompt` are texts (by the tokenizer of the first directory that has one) or token ids (`"3 14 15"`); by default `rows` rows
    of random tokens. `longest` bounds the long prompt, which passes every window; 0: none. `map` pairs modules by name:
    {"blocks.{}.attn.proj": "layers.{}.mixer.o"}. `model` is a server's name of its model, and `timeout` the seconds that one of
    its answers may take. `why` searches for the cause of a difference.

    With `rollouts`, a file of what a sampler recorded, there is no second side: the gap between its log-probs and those of `a`
    is explained; `older` are earlier checkpoints that may have sampled it. `progress` is called with a line per step, and
    `watch` with the result of each pass, or prompt of a server, as soon as it is known.
    """
    from dovetail.proof.compare.check import verify as verify_sides
    from dovetail.proof.compare.dump import Dump
    from dovetail.proof.compare.dump_check import verify_dump
    from dovetail.proof.compare.engines import engines, recorded
    from dovetail.proof.compare.opening import DUMP, local, pair
    from dovetail.proof.compare.server import compare_server

    report_step = progress or silent
    on_pass, on_row = _watching(watch)
    dtype = None if dtype is None else dtype_of(dtype)
    if isinstance(a, str) and a.startswith(SERVER):
        raise FileError(f"{a}: a server can be the second side only; the first must be run here")
    if isinstance(a, str) and (a.startswith(DUMP) or a.partition(":")[0] in engines()):
        raise FileError(f"{a}: a dump or another engine can be the second side only; the first must be run here")
    pairs = _pairs(map)
    if rollouts is not None:
        if b is not None:
            raise UsageError("rollouts are compared with one model; give one side")
        return _rollouts(a, rollouts, older, dtype, pairs, why, report_step)
    if b is None:
        raise UsageError("verify compares two sides; give a second one, or --rollouts FILE")
    if older:
        raise UsageError("--older names the weights that sampled rollouts; also give --rollouts FILE")
    texts, tokenizer = (prompt,) if isinstance(prompt, str) else tuple(prompt), _tokenizer(a, b)
    random = _RandomPrompt(rows, length, seed)
    report_step(f"reading {_label(a)} and {_label(b)}")
    if isinstance(b, str) and b.startswith(SERVER):
        side = local(a, pairs)
        read = _prompt(texts, random, tokenizer, side)
        verdict = compare_server(
            side, b, read, model=model, tokenizer=tokenizer, seconds=timeout, progress=report_step, watch=on_row
        )
        return Verification(verdict)
    if isinstance(b, str) and b.startswith(DUMP):
        side = local(a, pairs)
        return Verification(verify_dump(side, Dump(b.removeprefix(DUMP)), why=why, progress=report_step, watch=on_pass), every)
    if isinstance(b, str) and b.partition(":")[0] in engines():
        engine, _, where = b.partition(":")
        side = local(a, pairs)
        ids = _prompt(texts, random, tokenizer, side).ids()
        name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        report_step(f"recording {b}")
        with recorded(engine, where, ids, steps=STEPS if decode else 0, dtype=name, python=python) as dump:
            return Verification(verify_dump(side, dump, why=why, progress=report_step, watch=on_pass), every)
    first, second = pair(a, b, pairs)
    read = _prompt(texts, random, tokenizer, first, second)
    verdict = verify_sides(
        first, second, read, dtype=dtype, why=why, decode=decode, longest=longest, progress=report_step, watch=on_pass
    )
    return Verification(verdict, every)


def _watching(watch: Watch) -> tuple[Callable[[Pass], None], Callable[[int, ServerRow], None]]:
    """Return what is called with each pass over two sides, and with each prompt of a server."""
    from dovetail.views.verification import pass_line, row_line

    return (
        lambda one: watch(Event("pass", one.data(), pass_line(one))),
        lambda number, row: watch(Event("prompt", {"prompt": number, **row.data()}, row_line(number, row))),
    )


def _rollouts(
    a: SideLike,
    file: str | Path,
    older: Sequence[SideLike] | str | Path,
    dtype: torch.dtype | None,
    pairs: Mapping[str, str],
    why: bool,
    progress: Callable[[str], None],
) -> Verification:
    """Explain the gap between the log-probs in a file and those of a side."""
    from dovetail.proof.compare.opening import EMITTED, local
    from dovetail.proof.rollouts.check import explain_rollouts
    from dovetail.proof.rollouts.file import read_rollouts

    if isinstance(a, str) and a.startswith(EMITTED):
        raise UsageError(f"{a}: emitted files hold no weights; give the model directory")
    progress(f"reading {file}")
    rollouts = read_rollouts(file)
    before = (older,) if isinstance(older, (str, Path)) else tuple(older)
    progress(f"reading {_label(a)}")
    side, earlier = local(a, pairs), [local(one, pairs) for one in before]
    verdict = explain_rollouts(side, str(file), rollouts, older=earlier, dtype=dtype, why=why, progress=progress)
    return Verification(verdict)


def _label(side: SideLike) -> str:
    return str(side) if isinstance(side, (str, Path)) else "a model in memory"


def _pairs(map: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
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


@dc.dataclass(frozen=True)
class _RandomPrompt:
    rows: int
    length: int | None
    seed: int

    def __post_init__(self) -> None:
        for name, value, most in (("rows", self.rows, MOST_ROWS), ("length", self.length, MOST_TOKENS)):
            if value is not None and not 1 <= value <= most:
                raise SpecError(f"--{name}", f"{value} is not from 1 to {most:,}")


def _prompt(texts: Sequence[str], random: _RandomPrompt, tokenizer: Tokenizer | None, *sides: Side) -> Prompt:
    """Return the token ids of the texts, or random tokens where there are none."""
    from dovetail.proof.compare.check import padding_token
    from dovetail.proof.compare.prompt import prompt_of_ids, random_prompt

    spec = next((side.spec for side in sides if side.spec is not None), None)
    if not texts:
        if spec is None:
            remedy = "give --prompt ids, e.g. --prompt '3 14 15'"
            raise SpecError("prompt", "neither side has a spec to draw a prompt from", remedy)
        avoid = padding_token(*sides)
        return random_prompt(spec, rows=random.rows, length=random.length, seed=random.seed, avoid=avoid)
    if tokenizer is not None:
        rows = [tokenizer.prompt(text) for text in texts]
    elif all(text.replace(" ", "").isdigit() for text in texts):
        rows = [[int(word) for word in text.split()] for text in texts]
    else:
        raise SpecError("prompt", "no side has a tokenizer", "give token ids instead: --prompt '3 14 15'")
    shortest = min(len(row) for row in rows)  # both sides read rows of one length
    if shortest > MOST_TOKENS:
        raise SpecError("prompt", f"{shortest:,} tokens; the limit is {MOST_TOKENS:,}", "give a shorter text")
    return prompt_of_ids([row[:shortest] for row in rows], None if spec is None else spec.vocab)


def _tokenizer(*sides: SideLike) -> Tokenizer | None:
    """Return the tokenizer of the first directory that has one."""
    from dovetail.text.tokenizer import TOKENIZER_FILE, Tokenizer

    for side in sides:
        if isinstance(side, (str, Path)):
            place = Path(str(side).removeprefix("hf:"))
            if (place / TOKENIZER_FILE).is_file():
                return Tokenizer.load(place)
    return None
