"""cpmant: the input is a bidirectional prompt; a cache needs all of it again; padding is id 0, on the left only."""

import torch
from transformers import CpmAntConfig, CpmAntForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 12, "dim_ff": 40}
model = CpmAntForCausalLM(CpmAntConfig(**sizes, prompt_length=4)).eval().double()
ids, pads = torch.randint(3, 62, (1, 9)), torch.zeros(1, 4, dtype=torch.long)
with torch.no_grad():
    alone = model(ids).logits
    other = model(torch.cat([ids[:, :8], 61 - ids[:, 8:]], 1)).logits
    print("gap before a changed token:", (other - alone)[:, :8].abs().max().item())
    right, left = model(torch.cat([ids, pads], 1)).logits[:, :9], model(torch.cat([pads, ids], 1)).logits[:, 4:]
    print("gap padded on the right:", (right - alone).abs().max().item(), "on the left:", (left - alone).abs().max().item())
    memory = model(ids[:, :8]).past_key_values
    try:
        model(ids[:, 8:], past_key_values=memory)
    except RuntimeError as error:
        print("the last token with a cache:", error)
