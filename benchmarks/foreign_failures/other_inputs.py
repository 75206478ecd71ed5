"""xlnet, roc_bert: weights for segments and targets, for glyphs and sounds of characters, which token ids do not reach."""

import torch
from transformers import RoCBertConfig, RoCBertForCausalLM, XLNetConfig, XLNetLMHeadModel

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
xlnet = XLNetLMHeadModel(XLNetConfig(vocab_size=62, d_model=48, n_layer=1, n_head=4, d_inner=40)).eval()
for model in (xlnet, RoCBertForCausalLM(RoCBertConfig(**sizes, is_decoder=True, pad_token_id=0)).eval()):
    model(torch.randint(3, 62, (1, 12))).logits.square().sum().backward()
    print("no gradient:", [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()])
