"""git: with a cache, the mask is extended for an image, also where there is none."""

import torch
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
vision = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 32}
model = GitForCausalLM(GitConfig(**sizes, vision_config=vision, pad_token_id=0, initializer_range=0.5)).eval().double()
ids, mask = torch.randint(3, 62, (1, 12)), torch.tensor([[0] * 4 + [1] * 8])
with torch.no_grad():
    whole = model(ids, attention_mask=mask).logits[:, -1]
    first = model(ids[:, :-1], attention_mask=mask[:, :-1])
    step = model(ids[:, -1:], attention_mask=mask, past_key_values=first.past_key_values).logits[:, -1]
    print("gap:", (step - whole).abs().max().item())
