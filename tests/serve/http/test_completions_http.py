"""Completions and chats of a real model through a real server and the official client: texts, tokens, log-probs, usage."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from http_server import TEXT, Served

PROMPTS = [TEXT[i % 40 :][: 3 + i % 17] for i in range(20)] + [f"{e} the cat {i}" for i, e in enumerate("🙂👩🐈日ü" * 4)]


def model_logprobs(served: Served, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(served.engine.model(torch.tensor([ids]))[0].double(), -1).detach()


@pytest.mark.slow
def test_a_streamed_text_is_the_whole_text_on_40_prompts(served: Served) -> None:
    emoji = 0
    for number, prompt in enumerate(PROMPTS):
        how = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": number % 2, "seed": number}
        whole = served.openai.completions.create(**how)
        chunks = list(served.openai.completions.create(**how, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        assert text == whole.choices[0].text
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])
        emoji += any(ord(c) > 0xFFFF for c in text)
    assert emoji >= 10


def test_the_text_is_that_of_the_tokens_and_usage_counts_them(served: Served) -> None:
    tokenizer = served.vocabulary.tokenizer
    for prompt in PROMPTS[:8]:
        answer = served.complete(prompt=prompt, max_tokens=17, return_token_ids=True, seed=3).json()
        choice, usage = answer["choices"][0], answer["usage"]
        ids = tokenizer.prompt(prompt)
        assert choice["prompt_token_ids"] == ids
        assert usage == {
            "prompt_tokens": len(ids),
            "completion_tokens": 17,
            "total_tokens": len(ids) + 17,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert prompt + choice["text"] == tokenizer.decode(ids + choice["token_ids"])
        assert choice["finish_reason"] == "length"


def test_a_chat_is_rendered_by_the_template_and_streams_as_it_is_whole(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": "🙂"}]}]
    how = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "temperature": 0}
    whole = served.openai.chat.completions.create(**how)
    assert whole.usage.prompt_tokens == len(served.vocabulary.tokenizer.prompt("user: the cat\n🙂\nassistant:"))
    assert whole.id.startswith("chatcmpl-")
    chunks = list(served.openai.chat.completions.create(**how, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    body = {"messages": [*messages, {"role": "assistant", "content": "the c"}], "continue_final_message": True}
    tokens = served.http.post("/tokenize", json=body).json()["tokens"]
    assert served.vocabulary.tokenizer.decode(tokens) == "user: the cat\n🙂\nassistant: the c"


def test_a_conversation_that_the_template_refuses_names_no_path(served: Served) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "\x1b[2J" + "x" * 9}]})
    assert answer.status_code == 200
    broken = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}
    assert served.http.post("/v1/chat/completions", json=broken).status_code == 400


@pytest.mark.parametrize("stop", [" sat", "at 🙂", "🙂 s", "n t", "zzz", "t on the mat"])
def test_a_stop_string_over_several_tokens_ends_the_text_before_it(served: Served, stop: str) -> None:
    free = served.complete(prompt="the cat", max_tokens=30).json()["choices"][0]["text"]
    body = {"prompt": "the cat", "max_tokens": 30, "stop": [stop, "\0"], "logprobs": 0}
    before = len(served.engine.requests)
    choice = served.complete(**body).json()["choices"][0]
    want = free.partition(stop)[0]
    assert choice["text"] == want
    assert choice["finish_reason"] == ("stop" if stop in free else "length")
    if stop in free:
        assert choice["logprobs"]["text_offset"][-1] < len(want)
    events = events_of(served, **body)
    assert "".join(event["choices"][0]["text"] for event in events) == want
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]
    assert len(served.engine.requests) == before + 2


def test_a_stop_string_frees_the_engine(start) -> None:
    served = start(pace=0.01)
    answer = served.complete(prompt="the cat", max_tokens=400, stop="sat").json()
    assert answer["usage"]["completion_tokens"] < 20
    assert served.engine.aborted == [served.engine.requests[0].id]


def test_two_choices_are_those_of_their_seeds(served: Served) -> None:
    body = {"prompt": ["the cat", "all is"], "n": 2, "temperature": 1.5, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    choices = served.complete(**body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for number, choice in enumerate(choices):
        alone = {**body, "prompt": body["prompt"][number // 2], "n": 1, "seed": 5 + number % 2}
        assert served.complete(**alone).json()["choices"][0]["text"] == choice["text"]
    streamed = dict.fromkeys(range(4), "")
    for event in events_of(served, **body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == [choice["text"] for choice in choices]


def test_requests_without_a_seed_differ(served: Served) -> None:
    texts = {served.complete(prompt="x", temperature=3, max_tokens=12).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4


def test_echo_with_logprobs_gives_those_of_the_model(served: Served) -> None:
    ids = served.vocabulary.tokenizer.prompt("über 🙂 cat")
    for prompt in (ids, "über 🙂 cat"):
        body = {"prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": 3, "return_tokens_as_token_ids": True}
        choice = served.complete(**body, return_token_ids=True).json()["choices"][0]
        want = model_logprobs(served, choice["token_ids"])
        shape = choice["logprobs"]
        assert choice["text"].startswith("über 🙂 cat")
        assert choice["token_ids"][: len(ids)] == ids
        assert shape["token_logprobs"][0] is shape["top_logprobs"][0] is None
        for place, (token, row) in enumerate(zip(choice["token_ids"][1:], want, strict=False), 1):
            assert shape["tokens"][place] == f"token_id:{token}"
            assert shape["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
            top = {int(name.removeprefix("token_id:")): value for name, value in shape["top_logprobs"][place].items()}
            assert set(row.topk(3).indices.tolist()) <= set(top)
            assert all(value == pytest.approx(float(row[other]), abs=1e-4) for other, value in top.items())
    scored = served.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0).json()
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert scored["usage"]["completion_tokens"] == 0


def test_logprobs_of_chats_and_prompts_are_those_of_the_model(served: Served) -> None:
    how = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 6, "temperature": 0, "prompt_logprobs": 2}
    answer = served.http.post(
        "/v1/chat/completions", json={**how, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    ).json()
    choice = answer["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    want = model_logprobs(served, ids)
    start = len(choice["prompt_token_ids"])
    for place, entry in enumerate(choice["logprobs"]["content"]):
        row = want[start + place - 1]
        assert entry["logprob"] == pytest.approx(float(row[ids[start + place]]), abs=1e-4)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert answer["prompt_logprobs"][0] is None
    for place, row in enumerate(answer["prompt_logprobs"][1:], 1):
        assert row[str(ids[place])]["logprob"] == pytest.approx(float(want[place - 1][ids[place]]), abs=1e-4)


def test_the_sampling_fields_reach_the_engine(served: Served) -> None:
    fields = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    body = {**fields, "top_p": 0.9, "temperature": 0.7, "seed": 11, "logit_bias": {"7": 2.5}, "stop_token_ids": [9]}
    served.complete(prompt=[5, 6], **body, min_tokens=3, ignore_eos=True, cache_salt="a")
    request = served.engine.requests[-1]
    assert all(getattr(request.sampling, name) == value for name, value in fields.items())
    assert request.sampling.logit_bias == {7: 2.5}
    assert (request.stop, request.min_tokens, request.salt, request.sampling.seed) == ({9}, 3, ":a", 11)
    served.complete(prompt=[5, 6], top_k=-1, stop=None, n=None)
    assert served.engine.requests[-1].sampling.top_k is None
    assert served.engine.requests[-1].stop == served.vocabulary.stop


def test_a_stop_token_ends_a_choice_and_has_no_text(served: Served) -> None:
    free = served.complete(prompt="the cat", max_tokens=20, return_token_ids=True).json()["choices"][0]
    token = next(one for one in free["token_ids"][5:] if one not in free["token_ids"][:5])
    place = free["token_ids"].index(token)
    answer = served.complete(prompt="the cat", max_tokens=20, stop_token_ids=[token], return_token_ids=True).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == free["token_ids"][: place + 1]
    assert choice["text"] == served.vocabulary.tokenizer.decode(free["token_ids"][:place])
    assert answer["usage"]["completion_tokens"] == place + 1


def test_tokens_and_back(served: Served) -> None:
    answer = served.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == served.vocabulary.tokenizer.prompt(TEXT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


def test_models_health_version_and_metrics(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["tiny"]
    assert served.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model="other", prompt="x")
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/version").json() == {"version": "test"}
    served.complete(prompt="x")
    metrics = served.http.get("/metrics").text
    for name in ("num_requests_running", "prompt_tokens_total", "time_to_first_token_seconds_count", "kv_cache_usage_perc"):
        assert f'dovetail:{name}{{model_name="tiny"}}' in metrics
    assert 'dovetail:request_success_total{finished_reason="length",model_name="tiny"}' in metrics


def events_of(served: Served, **body) -> list[dict]:
    with served.http.stream("POST", "/v1/completions", json={"temperature": 0, "stream": True, **body}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
