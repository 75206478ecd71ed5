"""convbert: the mask applies to attention only; padding on the right is read by the convolution."""

import torch
from transformers import ConvBertConfig, ConvBertForMaskedLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
model = ConvBertForMaskedLM(ConvBertConfig(**sizes, embedding_size=48, pad_token_id=0)).eval()
with torch.no_grad():
    for weight in model.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    ids, padding = torch.randint(3, 62, (1, 9)), torch.zeros(1, 4, dtype=torch.long)
    mask = torch.cat([torch.ones_like(ids), padding], 1)
    alone, padded = model(ids).logits, model(torch.cat([ids, padding], 1), attention_mask=mask).logits[:, :9]
    print("gap:", (padded - alone).abs().max().item(), "of", alone.abs().max().item())
