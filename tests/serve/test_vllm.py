"""vLLM serves our models: exported families, with the greedy tokens and log-probs of the library (slow, on demand)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_vllm import BLOCK
from vllm_models import TOKENS, Decided, decided

import dovetail as dt

ROOT = Path(__file__).parents[2]
RUN = Path(__file__).parent / "run_vllm.py"
NEAR = 2e-4  # of a log-prob in float32

FAMILIES = {
    "llama": "{width: 96, vocab: 101, layers: [{repeat: 3, mixer: {heads: 4, kv_heads: 2, head: 32}, ffn: {hidden: 160}}]}",
    "qwen3": """{width: 96, vocab: 101, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 32, qk_norm: rmsnorm},
        ffn: {hidden: 176}}]}""",
    "mixtral": """{width: 128, vocab: 101, layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 64},
        ffn: {kind: moe, experts: 6, hidden: 96, router: {kind: softmax_router, top_k: 2, normalize: true}}}]}""",
}


def python() -> Path:
    """The interpreter of vLLM's environment."""
    ready = ROOT / ".peers/vllm/ready"
    if not ready.exists():
        pytest.skip("bash benchmarks/peers/make vllm")
    return ready.parent / "bin/python"


def ask(place: Path, models: Sequence[tuple[Path, Decided]]) -> list[dict[str, Any]]:
    """What vLLM generates, model by model in one process."""
    request, answer = place / "request.json", place / "answer.json"
    asked = [{"model": str(path), "prompts": found.prompts, "tokens": TOKENS} for path, found in models]
    request.write_text(json.dumps(asked))
    done = subprocess.run([python(), RUN, request, answer], capture_output=True, text=True, timeout=1200, check=False)
    assert answer.exists(), done.stderr[-4000:]
    return json.loads(answer.read_text())


def check(found: Decided, answer: dict[str, Any]) -> None:
    """The answer has the tokens and the log-probs of the model, the second time with the prefix cache."""
    assert "error" not in answer, answer["error"]
    assert answer["tokens"][0] == found.tokens
    assert answer["tokens"][1] == found.tokens
    for cached, prompt in zip(answer["cached"], found.prompts, strict=True):
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK  # every whole block but that of the last token
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
