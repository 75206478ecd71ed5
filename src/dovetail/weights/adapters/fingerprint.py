"""A fingerprint of a base: which weights an adapter was trained on.

    sha256 over the paths, shapes and up to SAMPLE evenly spaced values of every stored weight, as float32

It takes milliseconds for a model of any size, and is the same for a model in Hugging Face layout and in ours, and for weights
that were loaded in a wider dtype. Bases that were trained apart differ in nearly every value. It recognizes a base; it does not
prove that no bit was changed, as a checksum of the files does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from dovetail.core.fold import declared
from dovetail.core.module import tensor_at
from dovetail.core.part import Part
from dovetail.disk.checksum import data_sha256

SAMPLE = 4096  # values per weight


class Fingerprint:
    """Takes weights one at a time, in any order."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def add(self, path: str, tensor: Tensor) -> None:
        """Take one weight."""
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().to(torch.float32).contiguous()
        digest = hashlib.sha256(str(tuple(tensor.shape)).encode() + values.numpy().tobytes())
        self.digests[path] = digest.hexdigest()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass weights (path, tensor) on, each taken as it passes."""
        for path, tensor in weights:
            self.add(path, tensor)
            yield path, tensor

    def value(self) -> str:
        """The fingerprint of the weights taken."""
        return data_sha256(self.digests)


def fingerprint(model: nn.Module, spec: Part) -> str:
    """The fingerprint of a model's own weights, without its adapters."""
    found = Fingerprint()
    for d in declared(spec):
        if d.weight.stored:
            found.add(d.path, tensor_at(model, d.path))
    return found.value()
