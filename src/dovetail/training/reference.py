"""Reference log-probs: those of the initial weights, computed once before the first step and stored with the run.

    OUT/reference.safetensors     log_probs (rows of the file, 2)

The model itself computes them while it still has its initial weights, so that no second model stays in memory. A resumed run
reads the file: its reference is the one that it began with, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dovetail.base.errors import FileError, NonFiniteError
from dovetail.data.corpus import Batch
from dovetail.disk.atomic import write_atomically
from dovetail.disk.model_files import REFERENCE_FILE
from dovetail.model.model import ModelModule
from dovetail.nn.module import evaluating
from dovetail.training.objective import Setup
from dovetail.training.source import Source, Table

ROWS = 8  # per pass
COLUMN = "log_probs"


def add_reference(source: Source, setup: Setup, log_probs: Callable[[ModelModule, Batch], Tensor]) -> None:
    """Add `reference` to the rows of a source: the log-probs (batch, …) that the model gives them, or those stored."""
    assert source.table is not None, "a source of rows"
    path = None if setup.place is None else setup.place / REFERENCE_FILE
    stored = setup.ranks.on_first_rank(lambda: path is not None and path.is_file())
    if path is not None and stored:
        values = _read(path, source.table.count)
    else:
        with setup.computing():
            values = _computed(source.table, setup.model, log_probs)
        if path is not None:
            setup.ranks.on_first_rank(lambda: _write(path, values))
    source.table.columns["reference"] = values


@torch.no_grad()
def _computed(table: Table, model: ModelModule, log_probs: Callable[[ModelModule, Batch], Tensor]) -> Tensor:
    """(rows, …) the log-probs of all rows, in evaluation mode."""
    found = list[Tensor]()
    with evaluating(model):
        for start in range(0, table.count, ROWS):
            batch = table(np.arange(start, min(start + ROWS, table.count)))
            found.append(log_probs(model, batch.to(model.device)).cpu())
    values = torch.cat(found)
    if not torch.isfinite(values).all():
        row = int((~torch.isfinite(values)).flatten(1).any(-1).nonzero()[0])
        raise NonFiniteError(f"the initial weights give row {row + 1:,} a log-prob that is not finite; check the model")
    return values


def _write(path: Path, values: Tensor) -> None:
    write_atomically(path, save({COLUMN: values.contiguous()}))


def _read(path: Path, rows: int) -> Tensor:
    try:
        values = load(path.read_bytes())[COLUMN]
    except (OSError, SafetensorError, KeyError) as error:
        raise FileError(f"{path}: cannot be read ({error}); delete it only with the run, which it belongs to") from error
    if len(values) != rows:
        raise FileError(f"{path}: holds {len(values):,} rows, and the data has {rows:,}; start over with --force")
    return values
