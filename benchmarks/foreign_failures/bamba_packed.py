"""bamba: restarted positions separate documents in attention, but not in the recurrent layers."""

import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 6, "mamba_n_groups": 2, "attn_layer_indices": [1]}
model = BambaForCausalLM(BambaConfig(**sizes, **mamba, num_key_value_heads=2)).eval().double()
ids = torch.randint(3, 62, (1, 12))
places = torch.arange(6).repeat(2)[None]
with torch.no_grad():
    packed = model(ids, position_ids=places, use_cache=False).logits[:, 6:]
    print("gap:", (packed - model(ids[:, 6:], use_cache=False).logits).abs().max().item())
