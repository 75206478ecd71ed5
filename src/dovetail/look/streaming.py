"""Activations of many texts on disk: one safetensors file per batch of rows, with flat memory; an interrupted stream resumes.

    stream(model, rows, "layers.*.in", out="acts", batch=16)
    for piece in read_stream("acts"): piece["layers.3.in"], piece["ids"]          (rows, n, embed), (rows, n)

A directory belongs to one model with its weights, one set of addresses, batch size and dtype (`stream.json`), and each file to
the token ids it holds; files that are there are not computed again. Each is written whole or not at all.
"""

from __future__ import annotations

import dataclasses as dc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from dovetail.base.errors import FileError, InputError
from dovetail.disk.atomic import write_atomically
from dovetail.disk.tensors import TensorFile
from dovetail.disk.untrusted import Directory
from dovetail.look.address import resolve
from dovetail.look.record import Trace
from dovetail.look.tracer import Tracer
from dovetail.model.model import ModelModule
from dovetail.nn.inputs import default_ctx

PLAN, IDS = "stream.json", "ids"


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
    if of_rows := [target.key for target in resolve(model.part, addresses) if "row" in target.picks]:
        raise InputError(f"{of_rows[0]}: row would count within each file; give only the rows that are meant")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    plan = {"addresses": list(addresses), "batch": batch, "dtype": str(dtype), "spec": model.part.key, "weights": digest(model)}
    if (out / PLAN).exists():
        stored = Directory(out).json(PLAN)
        if other := [key for key in plan if stored.get(key) != plan[key]]:
            raise FileError(f"{out}: holds a stream of other {', '.join(other)}; use a new directory")
    else:
        write_atomically(out / PLAN, json.dumps(plan).encode())
    tokens, files, computed, source = 0, 0, 0, iter(rows)
    while some := list(islice(source, batch)):
        lengths = [len(row) for row in some]
        if len({*lengths}) > 1:
            raise InputError(f"rows: of one batch have different lengths, {min(lengths)} to {max(lengths)}; cut them to one")
        ids, path = torch.stack(some), _path(out, files)
        if not path.exists():
            write_atomically(path, save({IDS: ids.cpu(), **_activations(model, ids, addresses, dtype)}))
            computed += 1
        elif not torch.equal(_read(path).get(IDS, ids.new_empty(0)).cpu(), ids.cpu()):
            raise FileError(f"{path}: holds the activations of other rows; use a new directory")
        files, tokens = files + 1, tokens + sum(lengths)
        if progress is not None:
            progress(tokens)
    if _path(out, files).exists():
        raise FileError(f"{_path(out, files)}: holds rows after the last of these; use a new directory")
    return Streamed(out, files, tokens, computed)


def digest(model: ModelModule) -> str:
    """The SHA-256 of all weights with their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def _path(out: Path, number: int) -> Path:
    return out / f"{number:06}.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.entries}


def _activations(model: ModelModule, ids: Tensor, addresses: tuple[str, ...], dtype: torch.dtype | None) -> dict[str, Tensor]:
    tracer = Tracer(model.part, Trace(*addresses))
    ctx = default_ctx(ids, ranks=model.ranks)
    ctx.taps = tracer
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        run = model if any(address.startswith("head.") for address in tracer.records) else model.hidden
        run(ids.to(model.device), ctx)
    return {name: x.to(dtype or x.dtype).contiguous().cpu() for name, x in tracer.end().items()}


def read_stream(out: str | Path) -> Iterator[dict[str, Tensor]]:
    """The activations of a stream and the token `ids` they are of, file by file; the tensors are mapped, not copied."""
    where = Directory(out)
    if not where.has(PLAN):
        raise FileError(f"{out}: holds no stream of activations ({PLAN} is missing)")
    for name in where.names():
        if name.endswith(".safetensors"):
            yield _read(where.path(name))
