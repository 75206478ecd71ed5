"""A small language model in plain PyTorch, with bugs that can be seeded: width 28, 2 heads of 14, window 7."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, WINDOW = 62, 28, 2, 7


class Layer(nn.Module):
    """Attention through a window, then a feed-forward."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 44), nn.Linear(44, WIDTH)
        if bug == "unused":
            self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, real: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        m = k.shape[2]
        query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
        later = 1 if self.bug == "leak" else 0
        wider = 1 if self.bug == "window" and n == 1 else 0
        sees = (key <= query + later) & (key > query - WINDOW - wider)
        if self.bug != "padding":
            sees = sees & real[:, None, None, :m]
        sees = sees | (key == query)  # a padded token sees itself: no row is empty
        if self.bug == "detached":
            v = v.detach() + 0.5 * (v - v.detach())
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        if self.bug == "neighbor":
            y = y + 0.1 * y.mean(0, keepdim=True)
        if self.bug == "compiled" and torch.compiler.is_compiling():
            y = y * 1.01
        x = x + self.out(y.transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class Tiny(nn.Module):
    """Tokens (batch, n) -> (logits (batch, n, vocabulary), past)."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(bug) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        b, n = ids.shape
        before = 0 if past is None else past[0][0].shape[2]
        if position_ids is None:
            position_ids = torch.arange(n)[None] + (0 if self.bug == "position" else before)
        real = torch.ones(b, before + n, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x, kept = self.tokens(ids) + self.places(position_ids), []
        for i, layer in enumerate(self.layers):
            x, memory = layer(x, real, None if past is None else past[i])
            kept.append(memory)
        return self.head(self.norm(x)), kept


class Stateless(nn.Module):
    """Logits alone, no memory, no mask: a table and an average of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(x.tanh())


leak, window, position, padding, unused, detached, neighbor, compiled = (
    functools.partial(Tiny, bug)
    for bug in ("leak", "window", "position", "padding", "unused", "detached", "neighbor", "compiled")
)


def single() -> Tiny:
    """Refuses float64, as a kernel that knows float32 alone does."""
    model = Tiny()

    def refuse(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.head.weight.dtype == torch.float64:
            raise RuntimeError("not implemented for 'Double'")

    model.register_forward_pre_hook(refuse)
    return model


def no_module() -> int:
    return 3
