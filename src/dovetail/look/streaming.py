"""Activations of many texts on disk: one safetensors file per batch of rows, with flat memory; an interrupted stream resumes.

    stream(model, rows, "layers.*.in", out="acts", batch=16)
    for piece in read_stream("acts"): piece["layers.3.in"]                 (rows, n, embed)

A directory belongs to one set of addresses, batch size and dtype (`stream.json`); files that it has are not computed again.
Each is written whole or not at all.
"""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dovetail.core.errors import FileError, InputError
from dovetail.core.inputs import default_ctx
from dovetail.disk.atomic import write_atomically
from dovetail.look.record import Trace
from dovetail.look.tracer import Tracer
from dovetail.model import ModelModule

PLAN = "stream.json"


@dc.dataclass(frozen=True)
class Streamed:
    """What a stream has written."""

    out: Path
    files: int
    tokens: int
    computed: int  # files that were not there before


def stream(
    model: ModelModule,
    rows: Iterable[Tensor],
    *addresses: str,
    out: str | Path,
    batch: int = 16,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Streamed:
    """Write the activations of rows of token ids (n,) at the addresses, `batch` rows of one length per forward pass. `dtype` is
    that of the files; None: of the activations. `progress` is called with the tokens so far."""
    if not addresses:
        raise InputError("addresses: name at least one, such as 'layers.*.in'")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    plan = {"addresses": list(addresses), "batch": batch, "dtype": str(dtype), "model": model.part.key}
    if (out / PLAN).exists():
        if json.loads((out / PLAN).read_text(encoding="utf-8")) != plan:
            raise FileError(
                f"{out}: holds a stream of other addresses, another batch size or another model; use a new directory"
            )
    else:
        write_atomically(out / PLAN, json.dumps(plan).encode())
    tokens, files, computed, source = 0, 0, 0, iter(rows)
    while some := list(islice(source, batch)):
        lengths = [len(row) for row in some]
        if len({*lengths}) > 1:
            raise InputError(f"rows: of one batch have different lengths, {min(lengths)} to {max(lengths)}; cut them to one")
        path = out / f"{files:06}.safetensors"
        if not path.exists():
            write_atomically(path, save(_activations(model, torch.stack(some), addresses, dtype)))
            computed += 1
        files, tokens = files + 1, tokens + sum(lengths)
        if progress is not None:
            progress(tokens)
    return Streamed(out, files, tokens, computed)


def _activations(model: ModelModule, ids: Tensor, addresses: tuple[str, ...], dtype: torch.dtype | None) -> dict[str, Tensor]:
    tracer = Tracer(model.part, Trace(*addresses))
    ctx = default_ctx(ids, ranks=model.ranks)
    ctx.listen = tracer
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        run = model if any(address.startswith("head.") for address in tracer.records) else model.hidden
        run(ids.to(model.device), ctx)
    return {name: x.to(dtype or x.dtype).contiguous().cpu() for name, x in tracer.end().items()}


def read_stream(out: str | Path) -> Iterator[dict[str, Tensor]]:
    """The activations of a stream, file by file."""
    if not (Path(out) / PLAN).exists():
        raise FileError(f"{out}: holds no stream of activations ({PLAN} is missing)")
    for path in sorted(Path(out).glob("*.safetensors")):
        yield load_file(path)
