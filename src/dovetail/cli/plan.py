"""Plan the training of a model on many GPUs, before anything runs: layouts that fit, memory, traffic, step time, days, cost;
or, with --serve, the serving of it: sequences that fit, requests per second, and the GPUs that some users need.

Memory and bytes come from the training step itself, run as one rank of the job on a process group that exchanges nothing, with
tensors that have no values. Time is a roofline on the figures of a device. -o writes a page with a picture of the layout.

    dovetail plan llama-3-70b --gpus 1024 --device h100 --length 8192 --tokens 15T --price 2.5
    dovetail plan llama-3-405b --gpus 16384 --tensor 8 --pipeline 16 --batch 2048 -o plan.html
    dovetail plan llama-3-70b --serve --device h100 --prompt 1024 --answer 256 --users 1M --price 2.5
"""

from __future__ import annotations

import dataclasses as dc
import inspect
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import (
    BatchSize,
    Count,
    FileFlags,
    Length,
    NewTokens,
    OutFile,
    Ranks,
    Sets,
    Spec,
    Swaps,
    number,
    whole,
)
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options, print_view, write_page
from dovetail.core.errors import UsageError


@dc.dataclass
class Command(FileFlags):
    """The model, the GPUs, and the run."""

    spec: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    gpus: Ranks | None = None
    """The number of GPUs to train on."""
    serve: bool = False
    """Plan the serving of the model."""
    device: str = "h100"
    """Their kind: a100, h100, h200, b200 or mi300x."""
    length: Length | None = None
    """Tokens per row (default: 8192)."""
    batch: BatchSize | None = None
    """Rows per step, over all ranks (default: 16 M tokens)."""
    tokens: Count | None = None
    """The tokens of the run: 15T."""
    price: Annotated[float, number(0, 1e6, above=True)] | None = None
    """Dollars per GPU-hour."""
    precision: Literal["bf16", "fp32"] | None = None
    """The dtype of matrix products (default: bf16)."""
    optimizer: Literal["adamw", "muon"] | None = None
    """The optimizer (default: adamw)."""
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
    top: Annotated[int, whole(1, 100)] | None = None
    """Trace layouts until N of them fit (default: 3)."""
    prompt: Length | None = None
    """--serve: tokens of a prompt (default: 1024)."""
    answer: NewTokens | None = None
    """--serve: tokens of an answer (default: 256)."""
    weights: Literal["fp32", "bf16", "fp8", "int8", "int4"] | None = None
    """--serve: how matrices are stored (default: bf16)."""
    cache: Literal["fp32", "bf16", "fp8", "int8", "int4"] | None = None
    """--serve: how the KV cache is stored (default: bf16)."""
    gap: Annotated[float, number(0, 3600, above=True)] | None = None
    """--serve: the longest time between two tokens of a request, in seconds (default: 0.05)."""
    users: Count | None = None
    """--serve: the users to serve: 1M."""
    active: Annotated[float, number(0, 1, above=True)] | None = None
    """--serve: the share of the users in the busiest hour (default: 0.1)."""
    requests: Annotated[float, number(0, 1e6, above=True)] | None = None
    """--serve: requests that each of these sends in that hour (default: 6)."""
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
        from dovetail.api.plan_serving import plan_serving

        given = {
            name: value for name, value in options(self, "json", "out", "force", "load", "serve").items() if value is not None
        }
        taken = inspect.signature(plan_serving if self.serve else plan).parameters
        if (other := next((name for name in given if name not in taken), None)) is not None:
            remedy = "leave it out, or --serve" if self.serve else "also give --serve"
            raise UsageError(f"--{other}: is a flag of plans for {'training' if self.serve else 'serving'}; {remedy}")
        if self.serve:
            if self.out is not None:
                raise UsageError("--out: a plan for serving has no page; leave it out")
            result = plan_serving(**given)
        else:
            if self.gpus is None:
                raise UsageError("--gpus: give the number of GPUs to train on, or --serve")
            result = plan(**given, progress=print_note)
            write_page(self.out, result, self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0 if result.best is not None else 1
