"""Training on token shards, and on several ranks."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import Diverged, FileError, SpecError, UsageError
from dovetail.data.bits import bits_per_byte
from dovetail.data.corpora import open_tokens
from dovetail.data.corpus import Corpus
from dovetail.data.loader import evaluation
from dovetail.data.stream import Stream
from dovetail.files.spec import from_yaml
from dovetail.hf.load import load
from dovetail.nn.loss import LossSum
from dovetail.text.learn import learn
from dovetail.training.loop import evaluate
from dovetail.training.objective import NextToken, next_token
from dovetail.training.source import named_rows

SPEC = """
width: 28
vocab: 258
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {hidden: 44}
"""
SIZES: dict[str, Any] = {"batch": 4, "length": 32, "sample": 0, "quiet": True, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small corpora of bytes."""
    home = tmp_path_factory.mktemp("stories")
    for name, animal in (("foxes", "foxes"), ("hens", "hens")):
        lines = [json.dumps({"text": f"Once there were {i} {animal}, in {i % 7} woods."}) for i in range(300)]
        (home / f"{name}.jsonl").write_text("\n".join(lines))
        dt.build_data([str(home / f"{name}.jsonl")], out=home / name, tokenizer="bytes", held_out=0.1, workers=1)
    return home


def test_a_run_on_shards_uses_their_tokenizer_and_held_out_documents(stories: Path, tmp_path: Path) -> None:
    run = dt.train(SPEC, data=[str(stories / "foxes")], steps=12, out=tmp_path / "run", **SIZES)
    assert run.history[-1].loss < 0.9 * run.history[0].loss
    assert run.history[-1].tokens == 12 * 4 * 32
    held = open_tokens(stories / "foxes", "held_out")
    loss = evaluate(load(tmp_path / "run"), list(evaluation(held, 32, 4, most=8)), next_token)
    assert loss == pytest.approx(run.held_out_loss, rel=1e-6)
    assert run.held_out_bits_per_byte == pytest.approx(bits_per_byte(loss, 1, held.tokens, held.bytes))  # type: ignore[attr-defined]
    assert (tmp_path / "run" / "tokenizer.json").read_text() == (stories / "foxes" / "tokenizer.json").read_text()


def test_a_mixture_is_resumed(stories: Path, tmp_path: Path) -> None:
    data = [f"{stories / 'foxes'}=0.7", f"{stories / 'hens'}=0.3"]
    whole = dt.train(SPEC, data=data, tokens=8 * 128, out=tmp_path / "run", **SIZES)
    assert len(whole.history) == 8
    with pytest.raises(FileError, match=r"holds another run: data.1 is"):
        dt.train(SPEC, data=data[:1], tokens=8 * 128, out=tmp_path / "run", **SIZES)


def test_data_that_does_not_fit_is_refused(stories: Path) -> None:
    place = str(stories / "foxes")
    with pytest.raises(SpecError, match="vocab: 200"):
        dt.train(SPEC, data=place, steps=1, set=["vocab=200"], **SIZES)
    with pytest.raises(FileError, match="is not a weight"):
        dt.train(SPEC, data=f"{place}=much", steps=1, **SIZES)
    with pytest.raises(UsageError, match="text"):
        dt.train(SPEC, place, data=place, steps=1, **SIZES)
    with pytest.raises(UsageError, match="text"):
        dt.train(SPEC, steps=1, **SIZES)


def command(home: Path, stories: Path, ranks: int, out: str, *more: str) -> list[str]:
    (home / "spec.yaml").write_text(SPEC)
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if ranks > 1 else []
    sizes = ["--batch=4", "--length=32", "--sample=0", "--learning-rate=1e-2"]
    return [
        sys.executable,
        *torchrun,
        "-m",
        "dovetail",
        "train",
        "spec.yaml",
        f"--data={stories / 'foxes'}",
        *sizes,
        "-o",
        out,
        *more,
    ]


def weights(place: Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in load(place).named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--ema=0.9", "--micro-batches=2"), ("--optimizer=muon",)])
def test_two_ranks_train_as_one(stories: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    for ranks in (1, 2):
        done = subprocess.run(
            command(tmp_path, stories, ranks, f"ranks-{ranks}", "--steps=10", *more),
            cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (weights(tmp_path / f"ranks-{ranks}") for ranks in (1, 2))
    start = {name: weight.detach() for name, weight in dt.build(from_yaml(SPEC)).named_parameters()}
    for name in one:
        moved = (one[name] - start[name]).norm()
        assert (one[name] - two[name]).norm() < 2e-3 * moved, name
    losses = [[json.loads(line)["loss"] for line in (tmp_path / f"ranks-{r}" / "loss.jsonl").open()] for r in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(2, ()), (4, ()), (4, ("--optimizer=muon",)), (2, ("--compile", "--ema=0.9"))])
def test_tensor_parallel_ranks_train_as_one(stories: Path, tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    for count in (1, ranks):
        flags = ["--steps=10", *more, *(["--tensor=2"] if count > 1 else [])]
        done = subprocess.run(
            command(tmp_path, stories, count, f"ranks-{count}", *flags),
            cwd=tmp_path, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (weights(tmp_path / f"ranks-{count}") for count in (1, ranks))
    start = {name: weight.detach() for name, weight in dt.build(from_yaml(SPEC)).named_parameters()}
    for name in one:
        moved = (one[name] - start[name]).norm()
        assert (one[name] - two[name]).norm() < 2e-3 * moved, name
    losses = [[json.loads(line)["loss"] for line in (tmp_path / f"ranks-{r}" / "loss.jsonl").open()] for r in (1, ranks)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_two_ranks_end_after_minutes_at_the_same_step(stories: Path, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(tmp_path, stories, 2, "run", "--minutes=0.02"), cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "loss.jsonl").open()]
    assert len(steps) > 3
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_two_ranks_are_killed_and_resume(stories: Path, tmp_path: Path) -> None:
    run = lambda out: command(tmp_path, stories, 2, out, "--steps=300", "--checkpoint-minutes=0.005")  # noqa: E731
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(run("whole"), cwd=tmp_path, capture_output=True, timeout=300, env=env, check=True)
    with subprocess.Popen(run("broken"), cwd=tmp_path, stderr=subprocess.DEVNULL, env=env) as child:
        while not list((tmp_path / "broken" / "checkpoints").glob("step-????????")):
            assert child.poll() is None
            time.sleep(0.05)
        ranks = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        for process in (child.pid, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        child.wait()
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    subprocess.run(run("broken"), cwd=tmp_path, capture_output=True, timeout=300, env=env, check=True)
    digests = [hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() for name in ("whole", "broken")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_a_gradient_that_is_not_finite_names_the_batch(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls, loss_of = [0], NextToken.__call__

    def nan_in_the_third(objective: NextToken, *args: Any) -> LossSum:
        calls[0] += 1
        loss = loss_of(objective, *args)
        return LossSum(loss.sum * (float("nan") if calls[0] == 3 else 1), loss.num_labels)

    monkeypatch.setattr(NextToken, "__call__", nan_in_the_third)
    text = tmp_path / "tale.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 60)
    where = {"text": text} if kind == "text" else {"data": str(stories / "foxes")}
    with pytest.raises(Diverged) as error:
        dt.train(SPEC, **where, steps=100, out=tmp_path / "run", seed=5, **SIZES)  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith("step 3: the loss is nan")
    if kind == "text":
        corpus = Corpus.cut(torch.zeros(len(learn(text.read_text(), 258, "byte_pair").encode(text.read_text()))), 32)
        starts = corpus.starts(5, 2, 4, 32).tolist()
        assert f"on the batch {text} from tokens {', '.join(map(str, starts))};" in message
    else:
        starts = Stream(open_tokens(stories / "foxes"), 32, 5).places(8, 4)[1].tolist()
        named = f"{stories / 'foxes'} (train) from tokens {', '.join(map(str, starts))}"
        assert f"on the batch of samples 8 to 11 ({named});" in message
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_many_rows_are_named_in_part() -> None:
    rows = [("a", 3), ("b", 5), *[("a", i) for i in range(30)]]
    assert named_rows(rows[:3]) == "a from tokens 3, 0; b from tokens 5"
    assert named_rows(rows).endswith("and 16 more rows")
