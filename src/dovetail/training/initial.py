"""Digests of a run's initial weights, so that two runs can be compared: did what they share start from the same bits?

initial.json    {"layers.0.mixer.q.weight": {"shape": [96, 96], "sha256": "…"}, …}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dovetail.core.declared_tensors import held
from dovetail.core.module import tensor_at
from dovetail.disk.atomic import write_atomically
from dovetail.disk.model_files import INITIAL_FILE
from dovetail.disk.shape import check_shape
from dovetail.disk.untrusted import Directory
from dovetail.transformer import Transformer

Digests = Mapping[str, Mapping[str, Any]]


def digests(model: Transformer) -> dict[str, dict[str, Any]]:
    """The shape and the SHA-256 of every weight that a checkpoint holds."""
    return {d.path: _digest(tensor_at(model, d.path)) for d in held(model, model.part) if d.checkpointed}


def _digest(tensor: torch.Tensor) -> dict[str, Any]:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def write_initial(place: Path, model: Transformer) -> None:
    """Write the digests into a run directory, once: a resumed run was built with the same initial weights."""
    if not (place / INITIAL_FILE).exists():
        write_atomically(place / INITIAL_FILE, json.dumps(digests(model), indent=0))


def read_initial(place: Path) -> Digests | None:
    """The digests of a run; None where there are none, as in a run on several ranks."""
    where = Directory(place)
    if not where.has(INITIAL_FILE):
        return None
    data = where.json(INITIAL_FILE)
    check_shape(data, {str: {"shape": [int], "sha256": str}}, str(where.place / INITIAL_FILE))
    return data


def shared(a: Digests, b: Digests) -> tuple[int, list[str]]:
    """(number of weights with the same path and shape in both, the paths of those with other initial values)."""
    common = [path for path in a if path in b and a[path]["shape"] == b[path]["shape"]]
    return len(common), [path for path in common if a[path]["sha256"] != b[path]["sha256"]]
