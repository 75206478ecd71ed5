"""deepseek_v4: the compressor ignores the mask; it counts windows from the first padding and compresses padding too."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "moe_intermediate_size": 20}
latent = {"q_lora_rank": 10, "o_lora_rank": 10, "head_dim": 8, "qk_rope_head_dim": 4, "o_groups": 2, "sliding_window": 7}
index = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
kinds = {"layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"], "initializer_range": 0.3}
model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, **latent, **index, **kinds, pad_token_id=0)).eval()
ids, mask = torch.randint(3, 62, (1, 15)), torch.tensor([[0] * 6 + [1] * 15])
with torch.no_grad():
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = model(torch.cat([0 * ids[:, :6], ids], 1), **at).logits[:, 6:]
    print("gap:", (padded - model(ids).logits).abs().max().item())
