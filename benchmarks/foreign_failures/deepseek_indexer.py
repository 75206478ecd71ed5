"""deepseek_v32: the indexer selects keys, and a selection has no gradient; it is trained by a loss of its own."""

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
latent = {"q_lora_rank": 10, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4}
index = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 4, "first_k_dense_replace": 1, "intermediate_size": 40}
model = DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, **latent, **index)).eval()
model(torch.randint(3, 62, (1, 12))).logits.sum().backward()
print("no gradient:", [name for name, weight in model.named_parameters() if weight.grad is None])
