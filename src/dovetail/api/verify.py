"""Compare two implementations of a model: where they diverge, whether the cause is rounding or a bug, and which bug.

A side is a model directory (ours or in Hugging Face layout, run by us), hf:DIR (run by transformers), py:FILE.py:FACTORY (an
nn.Module that your function returns; the file is executed), emit:FILE.py (written by `dovetail emit`) or, as the second,
http://… (a server's completions with log-probs), dump:DIR (activations that another engine recorded) or vllm:DIR, mlx:DIR,
llamacpp:FILE.gguf (recorded now, by the engine's own interpreter; see `dovetail record --help`). Both run the same prompts in
their own dtype and in float64, and are compared tap by tap.

    dovetail verify my-model hf:my-model
    dovetail verify hf:original py:mine.py:load --map 'blocks.{}.attn.proj=layers.{}.mixer.o' --html report.html
    dovetail verify my-model mlx:my-model --python ~/mlx/bin/python
    dovetail verify my-model http://localhost:8080/v1
    dovetail verify my-model --rollouts rollouts.jsonl --older step-100

--rollouts explains the gap between the log-probs that a sampler recorded and those of the model: temperature, truncation,
rounding, older weights, a shift by one, another architecture, each with its share.

Exit code 0: the same function. 1: two functions, or NaN or infinity. Other codes are errors, and there is no verdict.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from dovetail.api.arguments import silent
from dovetail.api.options import InFile, RunDtype, Seed
from dovetail.api.result import Event, Result, Watch, unwatched
from dovetail.base.dtypes import dtype_of
from dovetail.base.limits import ANSWER_SECONDS, PROMPT_TOKENS
from dovetail.base.option import Option
from dovetail.base.option_group import OptionGroup, accepts_groups
from dovetail.views.blocks import View
from dovetail.views.page import Page

if TYPE_CHECKING:
    import torch

    from dovetail.proof.compare.check import Pass, Verdict
    from dovetail.proof.compare.comparison import Status
    from dovetail.proof.compare.opening import SideLike
    from dovetail.proof.compare.server import ServerRow, ServerVerdict
    from dovetail.proof.rollouts.verdict import RolloutStatus, RolloutVerdict

OLDER = Option("An earlier checkpoint that may have sampled the rollouts: DIR or hf:DIR; may be given many times.", repeat=True)
MAP = Option(
    "A module of a py: side that computes the output of one of ours: 'blocks.{}.attn.proj=layers.{}.mixer.o'; {} is the number "
    "of the layer.",
    repeat=True,
)


@dc.dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """What both sides read: texts, token ids (`"3 14 15"`), or by default `rows` rows of random tokens."""

    prompt: Annotated[
        Sequence[str] | str,
        Option(
            "A text that both sides read, by the tokenizer of the first directory that has one; may be given many times.",
            repeat=True,
        ),
    ] = ()
    rows: Annotated[int, Option("Rows of random tokens, if no prompt is given.", low=1, high=256)] = 2
    length: Annotated[
        int | None,
        Option("Tokens per row; by default enough to pass the edge of a short window.", low=1, high=PROMPT_TOKENS),
    ] = None
    longest: Annotated[
        int,
        Option(
            "The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."
        ),
    ] = 4096
    seed: Annotated[int, Seed("The seed of the random prompts.")] = 0


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

    def to_dict(self) -> dict[str, Any]:
        return self.verdict.data()

    def view(self, width: int) -> View:
        from dovetail.views.verification import verdict_view

        return verdict_view(self.verdict, self.every)

    def page(self) -> Page:
        from dovetail.views.verification import verdict_page

        return Page(f"verify: {self.status}", verdict_page(self.verdict))


@accepts_groups
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
    older: Annotated[Sequence[SideLike] | str | Path, OLDER] = (),
    prompt: PromptOptions | Sequence[str] | str = PromptOptions(),
    decode: Annotated[bool, Option("Also decode with a cache.")] = True,
    dtype: Annotated[
        str | torch.dtype | None, RunDtype("Run both sides in this dtype; by default each in that of its weights.")
    ] = None,
    map: Annotated[Iterable[str] | Mapping[str, str], MAP] = (),
    model: Annotated[str | None, Option("The name of the model on a server that has several.")] = None,
    timeout: Annotated[
        float, Option("Seconds that one answer of a server may take in all.", low=0.1, high=3600.0)
    ] = ANSWER_SECONDS,
    python: Annotated[
        str | Path | None, Option("The interpreter of another engine's environment, where B is recorded by one.")
    ] = None,
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
    `prompt` says what both read: texts (by the tokenizer of the first directory that has one), token ids (`"3 14 15"`), or
    random tokens by default. `map` pairs modules by name: {"blocks.{}.attn.proj": "layers.{}.mixer.o"}. `model` is a server's
    name of its model, and `timeout` the seconds that one of its answers may take. `why` searches for the cause of a difference.

    With `rollouts`, a file of what a sampler recorded, there is no second side: the gap between its log-probs and those of `a`
    is explained; `older` are earlier checkpoints that may have sampled it. `progress` is called with a line per step, and
    `watch` with the result of each pass, or prompt of a server, as soon as it is known.
    """
    from dovetail.proof.compare import check, dump_check, opening, server
    from dovetail.proof.rollouts.check import explain_file

    report_step, pairs, given = progress or silent, opening.module_pairs(map), cast("PromptOptions", prompt)
    on_pass, on_row = _watching(watch)
    dtype = None if dtype is None else dtype_of(dtype)
    opening.check_sides(a, b, rollouts, older)
    if rollouts is not None:
        return Verification(explain_file(a, rollouts, older, dtype, pairs, why, report_step))
    assert b is not None, "two sides, or rollouts"
    tokenizer = opening.first_tokenizer(a, b)
    report_step(f"reading {opening.label_of(a)} and {opening.label_of(b)}")
    read = functools.partial(opening.read_prompt, given.prompt, given.rows, given.length, given.seed, tokenizer)
    if isinstance(b, str) and b.startswith(opening.SERVER):
        side = opening.local(a, pairs)
        verdict = server.compare_server(
            side, b, read(side), model=model, tokenizer=tokenizer, seconds=timeout, progress=report_step, watch=on_row
        )
        return Verification(verdict)
    if isinstance(b, str) and opening.is_recorded(b):
        side = opening.local(a, pairs)
        with opening.open_dump(b, lambda: read(side), decode, dtype, python, report_step) as dump:
            return Verification(dump_check.verify_dump(side, dump, why=why, progress=report_step, watch=on_pass), every)
    first, second = opening.pair(a, b, pairs)
    ids, longest = read(first, second), given.longest
    compared = check.verify(
        first, second, ids, dtype=dtype, why=why, decode=decode, longest=longest, progress=report_step, watch=on_pass
    )
    return Verification(compared, every)


def _watching(watch: Watch) -> tuple[Callable[[Pass], None], Callable[[int, ServerRow], None]]:
    """Return what is called with each pass over two sides, and with each prompt of a server."""
    from dovetail.views.verification import pass_line, row_line

    return (
        lambda one: watch(Event("pass", one.data(), pass_line(one))),
        lambda number, row: watch(Event("prompt", {"prompt": number, **row.data()}, row_line(number, row))),
    )
