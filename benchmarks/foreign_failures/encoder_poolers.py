"""fnet, layoutlm, big_bird, squeezebert: the masked language model has a pooler that no output depends on."""

import torch
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    FNetConfig,
    FNetForMaskedLM,
    LayoutLMConfig,
    LayoutLMForMaskedLM,
    SqueezeBertConfig,
    SqueezeBertForMaskedLM,
)

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
for model in (
    FNetForMaskedLM(FNetConfig(**sizes)),
    LayoutLMForMaskedLM(LayoutLMConfig(**sizes)),
    BigBirdForMaskedLM(BigBirdConfig(**sizes, attention_type="original_full")),
    SqueezeBertForMaskedLM(SqueezeBertConfig(**sizes, embedding_size=48)),
):
    model.eval()(torch.randint(3, 62, (1, 12))).logits.sum().backward()
    print("no gradient:", [name for name, weight in model.named_parameters() if weight.grad is None])
