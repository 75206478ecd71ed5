"""Runs in the environment of trl: the losses of its trainers, by their own code, on given log-probs. JSON in, JSON out."""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch


def per_token(sums, counts, length):
    """(rows, length) log-probs that add up to `sums` over the last `counts` of each row, and the mask (rows, length + 1)."""
    out, mask = torch.zeros(len(sums), length, dtype=torch.float64), torch.zeros(len(sums), length + 1, dtype=torch.long)
    for i, (total, count) in enumerate(zip(sums, counts, strict=True)):
        out[i, -count:], mask[i, -count:] = total / count, 1
    return out, mask


def outputs(log_probs):
    zeros = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), logits=None)


def trainer(**fields):
    accelerator = SimpleNamespace(
        gather_for_metrics=lambda x: x,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        device=torch.device("cpu"),
        num_processes=1,
    )
    stub = MagicMock()
    settings = {
        "aux_loss_enabled": False,
        "accelerator": accelerator,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        **fields,
    }
    for name, value in settings.items():
        setattr(stub, name, value)
    return stub


def dpo(given, kind):
    from trl.trainer.dpo_trainer import DPOTrainer

    counts = given["chosen_tokens"] + given["rejected_tokens"]
    log_probs, mask = per_token(given["chosen"] + given["rejected"], counts, 9)
    own = trainer(beta=given["beta"], loss_types=[kind], loss_weights=[1.0], f_divergence_type="reverse_kl", ld_alpha=None)
    own.precompute_ref_logps, own.use_weighting, own.label_smoothing, own._total_train_tokens, own._tp_size = (
        True,
        False,
        0.0,
        0,
        1,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    for name in ("chosen", "rejected"):
        inputs[f"ref_{name}_logps"] = torch.tensor(given[f"reference_{name}"], dtype=torch.float64)
    return DPOTrainer._compute_loss(own, lambda **_: outputs(log_probs), inputs, False)


def kto(given):
    from trl.trainer.kto_trainer import KTOTrainer

    log_probs, mask = per_token(given["chosen"], given["chosen_tokens"], 9)
    own = trainer(beta=given["beta"], loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.5)
    own.precompute_ref_logps, own._total_train_tokens, own._tp_size = True, 0, 1
    own._compute_kl_logps = lambda model, batch: torch.tensor(given["rejected"], dtype=torch.float64)
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs["label"] = torch.tensor(given["good"])
    inputs["ref_logps"] = torch.tensor(given["reference_chosen"], dtype=torch.float64)
    inputs["ref_KL_logps"] = torch.tensor(given["reference_rejected"], dtype=torch.float64)
    return KTOTrainer._compute_loss(own, lambda **_: outputs(log_probs), inputs, False)


def orpo(given):
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    means = [
        torch.tensor(given[name], dtype=torch.float64) / torch.tensor(given[f"{name}_tokens"], dtype=torch.float64)
        for name in ("chosen", "rejected")
    ]
    return -ORPOTrainer.odds_ratio_loss(trainer(beta=given["beta"]), *means)[0].mean()


def orpo_text(given):
    """The NLL of the chosen text and the whole loss, with their gradients, of logits that a table (vocab, vocab) gives."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    table = torch.tensor(given["table"], dtype=torch.float64, requires_grad=True)
    own = trainer(beta=given["beta"], is_encoder_decoder=False, padding_value=0)
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(own, name, getattr(ORPOTrainer, name))
    for name in ("concatenated_forward", "odds_ratio_loss"):
        setattr(own, name, getattr(ORPOTrainer, name).__get__(own))
    batch = {}
    for name in ("chosen", "rejected"):
        tokens, starts = given[name], given["starts"]
        width = max(map(len, tokens))
        batch[f"{name}_input_ids"] = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
        batch[f"{name}_attention_mask"] = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in tokens])
        labels = [[-100] * start + row[start:] + [-100] * (width - len(row)) for row, start in zip(tokens, starts, strict=True)]
        batch[f"{name}_labels"] = torch.tensor(labels)
    model = lambda ids, **_: SimpleNamespace(logits=table[ids])  # noqa: E731
    text, whole = own.concatenated_forward(model, batch)[4], ORPOTrainer.get_batch_loss_metrics(own, model, batch)[0]
    return {name: with_gradient(value, table) for name, value in (("text", text), ("whole", whole))}


def with_gradient(value, of):
    (gradient,) = torch.autograd.grad(value, of, retain_graph=True)
    return {"value": float(value), "gradient": gradient.tolist()}


def reward(given):
    from trl.trainer.reward_trainer import RewardTrainer

    values = torch.tensor(given["chosen"] + given["rejected"], dtype=torch.float64)[:, None]
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1)
    inputs = {"attention_mask": torch.ones(len(values), 4)}
    return RewardTrainer.compute_loss(own, lambda **_: SimpleNamespace(logits=values), inputs)


def grpo(given):
    from trl.trainer.grpo_trainer import GRPOTrainer

    tensors = {name: torch.tensor(given[name], dtype=torch.float64) for name in ("policy", "old", "reference", "advantages")}
    mask = torch.tensor(given["mask"])
    tensors["policy"].requires_grad_()
    own = trainer(beta=given["kl"], loss_type="bnpo", importance_sampling_level="token", epsilon_low=given["clip"])
    own.epsilon_high, own.top_entropy_quantile, own.off_policy_mask_threshold, own.use_vllm = given["clip"], 1.0, None, False
    own.args = SimpleNamespace(delta=None, use_bias_correction_kl=False)
    own._entropy_bonus_enabled, own.current_gradient_accumulation_steps = False, 1
    zeros = torch.zeros_like(tensors["policy"])
    own._get_per_token_logps_and_entropies = lambda *_, **__: (tensors["policy"], zeros, None)
    inputs = {"prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": tensors["advantages"], "old_per_token_logps": tensors["old"]}
    loss = GRPOTrainer._compute_loss(own, None, {**inputs, "ref_per_token_logps": tensors["reference"]})
    return with_gradient(loss, tensors["policy"])


given = json.load(sys.stdin)
found = {"dpo": dpo(given["pairs"], "sigmoid"), "ipo": dpo(given["pairs"], "ipo"), "orpo": orpo(given["pairs"])}
found |= {"kto": kto(given["pairs"]), "reward": reward(given["pairs"])}
made = {name: float(value) for name, value in found.items()}
made |= {"grpo": [grpo(one) for one in given["grpo"]], "orpo_text": orpo_text(given["texts"])}
print(json.dumps(made))
