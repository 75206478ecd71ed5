"""qwen3_next and others: packed documents are refused where `causal_conv1d` is not installed; the message says so."""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20}
model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, head_dim=12, intermediate_size=40, **linear, **experts)).eval()
ids, positions = torch.randint(3, 62, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
ends = torch.tensor([0, 4, 9], dtype=torch.int32)
packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
try:
    model(ids, position_ids=positions, use_cache=False, seq_idx=torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32), **packed)
    print("packed documents are taken")
except ValueError as error:
    print(error)
