"""longcat_flash: in one of the two banks, experts that compute nothing have weights."""

from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

sizes = {"vocab_size": 62, "hidden_size": 48, "num_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 40}
latent = {"q_lora_rank": 10, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4}
experts = {"n_routed_experts": 4, "zero_expert_num": 4, "expert_ffn_hidden_size": 20, "moe_topk": 2}
model = LongcatFlashForCausalLM(LongcatFlashConfig(**sizes, **latent, **experts))
for name, weight in model.named_parameters():
    if "experts." in name:
        print(name, "has", len(weight), "experts; 4 compute")
