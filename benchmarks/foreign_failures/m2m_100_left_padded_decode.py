"""m2m_100: after a left-padded prefill, a decode step counts padding as positions; the prefill does not."""

import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration

torch.manual_seed(0)
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 44}
sizes = {"vocab_size": 62, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, **heads}
model = M2M100ForConditionalGeneration(M2M100Config(**sizes, pad_token_id=0, init_std=0.5)).eval().double()
source, ids, pads = torch.randint(3, 62, (1, 7)), torch.randint(3, 62, (1, 9)), torch.zeros(1, 4, dtype=torch.long)
mask = torch.cat([pads, torch.ones_like(ids)], 1)
with torch.no_grad():
    given = {"encoder_outputs": model.get_encoder()(source)}
    whole = model(**given, decoder_input_ids=torch.cat([pads, ids], 1), decoder_attention_mask=mask).logits
    print("prefill, gap:", (whole[:, 4:] - model(**given, decoder_input_ids=ids).logits).abs().max().item())
    begun = torch.cat([pads, ids[:, :-1]], 1)
    first = model(**given, decoder_input_ids=begun, decoder_attention_mask=mask[:, :-1], use_cache=True)
    cache = {"past_key_values": first.past_key_values, "use_cache": True}
    step = model(**given, decoder_input_ids=ids[:, -1:], decoder_attention_mask=mask, **cache).logits
    print("step, gap:", (step[:, -1] - whole[:, -1]).abs().max().item())
