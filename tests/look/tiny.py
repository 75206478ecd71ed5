"""Tiny models of the tests of looking: attention with experts, and a hybrid with recurrent mixers."""

from __future__ import annotations

import torch

from dovetail.files.spec import from_yaml
from dovetail.proof.laws.case import perturbed

SPEC = from_yaml("""
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {kind: moe, experts: 4, hidden: 20}}
- {mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 4}]}, ffn: {hidden: 44}}
""")
HYBRID = from_yaml("""
width: 28
vocab: 62
layers:
- {mixer: {kind: mamba2, inner: 60, head: 6, state_size: 5}, ffn: {hidden: 44}}
- {mixer: {heads: 2}, ffn: {hidden: 44}}
""")
MODEL, MIXED = perturbed(SPEC), perturbed(HYBRID)
IDS = torch.tensor([[5, 17, 3, 60, 8, 33, 2, 40, 11], [1, 1, 2, 40, 33, 9, 21, 7, 50]])
OTHER = torch.tensor([[5, 17, 9, 60, 8, 33, 2, 40, 11], [1, 1, 30, 40, 33, 9, 21, 7, 50]])
