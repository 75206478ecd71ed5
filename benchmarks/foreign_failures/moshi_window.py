"""moshi: a whole pass attends to the whole sequence; the cache keeps sliding_window tokens, so decode steps do not."""

import torch
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40, "head_dim": 12}
model = MoshiForCausalLM(MoshiConfig(**sizes, sliding_window=5, initializer_range=0.3)).eval().double()
ids = torch.randint(3, 62, (1, 12))
with torch.no_grad():
    whole, memory = model(ids).logits, None
    for t in range(12):
        out = model(ids[:, t : t + 1], past_key_values=memory, use_cache=True)
        memory = out.past_key_values
        print(t, "gap:", (out.logits[:, 0] - whole[:, t]).abs().max().item())
