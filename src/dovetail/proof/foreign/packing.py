"""Packed documents as the classes of transformers document them: keyword arguments beside restarted positions.

    cu_seq_lens_q, cu_seq_lens_k    int32 (documents + 1): where each document begins, and the end of the last
    max_length_q, max_length_k      the longest document
    seq_idx                         int32 (1, n): the document of each token

Attention is separated by restarted positions alone; these arguments are for kernels and for recurrences. A class documents an
argument where its forward has it, or where `**kwargs: Unpack[…]` names it in a TypedDict.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn


def described(lengths: Sequence[int]) -> dict[str, Any]:
    """All arguments for documents of these lengths in one row."""
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    document = torch.cat([torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)])[None]
    longest = max(lengths)
    return {
        "cu_seq_lens_q": begins,
        "cu_seq_lens_k": begins,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": document,
    }


def documented(model: nn.Module) -> frozenset[str]:
    """The names of these arguments that a model's forward documents."""
    forward = type(model).forward
    names = set(inspect.signature(forward).parameters)
    try:
        hints = typing.get_type_hints(forward, include_extras=True)
    except (NameError, TypeError):  # an annotation that cannot be evaluated here
        hints = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for fields in typing.get_args(hints.get(name)):  # Unpack[TypedDict]
                names |= set(getattr(fields, "__annotations__", {}))
    return frozenset(names & set(described((1,))))
