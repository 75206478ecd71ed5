"""Constrained output: what random models generate under random schemas parses and validates; grammars change no token that they
allow; neither neighbors, nor several choices, nor preemption, nor drafts change a constrained text."""

from __future__ import annotations

import dataclasses as dc
import json
import random
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.cli import main
from dovetail.decoding.generation import Vocabulary, generate_tokens
from dovetail.decoding.sampling import Sampling
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.speculate import DraftModel, PromptLookup
from dovetail.text.grammar import GrammarError, Grammars, choice_grammar, json_grammar, lark_grammar, regex_grammar
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

pytest.importorskip("llguidance")
TEXT = 'the cat {"name": "Tom", "age": 3, "kind": ["cat", "pet"]} sat on the mat; all is well.\n'
SPEC = "{width: 32, vocab: 300, layers: [{repeat: 2, mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}]}"


@cache
def tokenizer():
    return learn(TEXT * 20, 300)


@cache
def model(seed: int = 1, steps: int = 0) -> dt.Transformer:
    """A model of random weights, or one that has learned TEXT."""
    one = dt.build(dt.from_yaml(SPEC).set("vocab", tokenizer().size + 11), seed=seed).train()  # some logits have no token
    windows = tokenizer().encode(TEXT * 6).unfold(0, 48, 8)
    optimizer = torch.optim.Adam(one.parameters(), lr=2e-2)
    for _ in range(steps):
        one.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    one.vocabulary = Vocabulary(tokenizer=tokenizer(), stop=frozenset([tokenizer().id_of(END)]))
    return one.eval()


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), model().spec.vocab, [tokenizer().id_of(END)])


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values have a bounded size, so that a model of random weights reaches their end."""
    leaves = [
        lambda: {"type": "string", "maxLength": rng.randrange(6)},
        lambda: {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
        lambda: {"type": "integer", "minimum": rng.randrange(-9, 0), "maximum": rng.randrange(1, 500)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": rng.sample(["the", "cat", 3, None, True, 'a"b', "ü🙂"], 3)},
        lambda: {"const": {"x": [1, "y"]}},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)()
    if rng.random() < 0.3:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if rng.random() < 0.4:
        low = rng.randrange(3)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    names = rng.sample(["name", "age", "kind", "ü", "a b"], rng.randrange(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    fields = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(valid(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    if "const" in schema:
        return value == schema["const"]
    names = {"string": str, "integer": int, "boolean": bool, "null": type(None), "array": list, "object": dict}
    if type(value) is not names[schema["type"]]:
        return False
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 99) and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(valid(one, schema["items"]) for one in value)
    if isinstance(value, dict):
        fields = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(fields) and all(valid(value[n], fields[n]) for n in value)
    return type(value) is not int or schema["minimum"] <= value <= schema["maximum"]


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


@pytest.mark.slow
def test_texts_of_random_models_under_random_schemas_parse_and_validate() -> None:
    rng, complete = random.Random(5), 0
    for trial in range(40):
        schema = random_schema(rng)
        temperature = rng.choice([0.0, 1.0, 3.0])
        found = dt.generate(model(trial % 3), "x", json_schema=schema, temperature=temperature, seed=trial, max_tokens=400)
        if found.finish == "end":  # white space may take all tokens
            complete += 1
            assert valid(json.loads(found.text), schema), (schema, found.text)
    assert complete >= 36


def test_a_grammar_that_admits_every_text_changes_no_token() -> None:
    trained = model(1, 60)
    for prompt in ("the cat", "all is", '{"name'):
        plain = dt.generate(trained, prompt, max_tokens=40)
        for constraint in ({"regex": r"(?s:.*)"}, {"grammar": "start: /(?s:.*)/"}):
            assert dt.generate(trained, prompt, max_tokens=40, **constraint).tokens == plain.tokens


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"choice": ["all is well", "ü🙂", "sat"]}, "all is well|ü🙂|sat"),
        ({"grammar": 'start: "<" item{1,3} ">"\nitem: /[a-z]{1,4}/ ";"'}, "<([a-z]{1,4};){1,3}>"),
        ({"grammar": 'root ::= "(" [ab] ")" | "no"'}, r"\([ab]\)|no"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_a_regex_a_choice_and_a_grammar(constraint: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        found = dt.generate(model(seed % 2), "x", temperature=2.0, seed=seed, max_tokens=200, **constraint)
        assert found.finish == "end"
        assert re.fullmatch(pattern, found.text)


SOURCES = [
    json_grammar({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}),
    regex_grammar(r"(the|cat| sat| on){2,9}\."),
    choice_grammar(["the cat sat", "the cat sat on the mat", "all is well"]),
    lark_grammar('start: "[" (WORD ("," WORD)*)? "]"\nWORD: /[a-z ]{1,12}/'),
]


def alone(one: dt.Transformer, request: Request, index: int) -> list[int]:
    sampling = dc.replace(request.sampling, seed=request.sampling.seed + index)
    matcher = grammars().matcher(request.grammar) if request.grammar else None
    prompt = torch.tensor(request.prompt)
    return list(generate_tokens(one, prompt, request.max_tokens, sampling, stop=request.stop, matcher=matcher))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "lookup", "draft"])
def test_choices_preemption_and_drafts_change_no_constrained_token(how: str) -> None:
    """Constrained requests of several choices among plain ones, in a KV cache too small for all of them."""
    one, rng = model(1, 60), random.Random(3)
    drafter = {
        "plain": lambda: None,
        "lookup": lambda: PromptLookup(shortest=1),
        "draft": lambda: DraftModel(model(1, 40), rows=4, longest=120, target=one),
    }[how]()
    engine = Engine(one, rows=4, longest=120, page=4, pages=26, budget=32, drafter=drafter, grammars=grammars())
    requests = []
    for i in range(12):
        prompt = tokenizer().prompt(rng.choice(["the cat", "all is well", "the cat sat on"]))
        requests.append(
            Request(
                id=str(i),
                prompt=tuple(prompt),
                max_tokens=rng.randrange(20, 60),
                n=rng.choice([1, 2, 3]),
                sampling=Sampling(temperature=rng.choice([0.0, 0.7, 1.5]), seed=i),
                stop=frozenset([tokenizer().id_of(END)]),
                grammar=grammars().source(SOURCES[i % 4]) if i % 3 else "",
            )
        )
        engine.add(requests[-1])
    got: dict[tuple[str, int], list[int]] = {}
    finishes: dict[tuple[str, int], str | None] = {}
    while engine.busy:
        for output in engine.step():
            got.setdefault((output.id, output.index), []).extend(output.tokens)
            finishes[output.id, output.index] = output.finish
    for request in requests:
        for index in range(request.n):
            assert got[request.id, index] == alone(one, request, index), (request.id, index)
    assert engine.stats().preemptions > 0
    assert "stop" in {finishes[request.id, 0] for request in requests if request.grammar}
    assert (engine.stats().accepted > 0) == (how != "plain")


def test_min_tokens_holds_where_the_grammar_can_continue_and_its_end_ends_the_text() -> None:
    engine = Engine(model(), rows=1, longest=64, grammars=grammars())
    end = frozenset([tokenizer().id_of(END)])

    def tokens(pattern: str, min_tokens: int) -> list[int]:
        source, found = grammars().source(regex_grammar(pattern)), list[Output]()
        engine.add(Request(id="a", prompt=(5,), max_tokens=30, min_tokens=min_tokens, stop=end, grammar=source))
        while engine.busy:
            found += engine.step()
        assert found[-1].finish in ("stop", "length")
        return [token for output in found for token in output.tokens]

    assert len(tokens("(ab)*", 20)) >= 20
    assert text_of(tokens("abab", 20)) == "abab"


def test_log_probs_are_those_of_the_model_without_the_grammar() -> None:
    engine = Engine(model(), rows=1, longest=64, grammars=grammars())
    engine.add(Request(id="a", prompt=(5, 6), max_tokens=3, logprobs=2, grammar=grammars().source(regex_grammar("abc"))))
    scored = [one for _ in range(20) if engine.busy for output in engine.step() for one in output.logprobs]
    logits = model()(torch.tensor([[5, 6]]), dt.Ctx(layout=dt.TokenLayout.whole(1, 2)))[0, -1]
    want = torch.log_softmax(logits.detach().double(), -1)
    assert scored[0].logprob == pytest.approx(float(want[scored[0].token]), abs=1e-4)
    assert scored[0].logprob < -0.5  # under the mask it would be near 0


HOSTILE = {
    "no text fits": json_grammar({"$ref": "#"}),
    "deep": json_grammar('{"properties": {"a": ' * 2000 + '{"type": "string"}' + "}}" * 2000),
    "a remote schema": json_grammar({"$ref": "http://127.0.0.1:1/schema.json"}),
    "many alternatives": json_grammar({"anyOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(1200)]}),
    "an endless rule": lark_grammar("start: start"),
    "an endless gbnf rule": lark_grammar("root ::= root"),
    "nested groups": regex_grammar("(" * 5000 + "a" + ")*" * 5000),
    "an open group": regex_grammar("(a"),
    "a look-ahead": regex_grammar("(?=a)a"),
    "an empty text": regex_grammar("(){3}"),
    "an unknown keyword": json_grammar({"type": "string", "minLength": "x"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(GrammarError):
        grammars().matcher(HOSTILE[name])
    assert time.monotonic() - begin < 40  # on a machine that is busy


def test_a_grammar_that_takes_too_much_work_at_a_token_ends_its_request_alone() -> None:
    wide = json_grammar({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1000)}})
    engine = Engine(model(), rows=2, longest=64, grammars=grammars())
    engine.add(Request(id="wide", prompt=(5,), max_tokens=20, grammar=grammars().source(wide)))
    engine.add(Request(id="plain", prompt=(5,), max_tokens=20))
    outputs = [output for _ in range(60) if engine.busy for output in engine.step()]
    last = {output.id: output for output in outputs if output.finish}
    assert last["wide"].finish == "refused"
    assert "cannot be followed" in last["wide"].message
    plain = [token for output in outputs if output.id == "plain" for token in output.tokens]
    assert plain == list(generate_tokens(model(), [5], 20))
    assert (engine.stats().running, engine.stats().free_blocks + engine.stats().cached_blocks) == (0, engine.stats().blocks)


def test_a_model_without_an_end_token_ends_with_its_text() -> None:
    endless = Grammars(tokenizer(), model().spec.vocab, ())
    matcher = endless.matcher(regex_grammar("[ab]{5}"))
    tokens = list(generate_tokens(model(), [5], 50, Sampling(temperature=1.0), matcher=matcher))
    assert re.fullmatch("[ab]{5}", text_of(tokens))
    matcher = endless.matcher(regex_grammar("a*"))
    assert set(text_of(list(generate_tokens(model(), [5], 50, matcher=matcher)))) == {"a"}


def test_two_constraints_and_beams_are_refused() -> None:
    with pytest.raises(SpecError, match="give one of the two"):
        dt.generate(model(), "x", regex="a", choice=["b"])
    with pytest.raises(SpecError, match="beam search takes no constraint"):
        dt.generate(model(), "x", regex="a", beams=2)
    with pytest.raises(GrammarError, match="limit is"):
        dt.generate(model(), "x", regex="a" * 70_000)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dt.save(model(1, 60), tmp_path / "model")
    (tmp_path / "schema.json").write_text(json.dumps({"enum": [{"age": 3}]}))

    def generate(*flags: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["generate", str(tmp_path / "model"), "the cat", "--json", "--max-tokens=200", *flags])
        return int(ended.value.code or 0)

    assert generate("--json-schema", str(tmp_path / "schema.json")) == 0
    assert json.loads(json.loads(capsys.readouterr().out)["text"]) == {"age": 3}
    assert generate("--regex", "[a-f]{3}") == 0
    assert re.fullmatch("[a-f]{3}", json.loads(capsys.readouterr().out)["text"])
    assert generate("--regex", "(a") == 4
    assert "unclosed group" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"dovetail-lm\[grammar\]"):
        dt.generate(model(), "x", regex="a")
