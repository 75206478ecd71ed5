"""vLLM serves our models with the greedy tokens and log-probs of the library: exported families, and by the plugin specs that
no family can express; what the plugin cannot serve is refused at load (slow, on demand: benchmarks/peers/make vllm)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_models import TOKENS, Decided, decided, otherwise, python
from vllm_specs import CASES, sharded

import dovetail as dt
from dovetail.hf.own_config import write_own_config
from dovetail.hf.write import model_pieces

RUN = Path(__file__).parent / "run_vllm.py"
FEWER = 64  # tokens, on two ranks
NEAR = 5e-5  # of a log-prob in float32; the largest difference found was 8e-6

FAMILIES = {
    "llama": "{width: 96, vocab: 101, layers: [{repeat: 3, mixer: {heads: 4, kv_heads: 2, head: 32}, ffn: {hidden: 160}}]}",
    "qwen3": """{width: 96, vocab: 101, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 32, qk_norm: rmsnorm},
        ffn: {hidden: 176}}]}""",
    "mixtral": """{width: 128, vocab: 101, layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 64},
        ffn: {kind: moe, experts: 6, hidden: 96, router: {kind: softmax_router, top_k: 2, normalize: true}}}]}""",
}


def ask(place: Path, models: Sequence[tuple[Path, Decided]], tokens: int = TOKENS, ranks: int = 1) -> list[dict[str, Any]]:
    """What vLLM generates, model by model in one process, or on several ranks."""
    request, answer = place / "request.json", place / "answer.json"
    asked = [{"model": str(path), "prompts": found.prompts, "tokens": tokens, "ranks": ranks} for path, found in models]
    request.write_text(json.dumps(asked))
    done = subprocess.run([python(), RUN, request, answer], capture_output=True, text=True, timeout=3600, check=False)
    assert answer.exists(), done.stderr[-4000:]
    return json.loads(answer.read_text())


def check(found: Decided, answer: dict[str, Any]) -> None:
    """The answer has the tokens and the log-probs of the model, the second time with the prefix cache."""
    assert "error" not in answer, answer["error"]
    assert answer["tokens"][0] == found.tokens
    assert answer["tokens"][1] == found.tokens
    for cached, prompt in zip(answer["cached"], found.prompts, strict=True):
        assert cached == (len(prompt) - 1) // answer["block"] * answer["block"]  # every whole block but that of the last token
    for ours, theirs in zip(found.logprobs, answer["logprobs"], strict=True):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < NEAR


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_vllm_gives_the_tokens_of_an_exported_model(tmp_path: Path) -> None:
    python()
    models: list[tuple[Path, Decided]] = []
    for family, text in FAMILIES.items():
        found = decided(dt.from_yaml(text))
        dt.save(found.model, tmp_path / "ours" / family)
        assert dt.export(tmp_path / "ours" / family, tmp_path / family, family=family).model_type == family
        models.append((tmp_path / family, found))
    for (_, found), answer in zip(models, ask(tmp_path, models), strict=True):
        check(found, answer)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decided, dict[str, Any]]]:
    """What the library and vLLM generate, by the name of the spec."""
    python()
    place = tmp_path_factory.mktemp("plugin")
    models: list[tuple[Path, Decided]] = []
    for name, case in CASES.items():
        found, own = decided(case.spec), place / f"own {name}"
        assert otherwise(found, case.plain)
        dt.save(found.model, own)
        assert dt.export(own, place / name, family="dovetail").model_type == "dovetail"
        models.append((place / name, found))
    answers = ask(place, models)
    return {name: (found, answer) for name, (_, found), answer in zip(CASES, models, answers, strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", CASES)
def test_the_plugin_gives_the_tokens_of_the_library(plugin: dict[str, tuple[Decided, dict[str, Any]]], name: str) -> None:
    check(*plugin[name])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_the_plugin_gives_the_tokens_of_the_library_on_two_ranks(tmp_path: Path) -> None:
    python()
    models: list[tuple[Path, Decided]] = []
    for name, case in sharded().items():
        found = decided(case.spec, FEWER)
        assert otherwise(found, case.plain)
        dt.save(found.model, tmp_path / f"own {name}")
        dt.export(tmp_path / f"own {name}", tmp_path / name, family="dovetail")
        models.append((tmp_path / name, found))
    for (_, found), answer in zip(models, ask(tmp_path, models, FEWER, ranks=2), strict=True):
        check(found, answer)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_plugin_refuses_at_load(tmp_path: Path) -> None:
    python()
    model = dt.build(next(iter(CASES.values())).spec)
    found = Decided(model, 0, [[1, 2, 3]], [], [])
    for name in ("missing", "unknown", "shape"):
        write_own_config(model.spec, model_pieces(model), tmp_path / name, {}, {})
        file = tmp_path / name / "model.safetensors"
        tensors = load_file(file)
        if name == "unknown":
            tensors["layers.9.mixer.q.weight"] = torch.ones(2)
        else:
            weight = tensors.pop("layers.1.mixer.q.weight")
            tensors |= {"layers.1.mixer.q.weight": weight[:-1].clone()} if name == "shape" else {}
        save_file(tensors, file)
    hybrid = dt.build(dt.load_spec("mamba2-hybrid-tiny"))
    for name in ("hybrid", "architecture"):
        write_own_config(hybrid.spec, model_pieces(hybrid), tmp_path / name, {}, {})
    config = tmp_path / "architecture" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["DovetailForCausalLM"]}))
    names = ["missing", "unknown", "shape", "hybrid", "architecture"]
    errors = [answer["error"] for answer in ask(tmp_path, [(tmp_path / name, found) for name in names])]
    assert "layers.1.mixer.q.weight: is missing" in errors[0]
    assert "layers.9.mixer.q.weight: is not a weight of this spec" in errors[1]
    assert "layers.1.mixer.q.weight: is [127, 96]; the spec says [128, 96]" in errors[2]
    assert "layers.3.mixer: vllm cannot serve it: heads of 28" in errors[3]
    assert "the architecture is DovetailForCausalLM; the spec needs DovetailHybridForCausalLM" in errors[4]
