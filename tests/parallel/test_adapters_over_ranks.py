"""Law 8 with law 9: an adapted model over two ranks equals one rank, outputs and all gradients."""

from typing import Any

import pytest
from adapter_jobs import compare_adapted
from rank_jobs import error_of

from dovetail.files.spec import to_yaml
from dovetail.parallel.pair import Pair
from dovetail.proof.laws.mutant import spec

RELATION = 1e-9
LLAMA = spec()
EXPERTS = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
LATENT = spec().set("layers.*.mixer", {"kind": "mla", "heads": 6, "kv_rank": 5, "nope": 6, "rope": 8, "value": 7})
LORA: dict[str, Any] = {"kind": "lora", "rank": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "how"),
    [
        (LLAMA, LORA, "tp"),
        (LLAMA, LORA, "fsdp"),
        (EXPERTS, LORA, "tp"),
        (EXPERTS, LORA, "fsdp"),
        (LATENT, LORA, "tp"),
        (LLAMA, {"kind": "ia3"}, "tp"),
        (LLAMA, {"kind": "dora", "rank": 3}, "fsdp"),
    ],
    ids=["llama tp", "llama fsdp", "experts tp", "experts fsdp", "mla tp", "ia3 tp", "dora fsdp"],
)
def test_an_adapted_model_over_two_ranks_equals_one(pair: Pair, model: Any, kind: dict[str, Any], how: str) -> None:
    for gaps in pair.run(compare_adapted, to_yaml(model), kind, how):
        name, gap = max(gaps.items(), key=lambda item: item[1])
        assert gap < RELATION, name
        assert any(".adapter." in one for one in gaps)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "how"), [(LLAMA, "tp"), (EXPERTS, "tp"), (LLAMA, "fsdp")], ids=["tp", "experts", "fsdp"])
def test_the_dropout_of_an_adapter_is_that_of_one_rank(pair: Pair, model: Any, how: str) -> None:
    for gaps in pair.run(compare_adapted, to_yaml(model), {**LORA, "dropout": 0.3}, how, 1):
        name, gap = max(gaps.items(), key=lambda item: item[1])
        assert gap < RELATION, name


def test_dora_of_a_matrix_whose_rows_are_split_is_refused(pair: Pair) -> None:
    for kind, message in pair.run(error_of, compare_adapted, to_yaml(LLAMA), {"kind": "dora", "rank": 2}, "tp"):
        assert kind == "SpecError"
        assert "is computed from all of" in message
