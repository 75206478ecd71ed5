"""hrm_text: gradients go through the last cycles only (L_bp_cycles); through all of them they agree with differences."""

import torch
from transformers import HrmTextConfig, HrmTextForCausalLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
for cycles in ({}, {"L_bp_cycles": [9, 9, 9]}):
    torch.manual_seed(0)
    config = HrmTextConfig(**sizes, **cycles, num_key_value_heads=4, head_dim=12, initializer_range=0.1)
    model, ids = HrmTextForCausalLM(config).eval().double(), torch.randint(3, 62, (1, 9))
    weight, step = model.model.embed_tokens.weight, 1e-4
    model(ids).logits.sin().sum().backward()
    way = torch.randn_like(weight)
    ends = []
    with torch.no_grad():
        for by in (step, -step):
            weight.add_(way, alpha=by)
            ends.append(model(ids).logits.sin().sum().item())
            weight.sub_(way, alpha=by)
    slope = (weight.grad * way).sum().item()
    print("gradient:", slope, "gap to differences:", abs((ends[0] - ends[1]) / (2 * step) - slope))
