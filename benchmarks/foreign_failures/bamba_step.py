"""bamba: without position_ids a decode step has position 0, whatever the cache contains."""

import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 6, "mamba_n_groups": 2, "attn_layer_indices": [1]}
model = BambaForCausalLM(BambaConfig(**sizes, **mamba, num_key_value_heads=2, initializer_range=0.3)).eval()
ids = torch.randint(3, 62, (1, 12))
with torch.no_grad():
    first = model(ids[:, :8], use_cache=True)
    step = model(ids[:, 8:9], past_key_values=first.past_key_values, use_cache=True).logits
    print("gap:", (step - model(ids).logits[:, 8:9]).abs().max().item())
    first = model(ids[:, :8], use_cache=True)
    told = model(ids[:, 8:9], past_key_values=first.past_key_values, position_ids=torch.tensor([[8]])).logits
    print("gap with position_ids:", (told - model(ids).logits[:, 8:9]).abs().max().item())
