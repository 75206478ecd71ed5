"""What one intervention does to the output: the test of a finding.

    effect(model, ids, "layers.1.mixer.z[head=3]")     loss 2.314 → 4.087; the output changes by 0.412 of its norm

The output is the logits, of an encoder without a head the last hidden states:  ‖y' − y‖ / ‖y‖. The loss is the mean of
−log p(next token), of a causal model of tokens.
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.base.limits import TEXT_BYTES
from dovetail.disk.untrusted import read_regular
from dovetail.look.intervention import Replacement
from dovetail.look.tracer import Tracer, listened
from dovetail.model.model import ModelModule

if TYPE_CHECKING:
    from dovetail.text.tokenizer import Tokenizer

CHARACTERS = 32  # per token of a text, at most


@dc.dataclass(frozen=True)
class Effect:
    """The loss without and with the intervention, where the model predicts tokens, and the change of the output."""

    address: str
    before: float | None
    after: float | None
    change: float

    def __repr__(self) -> str:
        loss = "" if self.before is None else f"loss {self.before:.3f} → {self.after:.3f}; "
        return f"{self.address}: {loss}the output changes by {self.change:.3g} of its norm"


def predicts_tokens(model: ModelModule, output: Tensor, tokens: Tensor) -> bool:
    """Whether an output (rows, n, vocab) is the logits of the next token."""
    spec = model.part
    return spec.embed.token_ids and spec.order() == "causal" and output.shape == (*tokens.shape, spec.vocab)


@torch.no_grad()
def effect(model: ModelModule, tokens: Tensor, address: str, value: Replacement = 0.0) -> Effect:
    """Return what replacing an activation (`layers.3.mixer.z[head=5]`) by a value or an intervention does to the output."""
    before = listened(model, tokens, Tracer(model.part))
    tracer = Tracer(model.part, None, {address: value})
    after = listened(model, tokens, tracer)
    tracer.end()  # raises for an address that the run has no value for
    losses: list[float | None] = [None, None]
    if predicts_tokens(model, before, tokens):
        targets = tokens[:, 1:].flatten().to(before.device)
        losses = [float(F.cross_entropy(y[:, :-1].flatten(0, 1).float(), targets)) for y in (before, after)]
    change = float((after - before).double().norm() / before.double().norm().clamp_min(1e-30))
    return Effect(address, losses[0], losses[1], change)


def token_rows(tokenizer: Tokenizer, text: str | Path, rows: int = 8, length: int = 128) -> Tensor:
    """Return the first tokens of a text, or of a file (a `Path`), as (rows, length), each row between the special tokens of a
    prompt. A short text has fewer rows, or one shorter row."""
    content = read_regular(text, TEXT_BYTES, "a text") if isinstance(text, Path) else text
    content = content[: rows * length * CHARACTERS]
    body, whole = tokenizer.prompt(content, add_special=False), tokenizer.prompt(content)
    special = len(whole) - len(body)
    start = next((i for i in range(special + 1) if whole[i : i + len(body)] == body), 0)
    first, last = whole[:start], whole[start + len(body) :]
    size = min(length - special, len(body))
    if size < 1:
        raise InputError(f"text: has {len(body)} tokens, and a row of {length} has {special} special ones; give a longer text")
    count = min(rows, len(body) // size)
    return torch.tensor([[*first, *body[i * size : (i + 1) * size], *last] for i in range(count)])
