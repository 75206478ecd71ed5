"""rwkv: attention_mask is accepted and ignored, with a warning; left padding is processed like text."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
model = RwkvForCausalLM(RwkvConfig(vocab_size=62, hidden_size=48, num_hidden_layers=2, intermediate_size=40)).eval()
ids, mask = torch.randint(3, 62, (1, 9)), torch.tensor([[0] * 4 + [1] * 9])
with torch.no_grad():
    padded = model(torch.cat([0 * ids[:, :4], ids], 1), attention_mask=mask).logits[:, 4:]
    print("gap:", (padded - model(ids).logits).abs().max().item())
