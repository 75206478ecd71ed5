"""bart: positions are counted from the first padding; the forward takes no position_ids."""

import torch
from transformers import BartConfig, BartForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40}
model = BartForCausalLM(BartConfig(**sizes, is_decoder=True, pad_token_id=0, init_std=0.5)).eval().double()
ids, pads = torch.randint(3, 62, (1, 9)), torch.zeros(1, 4, dtype=torch.long)
mask = torch.cat([pads, torch.ones_like(ids)], 1)
with torch.no_grad():
    padded = model(torch.cat([pads, ids], 1), attention_mask=mask).logits[:, 4:]
    print("gap:", (padded - model(ids).logits).abs().max().item())
