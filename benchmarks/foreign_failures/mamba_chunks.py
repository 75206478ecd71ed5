"""mamba: several tokens with a cache are processed as if there were no cache."""

import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(vocab_size=62, hidden_size=48, num_hidden_layers=2)).eval().double()
ids = torch.randint(3, 62, (1, 12))
with torch.no_grad():
    first = model(ids[:, :6])
    later = model(ids[:, 6:], cache_params=first.cache_params)
    print("gap:", (later.logits - model(ids).logits[:, 6:]).abs().max().item())
