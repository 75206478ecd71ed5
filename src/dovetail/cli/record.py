"""Record the activations of a model inside another engine, as a dump that `dovetail verify DIR dump:OUT` compares.

The recorder is one short file that runs in the engine's own environment: --python names its interpreter, else the variable
DOVETAIL_ENGINE_PYTHON (DOVETAIL_MLX_PYTHON). docs/dumps.md describes the format, which any engine can write in 20 lines.

    dovetail record transformers my-model -o dump
    dovetail record mlx my-model -o dump --python ~/mlx/bin/python
    dovetail verify my-model dump:dump
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import Length, LoadFlags, OutDir, RunDtype, Seed
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(LoadFlags):
    """The engine, the model and the directory of the dump."""

    engine: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENGINE")]]
    """transformers, vllm, mlx or llamacpp; sglang and megatron have recorders that were never executed."""
    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """A model directory in Hugging Face layout; a .gguf file for llamacpp."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Token ids, as in '3 14 15'; may be given many times, with the same number of tokens."""
    rows: int = 2
    """Rows of random tokens, if no prompt is given."""
    length: Length | None = None
    """Tokens per row."""
    steps: int = 4
    """The last tokens of each row that are decoded one by one."""
    dtype: RunDtype = "float32"
    """The dtype in which the engine runs."""
    python: str | None = None
    """The interpreter of the engine's environment."""
    seed: Seed = 0
    """The seed of the random prompt."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Record, and print the contents of the dump."""
        from dovetail.api.record import record

        result = record(**options(self, "json", "load"))
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
