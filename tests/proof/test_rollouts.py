"""Gaps between a sampler and a trainer, made on purpose on tiny models: the cause is named first, and the shares are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rollout_gaps import Gap, Maker, Truncation
from rollouts import settings_share

import dovetail
from dovetail.base.errors import FileError, UsageError
from dovetail.files.model_dir import save
from dovetail.proof.compare.sides import ModelSide
from dovetail.proof.rollouts.check import explain_rollouts
from dovetail.proof.rollouts.file import read_rollouts
from dovetail.proof.rollouts.verdict import RolloutVerdict, Statistics

MAKER = Maker(rows=6, length=24)


def settings(kind: str, how: Truncation, *, narrow: bool = False, recorded: bool = False) -> Callable[[], Gap]:
    return lambda: MAKER.settings(kind, "gemma", 0, how, narrow=narrow, recorded=recorded)


def explained(gap: Gap, place: Path, **more: bool) -> RolloutVerdict:
    file = gap.write(place / "rollouts.jsonl")
    older = [ModelSide(model, "older") for model in gap.older]
    return explain_rollouts(ModelSide(gap.trainer), str(file), read_rollouts(file), older=older, **more)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        pytest.param(settings("temperature", Truncation(temperature=0.73)), "sampling", id="temperature"),
        pytest.param(settings("top_p", Truncation(top_p=0.83)), "sampling", id="top_p"),
        pytest.param(settings("top_k", Truncation(top_k=9)), "sampling", id="top_k"),
        pytest.param(settings("min_p", Truncation(min_p=0.07)), "sampling", id="min_p"),
        pytest.param(lambda: MAKER.batch("gemma", 0, torch.float32), "equal", id="batch shape"),
        pytest.param(lambda: MAKER.batch("gemma", 0, torch.bfloat16), "rounding", id="batch shape, bf16"),
        pytest.param(lambda: MAKER.stale("gemma", 0, 8, "older"), "stale", id="older checkpoint"),
        pytest.param(lambda: MAKER.shift("gemma", 0, "next"), "structural", id="next token"),
        pytest.param(lambda: MAKER.shift("gemma", 0, "before"), "structural", id="token before"),
        pytest.param(lambda: MAKER.shift("gemma", 0, "echo"), "structural", id="echo"),
        pytest.param(
            settings("temperature", Truncation(temperature=1.4), narrow=True),
            "sampling",
            id="temperature, bf16",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: MAKER.bfloat16("gemma", 0), "rounding", id="bf16", marks=pytest.mark.slow),
        pytest.param(lambda: MAKER.stale("gemma", 0, 8, "versions"), "stale", id="versions", marks=pytest.mark.slow),
        pytest.param(lambda: MAKER.base("gemma", 0, 1e6), "structural", id="rope base", marks=pytest.mark.slow),
        pytest.param(lambda: MAKER.base("gemma", 0, 42_000.0), "structural", id="a base in no list", marks=pytest.mark.slow),
    ],
)
def test_the_cause_is_named_first(make: Callable[[], Gap], status: str, tmp_path: Path) -> None:
    gap = make()
    verdict = explained(gap, tmp_path)
    first = verdict.causes[0]
    assert first.name in gap.names
    assert gap.words in first.description
    assert sum(one.share for one in verdict.causes) == pytest.approx(1, abs=1e-6)
    assert verdict.status == status
    assert verdict.failed == (status == "structural")
    assert first.share > 0.5


@pytest.mark.parametrize(
    "how",
    [
        Truncation(temperature=0.8, top_p=0.8),
        pytest.param(Truncation(temperature=0.7, top_k=20, top_p=0.9), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_temperature_and_truncation_have_the_shares_that_the_sampler_gave_them(how: Truncation, tmp_path: Path) -> None:
    gap = MAKER.settings("truncation", "gemma", 0, how, narrow=False, recorded=False)
    verdict = explained(gap, tmp_path)
    shares = {one.name: one.share for one in verdict.causes}
    tempered = [{**line, "logprobs": line["tempered"]} for line in tempered_lines(gap, how)]
    only = added_by_temperature(gap, tempered)
    assert shares["temperature"] + shares["truncation"] == pytest.approx(settings_share(gap), abs=0.01)
    assert shares["temperature"] == pytest.approx(share_of(only, gap), abs=0.01)


def tempered_lines(gap: Gap, how: Truncation) -> list[dict[str, list[float]]]:
    """The lines with the log-probs after temperature and before truncation, from the trainer's own logits."""
    from dovetail.nn.ctx import Ctx
    from dovetail.nn.layout import TokenLayout

    lines = []
    for line in gap.lines:
        ids = torch.tensor([line["prompt_ids"] + line["completion_ids"]])
        with torch.no_grad():
            logits = gap.trainer(ids, Ctx(layout=TokenLayout.whole(*ids.shape)))[0].double()
        start = len(line["prompt_ids"]) - 1
        values = (logits / how.temperature).log_softmax(-1)
        lines.append({**line, "tempered": [values[start + i, y].item() for i, y in enumerate(line["completion_ids"])]})
    return lines


def added_by_temperature(gap: Gap, lines: list[dict[str, list[float]]]) -> torch.Tensor:
    """What temperature alone adds to each log-prob."""
    after = torch.tensor([line["logprobs"] for line in lines], dtype=torch.float64)
    return after - torch.tensor([line["raw"] for line in gap.lines], dtype=torch.float64)


def share_of(component: torch.Tensor, gap: Gap) -> float:
    sampler = torch.tensor([line["logprobs"] for line in gap.lines], dtype=torch.float64)
    delta = sampler - torch.tensor([line["raw"] for line in gap.lines], dtype=torch.float64)
    return ((component * delta).sum() / delta.square().sum()).item()


def test_recorded_settings_that_the_log_probs_contradict_fail(tmp_path: Path) -> None:
    gap = settings("temperature", Truncation(temperature=0.7))()
    gap.lines[:] = [{**line, "temperature": 1.0, "top_p": 1.0} for line in gap.lines]
    verdict = explained(gap, tmp_path)
    assert verdict.status == "sampling"
    assert verdict.failed
    assert "temperature 1" in verdict.contradictions[0]


def test_recorded_settings_that_hold_do_not_fail(tmp_path: Path) -> None:
    verdict = explained(settings("top_k", Truncation(top_k=9), recorded=True)(), tmp_path)
    assert not verdict.contradictions
    assert not verdict.failed


def test_log_probs_before_temperature_are_noted(tmp_path: Path) -> None:
    gap = MAKER.batch("gemma", 0, torch.float32)
    gap.lines[:] = [{**line, "temperature": 0.7} for line in gap.lines]
    verdict = explained(gap, tmp_path)
    assert verdict.status == "equal"
    assert any("before temperature" in note for note in verdict.notes)


def test_the_token_that_shows_a_cause_most_is_the_one_with_the_largest_gap(tmp_path: Path) -> None:
    gap = settings("temperature", Truncation(temperature=0.5))()
    shown = explained(gap, tmp_path).causes[0].token
    line = gap.lines[shown.line - 1]
    gaps = [abs(s - raw) for one in gap.lines for s, raw in zip(one["logprobs"], one["raw"], strict=True)]
    assert abs(shown.value) == pytest.approx(max(gaps), rel=1e-3)
    assert line["completion_ids"][shown.index] == shown.token
    assert line["logprobs"][shown.index] == shown.sampler


def test_statistics_are_those_of_their_formulas() -> None:
    sampler, trainer = (
        torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64),
        torch.tensor([-1.5, -2.0, -0.4], dtype=torch.float64),
    )
    one = Statistics.of(sampler, trainer)
    assert one.mean == pytest.approx((0.5 - 0.1) / 3)
    assert one.mean_abs == pytest.approx(0.2)
    assert one.max_abs == pytest.approx(0.5)
    assert one.k3 == pytest.approx((0.6065306597 + 0.5 - 1 + 1.1051709181 - 0.1 - 1) / 3)
    assert one.max_ratio == pytest.approx(1.6487212707)
    assert one.outside == pytest.approx(1 / 3)


def test_the_command_prints_one_json_object_and_exits_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli import main

    gap = settings("top_k", Truncation(top_k=9))()
    save(gap.trainer, gap.trainer.part, tmp_path / "model")
    file = gap.write(tmp_path / "rollouts.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "model"), "--rollouts", str(file), "--json"])
    assert ended.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["cause"], data["settings"]) == ("sampling", "truncation", "top_k = 9")
    result = dovetail.verify(str(tmp_path / "model"), rollouts=file)
    assert result.status == "sampling"
    assert "truncation" in str(result)
    assert "top_k = 9" in result.to_html()


def test_two_sides_or_rollouts(tmp_path: Path) -> None:
    model = MAKER.model("gemma", 0)
    with pytest.raises(UsageError, match="give a second one, or rollouts"):
        dovetail.verify(model)
    with pytest.raises(UsageError, match="give one side"):
        dovetail.verify(model, model, rollouts=tmp_path / "rollouts.jsonl")
    with pytest.raises(UsageError, match="also give rollouts FILE"):
        dovetail.verify(model, model, older=[model])


def test_a_token_beyond_the_vocabulary_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"prompt_ids": [1], "completion_ids": [2, 9999], "logprobs": [-1, -1]}\n')
    with pytest.raises(FileError, match=r"rollouts.jsonl:1: token 9999 is beyond the vocabulary of 122"):
        dovetail.verify(MAKER.model("gemma", 0), rollouts=file)
