"""longformer: weights of global attention are reached by `global_attention_mask` alone, not by ids of tokens."""

import torch
from transformers import LongformerConfig, LongformerForMaskedLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
ids = torch.randint(3, 62, (1, 12))
for more in ({}, {"global_attention_mask": torch.eye(1, 12, dtype=torch.long)}):
    model = LongformerForMaskedLM(LongformerConfig(**sizes, attention_window=[8], max_position_embeddings=64)).eval()
    model(ids, **more).logits.sum().backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None and "_global" in name]
    print(f"with {list(more)}: {len(missing)} weights of global attention without a gradient")
