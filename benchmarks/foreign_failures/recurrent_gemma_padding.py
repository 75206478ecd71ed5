"""recurrent_gemma: the mask applies to attention only; the convolution before the recurrence reads left padding."""

import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
config = RecurrentGemmaConfig(**sizes, num_key_value_heads=2, lru_width=48, pad_token_id=0)
model = RecurrentGemmaForCausalLM(config).eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        weight.add_(0.3 * torch.randn_like(weight)) if "linear_x" in name or "conv_1d" in name else None
ids, mask = torch.randint(3, 62, (1, 9)), torch.tensor([[0] * 4 + [1] * 9])
with torch.no_grad():
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    padded = model(torch.cat([0 * ids[:, :4], ids], 1), **at).logits[:, 4:]
    print("gap:", (padded - model(ids, use_cache=False).logits).abs().max().item())
