"""mpnet: positions count ids other than 1, whatever `pad_token_id` the config has."""

import torch
from transformers import MPNetConfig, MPNetForMaskedLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
for pad in (0, 1):
    model = MPNetForMaskedLM(MPNetConfig(**sizes, pad_token_id=pad, initializer_range=0.5)).eval().double()
    ids, pads = torch.randint(3, 62, (1, 9)), torch.full((1, 4), pad)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], 1)
    with torch.no_grad():
        padded = model(torch.cat([pads, ids], 1), attention_mask=mask).logits[:, 4:]
        print(f"pad_token_id {pad}, gap:", (padded - model(ids).logits).abs().max().item())
