"""deepseek_v4: the experts of a token come from a table of the checkpoint; in a new model it is zeros, so one is used."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "moe_intermediate_size": 20}
latent = {"q_lora_rank": 10, "o_lora_rank": 10, "head_dim": 8, "qk_rope_head_dim": 4, "o_groups": 2, "sliding_window": 7}
kinds = {"layer_types": ["heavily_compressed_attention"], "mlp_layer_types": ["hash_moe"]}
config = DeepseekV4Config(**sizes, **latent, **kinds, n_routed_experts=4, num_experts_per_tok=2)
config._experts_implementation = "eager"
model = DeepseekV4ForCausalLM(config).eval()
model(torch.randint(3, 62, (1, 40))).logits.square().sum().backward()
for name, weight in model.named_parameters():
    if "experts.gate_up_proj" in name:
        print(name, "experts without gradient:", [i for i, grad in enumerate(weight.grad) if not grad.any()])
