"""Adapters in peft's layout, against peft itself in float64: ours read by peft, peft's read by us."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.disk.tensors import TensorFile
from dovetail.hf.write import write_fresh
from dovetail.proof.laws.adapted import perturb
from dovetail.weights.adapters.storage import adapter_tensors

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "tuning" / "bin" / "python"
pytestmark = pytest.mark.skipif(not (PYTHON.parents[1] / "ready").exists(), reason="bash benchmarks/peers/make tuning")
BOUND = 1e-12
IDS = torch.arange(14).view(2, 7)
SMALL = "width: 24, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 4}, ffn: {hidden: 44}}]"
EXPERTS = "ffn: {kind: moe, experts: 4, hidden: 20, router: {kind: softmax_router, top_k: 2}}"
MOE = SMALL.replace("ffn: {hidden: 44}", EXPERTS) + ", head: {kind: lm, tied: false}"
SINKS = "heads: 6, kv_heads: 2, head: 4, bias: true, out_bias: true, sink: true"
GPT_OSS = f"""
{{width: 24, vocab: 62, head: {{kind: lm, tied: false}}, layers: [{{repeat: 2, pattern: [local, full],
local: {{mixer: {{{SINKS}, mask: [causal, {{kind: window, size: 5}}]}}}}, full: {{mixer: {{{SINKS}}}}},
ffn: {{kind: moe, experts: 4, hidden: 20, act: quick_gelu, bias: true, limit: 7.0, plus_one: true,
router: {{kind: softmax_router, top_k: 2, bias: true}}}}}}]}}
"""
# family -> (spec, the adapters that we write, those of peft)
LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5}
FAMILIES: dict[str, tuple[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]]] = {
    "llama": (
        f"{{{SMALL}, head: {{kind: lm, tied: false}}}}",
        {
            "lora": ({"kind": "lora", "rank": 3, "alpha": 5.0}, {**LORA, "target_modules": "all-linear"}),
            "root": (
                {"kind": "lora", "rank": 4, "scale": "root", "targets": ["q", "down", "head.out"]},
                {**LORA, "use_rslora": True},
            ),
            "dora": (
                {"kind": "dora", "rank": 2},
                {**LORA, "use_dora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
            ),
            "ia3": ({"kind": "ia3"}, {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
            "ranks": ({"kind": "lora", "rank": 1}, {**LORA, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}}),
        },
    ),
    "phi3": (
        f"{{{SMALL}, head: {{kind: lm, tied: false}}}}",
        {
            "lora": ({"kind": "lora", "rank": 2}, {**LORA, "target_modules": ["qkv_proj", "gate_up_proj"]}),
            "some": ({"kind": "lora", "rank": 2, "targets": ["q", "v"]}, {**LORA, "target_modules": ["o_proj"]}),
            "dora": ({"kind": "dora", "rank": 2}, {**LORA, "use_dora": True, "target_modules": ["qkv_proj"]}),
        },
    ),
    "mixtral": (
        f"{{{MOE}}}",
        {
            "lora": (
                {"kind": "lora", "rank": 3, "alpha": 5.0},
                {**LORA, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
            ),
            "up": (
                {"kind": "lora", "rank": 2, "targets": ["bank.up", "v"]},
                {**LORA, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
            ),
            "down": (
                {"kind": "lora", "rank": 2, "scale": "root", "targets": ["bank.down"]},
                {**LORA, "use_rslora": True, "target_modules": [], "target_parameters": ["down_proj"]},
            ),
        },
    ),
    "granitemoe": (
        f"{{{MOE}}}",
        {"lora": ({"kind": "lora", "rank": 2}, {**LORA, "target_modules": [], "target_parameters": ["experts.down_proj"]})},
    ),
    "gpt_oss": (
        GPT_OSS,
        {
            "lora": (
                {"kind": "lora", "rank": 2, "dropout": 0.2},
                {**LORA, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
            )
        },
    ),
    "gpt2": (
        "gpt2",
        {"lora": ({"kind": "lora", "rank": 2}, {**LORA, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True})},
    ),
}


def read(file: Path) -> dict[str, torch.Tensor]:
    with TensorFile(file) as tensors:
        return {name: tensors.read(name).clone() for name in tensors.entries}


def base_of(family: str, text: str) -> dt.Transformer:
    if family != "gpt2":
        return dt.build(text, dtype="float64", seed=3)
    spec = dt.load_spec("gpt2").set("width", 24).set("vocab", 62)
    spec = spec.set("layers.*.mixer.heads", 2).set("layers.*.ffn.hidden", 44)
    spec = spec.replace("layers", lambda layers: layers[:2])
    return dt.build(spec, dtype="float64", seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ours_in_peft_and_peft_s_here_have_the_same_logits(family: str, tmp_path: Path) -> None:
    text, adapters = FAMILIES[family]
    model = base_of(family, text)
    write_fresh(model, tmp_path / "base", family)
    wants: dict[str, torch.Tensor] = {"base": model(IDS)}
    jobs: list[dict[str, Any]] = []
    for name, (ours, theirs) in adapters.items():
        own = dt.load(tmp_path / "base")
        dt.attach(own, ours)
        perturb(own, 5)
        wants[f"ours {name}"] = own(IDS)
        dt.save_adapter(own, tmp_path / f"ours-{name}", base=tmp_path / "base", layout="peft")
        back = dt.load(tmp_path / "base", adapter=tmp_path / f"ours-{name}")
        assert (back(IDS) - own(IDS)).abs().max() <= BOUND, "read back by us"
        jobs.append({"name": name, "type": "IA3" if ours["kind"] == "ia3" else "LORA", "config": theirs})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("peft_side.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, script, tmp_path], capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    logits = read(tmp_path / "logits.safetensors")
    assert (logits["base"] - wants["base"]).abs().max() <= BOUND
    for name in adapters:
        assert (wants[f"ours {name}"] - wants["base"]).abs().max() > 1e-3, "the adapter does something"
        assert (logits[f"ours {name}"] - wants[f"ours {name}"]).abs().max() <= BOUND, name
        got = dt.load(tmp_path / "base", adapter=tmp_path / f"theirs-{name}")(IDS)
        assert (logits[f"theirs {name}"] - logits["base"]).abs().max() > 1e-3, "theirs does something"
        assert (got - logits[f"theirs {name}"]).abs().max() <= BOUND, name


def test_what_peft_cannot_hold_is_refused_by_its_path(tmp_path: Path) -> None:
    for kind in ("dora", "ia3"):
        model = dt.build(f"{{{MOE}}}")
        dt.attach(model, {"kind": kind, "targets": ["bank.down"]})
        with pytest.raises(
            SpecError, match=rf"layers\.0\.ffn\.bank\.down: .*mlp\.experts\.down_proj, .* only lora, not {kind}"
        ):
            dt.save_adapter(model, tmp_path / "experts", layout="peft")


def test_a_config_that_changes_more_than_we_read_is_refused(tmp_path: Path) -> None:
    model = dt.build(f"{{{SMALL}}}")
    dt.attach(model, "lora")
    dt.save_adapter(model, tmp_path / "one", layout="peft")
    file = tmp_path / "one" / "adapter_config.json"
    config = json.loads(file.read_text())
    for field, value in (
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
    ):
        file.write_text(json.dumps({**config, field: value}))
        with pytest.raises(FileError, match=field):
            dt.load(_saved(tmp_path), adapter=tmp_path / "one")
    file.write_text(json.dumps(config))
    assert adapter_tensors(dt.load(_saved(tmp_path), adapter=tmp_path / "one"))


def _saved(place: Path) -> Path:
    if not (place / "base").exists():
        dt.save(dt.build(f"{{{SMALL}}}"), place / "base")
    return place / "base"
