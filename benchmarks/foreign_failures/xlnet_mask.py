"""xlnet: with attn_type "uni" a mask for more than one row raises a shape error."""

import torch
from transformers import XLNetConfig, XLNetLMHeadModel

model = XLNetLMHeadModel(XLNetConfig(vocab_size=62, d_model=48, n_layer=2, n_head=4, d_inner=40, attn_type="uni")).eval()
for rows in (1, 2):
    ids = torch.randint(3, 62, (rows, 9))
    try:
        print(rows, "rows:", tuple(model(ids, attention_mask=torch.ones_like(ids)).logits.shape))
    except RuntimeError as error:
        print(rows, "rows:", error)
