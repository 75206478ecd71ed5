"""Record the activations of a model inside another engine, as a dump that `dovetail verify DIR dump:OUT` compares.

The recorder is one short file that runs in the engine's own environment: --python names its interpreter, else the variable
DOVETAIL_ENGINE_PYTHON (DOVETAIL_MLX_PYTHON). docs/dumps.md describes the format, which any engine can write in 20 lines.

    dovetail record transformers my-model -o dump
    dovetail record mlx my-model -o dump --python ~/mlx/bin/python
    dovetail verify my-model dump:dump
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from dovetail.api.arguments import read_spec
from dovetail.api.options import OUT, Length, RunDtype, Seed
from dovetail.api.result import Result
from dovetail.base.dtypes import dtype_name
from dovetail.base.errors import SpecError
from dovetail.base.limits import DECODED
from dovetail.base.option import Option
from dovetail.disk.atomic import check_free
from dovetail.views.blocks import View


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

    def view(self, width: int) -> View:
        size = f"{self.tokens:,} tokens in {self.passes} passes, {self.tensors:,} tensors"
        return f"{self.out}: {self.engine}, {self.dtype}, {size}\ncompare it: dovetail verify DIR dump:{self.out}"


def record(
    engine: Annotated[
        str,
        Option(
            "transformers, vllm, mlx or llamacpp; sglang and megatron have recorders that were never executed.",
            form="ENGINE",
            argument=True,
        ),
    ],
    model: Annotated[
        str | Path, Option("A model directory in Hugging Face layout; a .gguf file for llamacpp.", form="MODEL", argument=True)
    ],
    *,
    out: Annotated[str | Path, OUT],
    prompt: Annotated[
        Sequence[str] | str,
        Option("Token ids, as in '3 14 15'; may be given many times, with the same number of tokens.", repeat=True),
    ] = (),
    rows: Annotated[int, Option("Rows of random tokens, if no prompt is given.")] = 2,
    length: Annotated[int | None, Length("Tokens per row.")] = None,
    steps: Annotated[int, Option("The last tokens of each row that are decoded one by one.")] = DECODED,
    dtype: Annotated[str, RunDtype("The dtype in which the engine runs.")] = "float32",
    python: Annotated[str | Path | None, Option("The interpreter of the engine's environment.")] = None,
    seed: Annotated[int, Seed("The seed of the random prompt.")] = 0,
) -> RecordedDump:
    """Run a model in another engine and write its activations to the directory `out`.

    `engine` is a recorder's name: transformers, vllm, mlx, llamacpp; sglang and megatron, which were never executed. It runs in
    the engine's own environment: `python` is its interpreter (default: the environment variable
    DOVETAIL_ENGINE_PYTHON).

    `prompt` are token ids (`"3 14 15"`), by default `rows` rows of random tokens; the last `steps` tokens of each row are
    decoded one by one.
    """
    from dovetail.proof.compare.engines import record_engine

    path = Path(out)
    check_free(path, False, "choose another path with -o")
    ids = _ids(model, (prompt,) if isinstance(prompt, str) else tuple(prompt), rows, length, seed)
    dump = record_engine(engine, model, path, ids, steps=steps, dtype=dtype_name(dtype), python=python)
    tokens = sum(len(one.ids) for one in dump.passes)
    return RecordedDump(path, dump.engine, dtype_name(dtype), len(dump.names()), tokens, len(dump.passes))


def _ids(model: str | Path, prompts: tuple[str, ...], rows: int, length: int | None, seed: int) -> list[list[int]]:
    """The token ids of the prompts, or random ones for the model's spec."""
    from dovetail.proof.compare.prompt import ids_in, random_prompt

    if not prompts:
        return random_prompt(read_spec(model).spec, rows=rows, length=length, seed=seed).ids()
    if (found := ids_in(prompts)) is None:
        raise SpecError("prompt", "an engine is given token ids", "write them as numbers: --prompt '3 14 15'")
    if len({len(row) for row in found}) != 1:
        raise SpecError("prompt", "all prompts must have the same number of tokens")
    return found
