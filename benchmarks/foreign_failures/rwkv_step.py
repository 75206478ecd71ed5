"""rwkv: with a cache, one token is processed as if it were several."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "attention_hidden_size": 48, "num_hidden_layers": 2, "context_length": 64}
model = RwkvForCausalLM(RwkvConfig(**sizes)).eval()
ids = torch.randint(3, 62, (2, 12))
with torch.no_grad():
    first = model(ids[:, :8], use_cache=True)
    step = model(ids[:, 8:9], state=first.state, use_cache=True).logits
    print("answers to (2, 1) tokens:", tuple(step.shape))
    print("gap:", (step - model(ids).logits[:, 8:9]).abs().max().item())
