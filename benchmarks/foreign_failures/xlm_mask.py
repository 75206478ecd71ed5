"""xlm: with causal=True attention ignores the mask, so it attends to left padding."""

import torch
from transformers import XLMConfig, XLMWithLMHeadModel

torch.manual_seed(0)
config = XLMConfig(vocab_size=62, emb_dim=48, n_layers=2, n_heads=4, causal=True, pad_index=0, init_std=0.5)
model, ids = XLMWithLMHeadModel(config).eval().double(), torch.randint(3, 62, (1, 9))
mask = torch.tensor([[0] * 4 + [1] * 9])
with torch.no_grad():
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = model(torch.cat([0 * ids[:, :4], ids], 1), **at).logits[:, 4:]
    print("gap:", (padded - model(ids).logits).abs().max().item())
