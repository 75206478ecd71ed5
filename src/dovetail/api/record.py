"""record: the activations of a model inside another engine, as a dump that `verify` compares."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dovetail.api.arguments import read_spec
from dovetail.api.result import Result
from dovetail.core.dtypes import dtype_name
from dovetail.core.errors import SpecError
from dovetail.disk.atomic import check_free
from dovetail.proof.compare.engines import record_engine
from dovetail.proof.compare.prompt import random_prompt

STEPS = 4  # tokens of a row that are decoded one by one


@dc.dataclass(frozen=True, repr=False)
class RecordedDump(Result):
    """Where the dump is, the engine and its version, and how much it holds."""

    out: Path
    engine: str
    dtype: str
    tensors: int
    tokens: int
    passes: int

    def to_dict(self) -> dict[str, Any]:
        return {**dc.asdict(self), "out": str(self.out)}

    def view(self, width: int) -> RenderableType:
        return Text(
            f"{self.out}: {self.engine}, {self.dtype}, {self.tokens:,} tokens in {self.passes} passes, "
            f"{self.tensors:,} tensors\n"
            f"compare it: dovetail verify DIR dump:{self.out}"
        )


def record(
    engine: str,
    model: str | Path,
    *,
    out: str | Path,
    prompt: Sequence[str] | str = (),
    rows: int = 2,
    length: int | None = None,
    steps: int = STEPS,
    dtype: str = "float32",
    python: str | Path | None = None,
    seed: int = 0,
) -> RecordedDump:
    """Run a model in another engine and write its activations to the directory `out`.

    `engine` is a recorder's name: transformers, vllm, mlx, llamacpp; sglang and megatron, which were never executed. It runs in
    the engine's own environment: `python` is its interpreter (default: the environment variable
    DOVETAIL_ENGINE_PYTHON).

    `prompt` are token ids (`"3 14 15"`), by default `rows` rows of random tokens; the last `steps` tokens of each row are
    decoded one by one.
    """
    place = Path(out)
    check_free(place, False, "choose another path with -o")
    ids = _ids(model, (prompt,) if isinstance(prompt, str) else tuple(prompt), rows, length, seed)
    dump = record_engine(engine, model, place, ids, steps=steps, dtype=dtype_name(dtype), python=python)
    tokens = sum(len(one.ids) for one in dump.passes)
    return RecordedDump(place, dump.engine, dtype_name(dtype), len(dump.names()), tokens, len(dump.passes))


def _ids(model: str | Path, prompts: tuple[str, ...], rows: int, length: int | None, seed: int) -> list[list[int]]:
    """The token ids of the prompts, or random ones for the model's spec."""
    if not prompts:
        return random_prompt(read_spec(model).spec, rows=rows, length=length, seed=seed).ids()
    if not all(text.replace(" ", "").isdigit() for text in prompts):
        raise SpecError("prompt", "an engine is given token ids", "write them as numbers: --prompt '3 14 15'")
    found = [[int(word) for word in text.split()] for text in prompts]
    if len({len(row) for row in found}) != 1:
        raise SpecError("prompt", "all prompts must have the same number of tokens")
    return found
