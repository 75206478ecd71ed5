"""Tasks of lm-eval run on our models, with the numbers of its own model of transformers, in an environment of its own:
bash benchmarks/peers/make eval."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_designs import lab

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.experiments.design import read_design
from dovetail.experiments.lab import LabState
from dovetail.experiments.outside import evaluate_tasks, task_scores
from dovetail.experiments.outside_metric import over_items

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "eval" / "bin" / "python"
TASKS = ROOT / "tests" / "data" / "lm_eval"
SCRIPT = """
import json, sys
import dovetail as dt
import torch
from dovetail.experiments.design import read_design
from dovetail.experiments.lab import LabState
from dovetail.experiments.outside import evaluate_tasks, task_scores
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out, text = sys.argv[1:]
names = ["dovetail_choice", "dovetail_text", "dovetail_answer"]
tokenizer = dt.learn_tokenizer(text, 300).with_special(["<s>"])
tokenizer.engine.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.id_of("<s>"))])
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.engine, bos_token="<s>", eos_token="<|end|>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=tokenizer.size, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=fast.bos_token_id,
    eos_token_id=fast.eos_token_id,
)
LlamaForCausalLM(config).save_pretrained(out)
fast.save_pretrained(out)

manager = TaskManager(include_path=".", include_defaults=False)
model = HFLM(pretrained=out, dtype="float32", device="cpu", batch_size=4)
theirs = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)
ours = evaluate_tasks(dt.load(out), names, ".")
hybrid = "{width: 32, vocab: 300, layers: [{mixer: {kind: mamba2, head: 8, state_size: 8}, ffn: {hidden: 40}}]}"
other = evaluate_tasks(dt.build(hybrid, tokenizer=dt.learn_tokenizer(text, 300)), names, ".")


def plain(report):
    samples = {
        name: [sample["resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in report["samples"].items()
    }
    return {"samples": samples, "results": report["results"]}


scores = {f"{score.task}.{score.metric}": [score.value, len(score.items)] for score in task_scores(ours)}
print(json.dumps({"theirs": plain(theirs), "ours": plain(ours), "other": plain(other), "scores": scores}, default=str))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("eval")
    return in_environment(SCRIPT, str(out), (TASKS / "items.jsonl").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_numbers_are_those_of_its_own_model_on_an_imported_checkpoint(reports: dict[str, Any]) -> None:
    ours, theirs = reports["ours"], reports["theirs"]
    for name in ("dovetail_choice", "dovetail_text"):
        found, wanted = (numbers_of(report["samples"][name]) for report in (ours, theirs))
        assert len(found) >= 12
        assert found == pytest.approx(wanted, abs=2e-4)
    assert ours["samples"]["dovetail_answer"] == theirs["samples"]["dovetail_answer"]
    assert any(len(text) > 2 for text in strings(ours["samples"]["dovetail_answer"]))
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, abs=1e-5), (task, name)
    assert reports["scores"]["dovetail_choice.acc"] == [theirs["results"]["dovetail_choice"]["acc,none"], 12]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_run_on_any_spec(reports: dict[str, Any]) -> None:
    results = reports["other"]["results"]
    assert 0 <= results["dovetail_choice"]["acc,none"] <= 1
    assert 0 < results["dovetail_text"]["bits_per_byte,none"] < 20
    assert len(strings(reports["other"]["samples"]["dovetail_answer"])) == 12


LAB = """
import json, sys
import dovetail as dt

base = "{width: 16, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 2, head: 8}, ffn: {hidden: 24}}]}"
result = dt.lab(
    {
        "base": base, "arms": {"alibi": {"swap": {"position": "alibi"}}}, "data": {"text": sys.argv[2]},
        "train": {"batch": 2, "length": 16, "evals": 1}, "budget": {"steps": 3}, "seeds": {"at_least": 2, "at_most": 2},
        "metric": {"lm_eval": "dovetail_choice", "tasks": "."},
    },
    out=sys.argv[1], workers=1,
)
print(json.dumps({"lab": result.to_dict(), "text": str(result)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_task_is_the_metric_of_a_lab_with_an_interval_over_its_items(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 60, encoding="utf-8")
    found = in_environment(LAB, str(tmp_path / "lab"), str(text))
    data = found["lab"]
    assert data["metric"] == "dovetail_choice.acc"
    items = [
        json.loads((tmp_path / "lab" / "runs" / f"{row['run']}.json").read_text(encoding="utf-8"))["report"]["items"]
        for row in sorted(data["runs"], key=lambda row: (row["arm"], row["seed"]))
    ]
    assert [len(some) for some in items] == [12] * 4
    assert sorted(sum(some) / 12 for some in items) == pytest.approx(sorted(row["value"] for row in data["runs"]))
    assert data["over_items"]["alibi"]["items"] == 12
    assert data["over_items"]["alibi"]["mean"] == pytest.approx((sum(map(sum, items[:2])) - sum(map(sum, items[2:]))) / 24)
    assert "over 12 items like these" in found["text"]


def in_environment(script: str, *arguments: str) -> dict[str, Any]:
    """What a script prints that runs among the tasks."""
    if not (PYTHON.parents[1] / "ready").exists():
        pytest.skip("bash benchmarks/peers/make eval")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(arguments[0]) / "cache")}
    command = [str(PYTHON), "-c", script, *arguments]
    done = subprocess.run(command, cwd=TASKS, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def strings(data: Any) -> list[str]:
    """The strings in nested lists."""
    return [text for item in data for text in strings(item)] if isinstance(data, list) else [data]


def numbers_of(data: Any) -> list[float]:
    """The numbers in nested lists, True as 1; lm-eval writes some of them as strings."""
    if isinstance(data, list):
        return [number for item in data for number in numbers_of(item)]
    return [float({"True": 1, "False": 0}.get(str(data), data))]


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(FileError, match=r"pip install .*\[eval\]"):
        evaluate_tasks(dt.build("llama-tiny", device="meta"), ["arc_easy"])


def test_metrics_that_are_no_mean_over_items_are_left_out() -> None:
    samples = [{"doc_id": 1, "acc": 0.0, "ppl": (1.0, 2)}, {"doc_id": 0, "acc": 1.0, "ppl": (3.0, 4)}]
    report = {"samples": {"t": samples}, "higher_is_better": {"t": {"acc": True, "ppl": False}}}
    (score,) = task_scores(report)
    assert score == ("t", "acc", 0.5, True, (1.0, 0.0))


def test_a_metric_that_is_a_task_is_read_and_determines_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plays.txt").write_text("words", encoding="utf-8")
    shutil.copytree(TASKS, tmp_path / "tasks")

    def key(**metric: Any) -> str:
        metric = {"lm_eval": "dovetail_choice", "tasks": "tasks", **metric}
        return LabState(read_design(lab(metric=metric)), Path("out")).run("base", 0).key

    first = key()
    assert len({first, key(name="acc_norm"), key(limit=5), key(lm_eval="dovetail_text")}) == 4
    (tmp_path / "tasks").rename("moved")
    assert key(tasks="moved") == first
    (tmp_path / "moved" / "items.jsonl").write_text("{}", encoding="utf-8")
    assert key(tasks="moved") != first
    with pytest.raises(FileError, match=r"metric\.tasks: there is no directory tasks"):
        key()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"tasks": "."}, "lab: metric: lm_eval is missing"),
        ({"lm_eval": "a", "acc": 1}, "lab: metric.acc: is not a key"),
        ({"lm_eval": "a", "limit": 0}, "lab: metric.limit: 0 is not a whole number"),
        ({"lm_eval": "a", "higher_is_better": "no"}, "lab: metric.higher_is_better: is true or false"),
    ],
)
def test_what_a_task_as_metric_cannot_be(metric: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_design(lab(metric=metric))


def test_pairs_of_items_are_those_of_one_seed() -> None:
    arm, base = [{"items": [1, 1, 0, 1]}, {"items": [1, 0, 0, 1]}], [{"items": [0, 1, 0, 1]}, {"items": [0, 0, 0, 1]}]
    at = over_items(arm, base, 0.05)
    assert at is not None
    assert (at.n, at.mean) == (4, 0.25)
    assert at.sd == pytest.approx(0.5)
    assert over_items([{}], [{}], 0.05) is None
