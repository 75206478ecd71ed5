"""reformer: chunks are counted from the first padding; a cache takes one token at a time; eval mode has no gradient."""

import torch
from transformers import ReformerConfig, ReformerModelWithLMHead

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_attention_heads": 4, "attention_head_size": 12, "feed_forward_size": 40}
chunks = {"attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "is_decoder": True, "initializer_range": 0.5}
places = {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 32), "max_position_embeddings": 64, "pad_token_id": 0}
model = ReformerModelWithLMHead(ReformerConfig(**sizes, **chunks, **places)).eval().double()
for n in (20, 18):
    ids, mask = torch.randint(3, 62, (1, n)), torch.tensor([[0] * (24 - n) + [1] * n])
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        padded = model(torch.cat([0 * mask[:, n:], ids], 1), **at).logits[:, -n:]
        print(24 - n, "padded, gap:", (padded - model(ids).logits).abs().max().item())
memory = model(ids[:, :8], use_cache=True).past_buckets_states
for what in (
    lambda: model(ids[:, 8:14], past_buckets_states=memory, use_cache=True),
    lambda: model(ids).logits.sum().backward(),
):
    try:
        what()
    except (RuntimeError, AssertionError) as error:
        print(error)
