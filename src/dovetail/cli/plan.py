"""Plan the training of a model on many GPUs, before anything runs: layouts that fit, memory, traffic, step time, days, cost.

Memory and bytes come from the training step itself, run as one rank of the job on a process group that exchanges nothing, with
tensors that have no values. Time is a roofline on the figures of a device. -o writes a page with a picture of the layout.

    dovetail plan llama-3-70b --gpus 1024 --device h100 --length 8192 --tokens 15T --price 2.5
    dovetail plan llama-3-405b --gpus 16384 --tensor 8 --pipeline 16 --batch 2048 -o plan.html
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import BatchSize, Count, Length, LoadFlags, OutFile, Ranks, Sets, Spec, Swaps, number, whole
from dovetail.cli.output import print_json, print_note
from dovetail.cli.shown import options, print_view, write_page


@dc.dataclass
class Command(LoadFlags):
    """The model, the GPUs, and the run."""

    spec: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    gpus: Ranks
    """The number of GPUs."""
    device: str = "h100"
    """Their kind: a100, h100, h200, b200 or mi300x."""
    length: Length = 8192
    """Tokens per row."""
    batch: BatchSize | None = None
    """Rows per step, over all ranks (default: 16 M tokens)."""
    tokens: Count | None = None
    """The tokens of the run: 15T."""
    price: Annotated[float, number(0, 1e6, above=True)] | None = None
    """Dollars per GPU-hour."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype of matrix products."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer."""
    recompute: Literal["none", "selective", "blocks"] | None = None
    """The activations that are computed again in the backward pass (default: the fastest that fits)."""
    tensor: Ranks | None = None
    """Fix the tensor-parallel ranks (default: each power of two within a node)."""
    sequence: Ranks | None = None
    """Fix the ranks that share each row."""
    shards: Ranks | None = None
    """Fix the ranks that share a copy of the weights (FSDP)."""
    pipeline: Ranks | None = None
    """Fix the pipeline stages."""
    top: Annotated[int, whole(1, 100)] = 3
    """Trace layouts until so many of them fit."""
    set: Sets = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    json: bool = False
    """Print one JSON object."""
    out: Annotated[OutFile | None, tyro.conf.arg(aliases=["-o"])] = None
    """Also write an HTML page with a picture of the layout."""

    def run(self) -> int:
        """Print the plan; exit with 1 where no layout fits."""
        from dovetail.api.plan import plan

        result = plan(**options(self, "json", "out", "load"), progress=print_note)
        write_page(self.out, result)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0 if result.best is not None else 1
