"""Write a small checkpoint of a model in Hugging Face layout, from only a config, for tests of any library that loads one.

All sizes are small and different; every kind of layer is kept. Weights are random, and moved until the top-1 token of every
position is clear, so that a comparison of greedy tokens in float32 and bfloat16 does not depend on rounding.

    dovetail tiny qwen3 -o qwen3-small                  a model type, as `dovetail port` lists them
    dovetail tiny Qwen3-8B/config.json -o qwen3-small   a config; no weights are read
    dovetail tiny llama-tiny -o small                   a preset or a .yaml file
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import LoadFlags, OutDir, Seed
from dovetail.cli.output import print_json, print_line


@dc.dataclass
class Command(LoadFlags):
    """The model and the directory."""

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """A model type, a config.json, a model directory, a preset's name or a .yaml file."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    family: str | None = None
    """The model_type to write, as `dovetail port` lists them (default: that of the config, else the first that fits)."""
    seed: Seed = 0
    """Samples other weights."""
    force: bool = False
    """Replace the directory if it is a model already."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int | None:
        """Write the checkpoint and report its size and margin."""
        from dovetail.api.tiny import tiny

        result = tiny(self.model, self.out, family=self.family, seed=self.seed, force=self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_line(str(result))
        return 0
