"""xlnet: with attn_type "uni" a mask for more than one row raises a shape error."""

import torch
from transformers import XLNetConfig, XLNetLMHeadModel

torch.manual_seed(0)
model = XLNetLMHeadModel(XLNetConfig(vocab_size=62, d_model=48, n_layer=2, n_head=4, d_inner=40, attn_type="uni")).eval()
ids, mask = torch.randint(3, 62, (2, 9)), torch.ones(2, 9)
mask[1:, :4] = 0
for rows in (1, 2):
    try:
        last = model(ids[:rows], attention_mask=mask[:rows]).logits[rows - 1]
        alone = model(ids[rows - 1 : rows, mask[rows - 1] == 1]).logits[0]
        print(rows, "rows, gap of the last:", (last[-len(alone) :] - alone).abs().max().item())
    except RuntimeError as error:
        print(rows, "rows:", error)
