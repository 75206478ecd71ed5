"""roberta: after a left-padded prefill, a decode step counts padding as positions; the prefill does not."""

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
model = RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, pad_token_id=0, initializer_range=0.5)).eval().double()
ids, pads = torch.randint(3, 62, (1, 9)), torch.zeros(1, 4, dtype=torch.long)
mask = torch.cat([pads, torch.ones_like(ids)], 1)
with torch.no_grad():
    whole = model(torch.cat([pads, ids], 1), attention_mask=mask).logits[:, -1]
    first = model(torch.cat([pads, ids[:, :-1]], 1), attention_mask=mask[:, :-1])
    step = model(ids[:, -1:], attention_mask=mask, past_key_values=first.past_key_values).logits[:, -1]
    print("gap:", (step - whole).abs().max().item())
