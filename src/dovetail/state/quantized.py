"""A KV cache in fewer bits: entries are encoded when they are written and decoded when they are read.

    int8, fp8   one scale per token and head                     int4   one scale and zero point per token and head

A stored entry is within half a step of the entry that was written; nothing else changes: the tensors of an entry (codes, scale,
zero point) lie in stores of their own, in the same slots, so that roll-back, forks and pages treat them as any other entry. The
entries of one step are read back decoded, as those before them. Recurrent states are sums over all tokens and keep their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import KV
from dovetail.ops.attend import StoredEntries
from dovetail.ops.formats.format import Format
from dovetail.ops.formats.kinds import FP8, Int4, Int8
from dovetail.state.frame import Frame, TokenView

CacheFormat = Literal["int8", "int4", "fp8"]
RAW = {torch.float8_e4m3fn: torch.uint8}  # torch has no indexed copy of float8


def entry_format(kind: CacheFormat, size: int) -> Format:
    """The format of an entry whose last axis has this size."""
    return {"int8": Int8(), "fp8": FP8(), "int4": Int4(group=size, zero_point=True)}[kind]


def entry_stores(format: Format, slots: int, shape: Sequence[int], device: torch.device | str | None) -> list[Tensor]:
    """Stores for `slots` entries of a shape: one per tensor of the format."""
    fields = format.tensors((1, *shape)).values()
    return [torch.zeros(slots, *field.shape[1:], dtype=RAW.get(field.dtype, field.dtype), device=device) for field in fields]


class QuantizedView(TokenView):
    """The KV cache of one layer in fewer bits, in the frame of this step."""

    def __init__(self, stores: Sequence[Tensor], frame: Frame, kind: CacheFormat) -> None:
        super().__init__(stores, frame)
        self.raw = TokenView(stores, frame)
        self.kind: CacheFormat = kind
        self.dtype, self.formats = torch.float32, list[Format]()

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """Encode and write the new entries (…, n, *axes). Returns all stored entries, decoded."""
        self.dtype = new[0].dtype
        self.formats = [entry_format(self.kind, values.shape[-1]) for values in new]
        self.sizes = [values.shape[-1] for values in new]
        packed = [
            tensor.view(RAW.get(tensor.dtype, tensor.dtype))
            for format, values in zip(self.formats, new, strict=True)
            for tensor in format.encode(values).values()
        ]
        decoded = self._decoded(self.raw.append(layout, *packed))
        self.joined = decoded if self.raw.joined is not None else None
        return decoded

    def stored(self) -> KV:
        """All stored entries, decoded."""
        return self._decoded(self.raw.stored())

    def _decoded(self, kv: KV) -> StoredEntries:
        tensors, layout = kv.entries()
        given, decoded = iter(tensors), []
        for format, size in zip(self.formats, self.sizes, strict=True):
            names = format.tensors((1, size))
            fields = {name: (t := next(given)).view(one.dtype if one.dtype in RAW else t.dtype) for name, one in names.items()}
            decoded.append(format.decode(fields, size).to(self.dtype))
        return StoredEntries(layout, tuple(decoded))
