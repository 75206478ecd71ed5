"""What a server lacks is found by asking; what will be asked is announced; answers are untrusted; the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_served import BUGS
from wrong_server import running

import dovetail
from dovetail.base.errors import DovetailError, FileError, UsageError
from dovetail.cli import main
from dovetail.proof.answers import Answer, TokenStep, UnreadableAnswer, choices_of, joined
from dovetail.proof.served.case import Served
from dovetail.proof.served.client import DryRun
from dovetail.proof.served.noise import Noise
from dovetail.proof.served.prompts import Prompts
from dovetail.proof.served.quirks import Quirks
from dovetail.proof.served.run import SERVED, calibrated, limit_of, opened, planned
from dovetail.text.learn import learn

PAGE = Path(__file__).parents[2] / "docs/servers.md"


def test_every_law_and_every_bug_is_in_the_documentation() -> None:
    page = PAGE.read_text(encoding="utf-8")
    laws = re.findall(r"^\| (\w+) \| ([^|]+) \|$", page, re.MULTILINE)[1:]
    assert laws == [(name, SERVED[name].says) for name in SERVED.names()]
    bugs = dict(re.findall(r"^\| (\d+[ab]?) \| [^|]+ \| (\w+) \|$", page, re.MULTILINE))
    assert bugs == {**{number: law for number, (law, _) in BUGS.items()}, "9": "speculated", "10": "concurrent"}


def test_what_a_server_lacks_is_not_applicable_with_the_reason() -> None:
    lacking = ("echo", "n", "stream", "stop", "seed", "lists", "cache_salt", "cache_prompt", "top_k", "ignore_eos")
    with running(without=lacking, noise="float32") as server:
        case = calibrated(opened(server.url))
        names = ("scored", "rescored", "streamed", "choices", "seeded", "stops", "aborted", "repeat", "cached", "concurrent")
        found = {name: SERVED.test(name, case) for name in names}
    assert {name for name, one in found.items() if one.state == "passed"} == {"repeat", "cached", "concurrent"}, found
    assert {one.state for one in found.values()} == {"passed", "not applicable"}
    assert "echo" in found["scored"].detail
    assert "stream" in found["streamed"].detail
    assert "lists" in found["concurrent"].detail
    assert not {"top_k", "ignore_eos"} & set(case.quirks.fields)
    assert case.quirks.cold == "first"


def test_a_server_that_cannot_list_its_models_is_asked_by_the_given_name() -> None:
    with running(without=("models",)) as server:
        assert opened(server.url, model="tiny").quirks.model == "tiny"
        with pytest.raises(FileError, match="not JSON"):
            opened(server.url)


def test_a_server_of_text_alone_needs_its_tokenizer_for_some_laws() -> None:
    with running(text=True, without=("return_token_ids", "lists")) as server:
        case = calibrated(opened(server.url))
        found = {name: SERVED.test(name, case) for name in ("repeat", "streamed", "concurrent", "split", "lengths")}
    assert not case.quirks.ids
    assert not server.listed  # a list of strings ends mlx-lm
    assert [one.state for one in found.values()] == ["passed"] * 3 + ["not applicable"] * 2, found
    assert "--tokenizer" in found["split"].detail


def test_a_prefix_is_built_only_from_tokens_that_spell_the_text() -> None:
    prompts = Prompts(None, learn("abcdefgh " * 9, 30, "characters"))
    prompt = prompts.new(9)
    steps = tuple(TokenStep(name, -1.0, {name: -1.0}) for name in "cab")
    longer = prompts.after(prompt, Answer(steps, "cab"), 2)
    assert longer is not None
    assert longer.send == f"{prompt.send}ca"
    assert prompts.after(prompt, Answer(steps, "bad"), 2) is None  # mlx-lm names alternatives, not the sampled tokens


def test_an_answer_that_ends_at_once_is_not_compared() -> None:
    case, step = Served(DryRun(), Quirks(), Prompts([5, 6], None)), TokenStep(5, -1.0, {5: -1.0})
    case.same_first(Answer(finish="stop"), step, "ended by a token that is not shown")
    assert (case.compared, case.gaps) == (0, [])
    with pytest.raises(IndexError):  # which fails a law: the server dropped its log-probs
        case.same_first(Answer(finish="length"), step, "without log-probs")


def test_a_server_without_log_probs_is_compared_where_rounding_does_not_count() -> None:
    with running(without=("logprobs",), noise="exact") as server:
        case = calibrated(opened(server.url))
        found = {name: SERVED.test(name, case) for name in ("repeat", "streamed", "stops", "concurrent")}
    assert [one.state for one in found.values()] == ["passed"] * 3 + ["not applicable"], found


@pytest.mark.parametrize(("token_seconds", "limit"), [(0.001, 120.0), (0.5, 1200.0), (0.1, 10 * (2 + 25.8))])
def test_the_limit_of_a_request_follows_the_speed_of_the_server(token_seconds: float, limit: float) -> None:
    assert limit_of(Quirks(seconds=2.0, token_seconds=token_seconds)) == pytest.approx(limit)


def test_what_is_announced_is_what_is_asked() -> None:
    with running(noise="float32") as server:
        case = opened(server.url)
        names = SERVED.names(("repeat", "cached", "split", "streamed", "aborted"))
        plan, before = planned(case, names), case.client.requests
        tokens = case.client.prompt_tokens, case.client.new_tokens
        calibrated(case)
        for name in names:
            assert SERVED.test(name, case).state == "passed"
        assert case.client.requests - before == plan.requests
        assert case.client.prompt_tokens - tokens[0] == plan.prompt_tokens
        assert case.client.new_tokens - tokens[1] == plan.new_tokens
    assert f"{plan.requests} requests" in plan.line()


@pytest.mark.parametrize(
    ("noise", "dtype", "low", "high"),
    [
        (Noise(0, 0, 0), "float32", 1e-3, 1e-3),
        (Noise(0, 0.06, 0.05), None, 0.2, 0.24),  # the middle one, and the largest as far as it is credible
        (Noise(0, 7.0, 0.05), None, 0.6, 0.6),  # rows that are mixed do not excuse themselves
        (Noise(0, 0, 0.009), None, 0.036, 0.036),  # a server that answers one after the other
        (Noise(0, 0, 3.0), "float32", 1e-2, 1e-2),
        (Noise(5.0, 5.0, 5.0), None, 1.0, 1.0),
    ],
)
def test_the_bound_follows_the_noise(noise: Noise, dtype: str | None, low: float, high: float) -> None:
    assert low <= noise.bound(dtype) <= high + 1e-12


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"choices": []},
        {"choices": [7]},
        {"choices": [{"text": 5}]},
        {"choices": [{"text": "x" * 300_000}]},
        {"choices": [{"text": "", "token_ids": [-1]}]},
        {"choices": [{"text": "", "token_ids": [True]}]},
        {"choices": [{"text": "", "logprobs": {"tokens": ["a"], "token_logprobs": [1, 2]}}]},
        {"choices": [{"text": "", "logprobs": {"tokens": ["a"], "top_logprobs": [{str(i): 0 for i in range(300)}]}}]},
        {"choices": [{"text": "", "logprobs": {"content": [{"token": "a", "top_logprobs": "no"}]}}]},
        {"choices": [{"index": "first"}]},
        {"error": {"message": "\x1b[2Jcleared"}},
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(data: dict) -> None:
    with pytest.raises(UnreadableAnswer) as refused:
        choices_of(data)
    assert "\x1b" not in str(refused.value)


def test_forms_of_answers() -> None:
    entry = {"id": 5, "token": "a", "logprob": -1.0, "top_logprobs": [{"id": 6, "token": "a", "logprob": -2.0}]}
    (answer,) = choices_of({"choices": [{"text": "a", "logprobs": {"content": [entry]}}]})
    assert answer.ids == (5,)
    assert answer.steps[0].row() == {5: -1.0, 6: -2.0}
    (answer,) = choices_of({"choices": [{"text": "a", "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [None]}}]})
    assert answer.ids == (7,)
    events = [{"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": []}, {"choices": [{"text": "b", "token_ids": [2]}]}]
    assert (joined(events).text, joined(events).ids) == ("ab", (1, 2))
    with pytest.raises(UnreadableAnswer, match="error"):
        joined([{"error": "stopped"}])


def test_the_function_and_its_flags() -> None:
    lines: list[str] = []
    with running("7") as server:
        result = dovetail.laws(server.url, only=["repeat", "concurrent"], key="secret", announce=lines.append)
        assert server.authorization == "Bearer secret"
        data = result.to_dict()
        with pytest.raises(FileError, match="did you mean tiny"):
            dovetail.laws(server.url, model="tinny")
    assert result.failed
    assert [row["state"] for row in data["laws"]] == ["passed", "failed"]
    assert "requests" in lines[0]
    assert "secret" not in json.dumps(data)
    assert "bound" in str(result)
    with pytest.raises(UsageError, match="against"):
        dovetail.laws("llama-tiny", against="http://127.0.0.1:9/v1")
    with pytest.raises(UsageError, match="key"):
        dovetail.laws("http://127.0.0.1:9/v1", key="two\nlines")
    with pytest.raises(DovetailError, match="the request failed"):
        dovetail.laws("http://127.0.0.1:9/v1")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running("21") as server, pytest.raises(SystemExit) as stop:
        main(["laws", server.url, "--only", "repeat", "streamed", "--json"])
    out, err = capsys.readouterr()
    assert stop.value.code == 1
    assert [row["state"] for row in json.loads(out)["laws"]] == ["passed", "failed"]
    assert "requests" in err
