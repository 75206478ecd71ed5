"""nemotron_h: time_step_min bounds the step size Δ in a whole pass, but not in a decode step with the cache."""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "layers_block_type": ["mamba", "attention"], "num_attention_heads": 4}
mamba = {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8, "head_dim": 12}
for shortest in (0.001, 0.1):
    config = NemotronHConfig(**sizes, **mamba, num_key_value_heads=2, initializer_range=0.3, time_step_min=shortest)
    model, ids = NemotronHForCausalLM(config).eval(), torch.randint(3, 62, (1, 12))
    with torch.no_grad():
        first = model(ids[:, :8], use_cache=True)
        step = model(ids[:, 8:9], past_key_values=first.past_key_values).logits
        print(shortest, "gap:", (step - model(ids).logits[:, 8:9]).abs().max().item())
