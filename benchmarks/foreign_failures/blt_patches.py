"""blt: with a cache, patches are formed from the new bytes only, and the attention mask does not apply to patches."""

import torch
from transformers import BltConfig, BltForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
parts = {f"{name}_config": {**sizes, "hidden_size_global": 48} for name in ("patcher", "encoder", "decoder", "global")}
config = BltConfig(**parts, vocab_size=62, num_hidden_layers=2, encoder_hash_byte_group_vocab=50, initializer_range=0.3)
model, ids, mask = BltForCausalLM(config).eval(), torch.randint(3, 62, (1, 12)), torch.tensor([[0] * 5 + [1] * 12])
with torch.no_grad():
    whole = model(ids, use_cache=False).logits
    memory = model(ids[:, :11], use_cache=True).past_key_values
    step = model(ids[:, 11:], past_key_values=memory, use_cache=True).logits
    print("gap of a step:", (step - whole[:, 11:]).abs().max().item())
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    padded = model(torch.cat([0 * ids[:, :5], ids], 1), **at).logits[:, 5:]
    print("gap padded on the left:", (padded - whole).abs().max().item())
