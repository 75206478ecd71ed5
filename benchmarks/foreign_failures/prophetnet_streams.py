"""prophetnet: in a whole pass the relative bias of a token depends on other queries, later ones too; in a step on its own."""

import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 40}
config = ProphetNetConfig(**sizes, is_decoder=True, is_encoder_decoder=False, add_cross_attention=False, init_std=0.5)
model, ids = ProphetNetForCausalLM(config).eval().double(), torch.randint(3, 62, (1, 12))
other = torch.cat([ids[:, :3], 61 - ids[:, 3:4], ids[:, 4:]], 1)
with torch.no_grad():
    whole, memory, steps = model(ids).logits, None, []
    print("gap before a changed token:", (model(other).logits - whole)[:, :3].abs().max().item())
    print("gap to the text without its end:", (model(ids[:, :7]).logits - whole[:, :7]).abs().max().item())
    for t in range(12):
        out = model(ids[:, t : t + 1], past_key_values=memory, use_cache=True)
        memory, steps = out.past_key_values, [*steps, out.logits]
    print("gap between steps and a whole pass:", (torch.cat(steps, 1) - whole).abs().max().item())
