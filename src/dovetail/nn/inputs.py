"""Plain arguments of a forward pass to a Ctx: token ids with an attention mask or lengths.

    attention_mask (batch, n)   1 at tokens, 0 at padding, which is on the left or on the right, as in Hugging Face
    lengths        (batch,)     tokens per row, padded on the right
    neither                     whole sequences without padding
    positions      (batch, n, c) coordinates of the tokens, or (batch, n) one each; by default their order
    patches        (p, channels, height, width) of images, where the embedding takes ids for them

A padded row computes what the row computes alone: positions count from its first token, on whichever side the padding is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import Known, TokenLayout
from dovetail.nn.ranks import ALONE, Ranks


def default_ctx(
    inputs: Tensor,
    *,
    ranks: Ranks = ALONE,
    attention_mask: Tensor | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    types: Tensor | None = None,
    positions: Tensor | None = None,
    patches: Tensor | None = None,
    name: str = "inputs",
) -> Ctx:
    """Return the Ctx of a batch: its token layout on the device of the inputs, and the ranks that the model is sharded across.

    Training draws are not decided here: `ModelModule.hidden` takes a seed where the model is in training mode. `name` is what
    errors call the inputs.
    """
    if inputs.dim() < 2:
        raise InputError(f"{name}: have the shape {tuple(inputs.shape)}; give (batch, n), for one sequence ids[None]")
    if attention_mask is not None and lengths is not None:
        raise InputError(f"{name}: attention_mask and lengths say the same; give one of them")
    if attention_mask is not None:
        layout = masked_layout(attention_mask, inputs, name)
    elif lengths is not None:
        layout = masked_layout(_mask_of_lengths(lengths, inputs, name), inputs, name)
    else:
        layout = TokenLayout.whole(inputs.shape[0], inputs.shape[1], inputs.device)
    if positions is not None:
        layout = layout.at(positions[..., None] if positions.dim() == 2 else positions)
    return Ctx(layout=layout, types=types, patches=patches, ranks=ranks)


def masked_layout(mask: Tensor, inputs: Tensor, name: str = "inputs") -> TokenLayout:
    """Return the layout of a batch with padding where the mask (batch, n) is 0."""
    if mask.shape != inputs.shape:
        raise InputError(
            f"attention_mask: has the shape {tuple(mask.shape)}, the {name} {tuple(inputs.shape)}; give (batch, n)"
        )
    real = mask.to(inputs.device) != 0
    if not torch.compiler.is_compiling() and real.device.type == "cpu":  # reading the mask would wait for a GPU
        _check_contiguous(real)
    order = (real.cumsum(-1) - 1).clamp_min(0) * real
    return TokenLayout.of(order, torch.where(real, 0, -1), known=Known((1,) * mask.shape[0], mask.shape[1]))


def _check_contiguous(real: Tensor) -> None:
    """Raise InputError where a row has padding between its tokens: whether positions count it is not defined."""
    first = (real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]).sum(-1)
    if bool((first > 1).any()):
        row = int((first > 1).nonzero()[0])
        raise InputError(
            f"attention_mask: row {row} has zeros between its ones; padding is on the left or on the right of a row"
        )


def _mask_of_lengths(lengths: Tensor | Sequence[int], inputs: Tensor, name: str) -> Tensor:
    counts = torch.as_tensor(lengths, device=inputs.device)
    if counts.shape != inputs.shape[:1]:
        raise InputError(f"lengths: {tuple(counts.shape)} numbers for {inputs.shape[0]} rows of {name}; give one per row")
    on_cpu = counts.device.type == "cpu"  # reading them would wait for a GPU
    if on_cpu and not torch.compiler.is_compiling() and not bool(((counts >= 0) & (counts <= inputs.shape[1])).all()):
        raise InputError(f"lengths: {counts.tolist()} are not all from 0 to {inputs.shape[1]}, the tokens per row of {name}")
    return torch.arange(inputs.shape[1], device=inputs.device) < counts[:, None]
