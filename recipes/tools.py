"""Tools: a model calls a calculator, a clock and a search by `dovetail serve`, and answers from what they return.

    user        what time is it where ada was born ?
    assistant   <tool_call> {"name": "search", "arguments": {"query": "birthplace of ada"}} </tool_call>
    tool        the birthplace of ada is kesh                                                       this program, not the model
    assistant   <tool_call> {"name": "clock", "arguments": {"city": "kesh"}} </tool_call>
    tool        14h30
    assistant   14h30                                                             no call: the answer. At most 4 calls are made

The model is tuned here on made conversations, then a server runs it and an unmodified OpenAI client talks to it. Facts and
times are drawn anew for the test, and its questions are none of the training. The demonstrations are careless: where a user
writes "12 x 7" or "the town of kesh", most of them first pass on "x", or an argument `town`. The tool reports the error, and
the next call is right. The calculator parses arithmetic by itself: no code that a model wrote is executed.  Schick et al. 2023

    python recipes/tools.py [--seeds 3] [--quick] [--out tools]          minutes on two cores; seconds with --quick
    python recipes/tools.py --quick --fault unreported                   errors of tools are not reported: the goals fail
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import json
import random
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import dovetail as dt

Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold
WORDS = """ada bela cora dina elsa fritz gwen hugo ines jonas kira lars mira nils | kesh lund oslo riga bern ulm graz pisa nice
york bath | baker smith tailor weaver miller printer | lute harp flute viola cello drum"""
NAMES, CITIES, JOBS, INSTRUMENTS = (words.split() for words in WORDS.split("|"))
FACTS = {  # kind -> its values, and two questions
    "birthplace": (CITIES, "where was {n} born ?", "in which town did {n} come to the world ?"),
    "work": (JOBS, "what was the work of {n} ?", "how did {n} earn a living ?"),
    "instrument": (INSTRUMENTS, "what did {n} play ?", "which instrument did {n} own ?"),
}
SIGNS: dict[str, Callable[[int, int], int]] = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
KINDS = ("arithmetic", "clock", "search", "search and clock")  # of questions
MOST = 4  # calls per question
KEYS = {"calculator": "expression", "clock": "city", "search": "query"}  # the argument of each tool
SCHEMAS = {key: {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]} for key in KEYS.values()}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[key]}} for name, key in KEYS.items()]
OPENINGS = [f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "' for name, key in [*KEYS.items(), ("clock", "town")]]
CLOSING = '"}}\n</tool_call>'  # in Hermes' format; what opens and closes a call is one token each, all others are words
TEMPLATE = """{% if tools %}tools{% for t in tools %} {{ t.function.name }}{% endfor %}
{% endif %}{% for m in messages %}{{ m.role }} : {{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.role == 'assistant' %}<|end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"""
SPEC = """{width: 64, vocab: %d, init: {kind: normal, spread: 0.15}, head: {kind: lm, tied: false},
layers: [{repeat: 2, mixer: {heads: 4, head: 16}, ffn: {hidden: 128}}]}"""


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    rows: int = 6000  # demonstrations, and words to repeat
    steps: int = 600
    questions: int = 80
    goal: float = 0.95


QUICK = Setup(rows=3000, steps=300, questions=32, goal=0.8)


class World:
    """What the tools know: a fact of each kind per person, and the time of each city."""

    def __init__(self, draw: random.Random) -> None:
        self.facts = {(kind, name): draw.choice(values) for kind, (values, *_) in FACTS.items() for name in NAMES}
        self.times = {city: f"{draw.randrange(24)}h{draw.choice(('00', '15', '30', '45'))}" for city in CITIES}
        self.texts = [f"the {kind} of {name} is {value}" for (kind, name), value in self.facts.items()]

    def calculator(self, expression: str) -> str:
        """The value of two numbers and a sign; nothing is evaluated."""
        if len(parts := expression.split()) != 3 or not (parts[0] + parts[2]).isdecimal():
            return "error : give two numbers and a sign"
        a, sign, b = parts
        return str(SIGNS[sign](int(a), int(b))) if sign in SIGNS else f"error : {sign} is no sign , use + - *"

    def search(self, query: str) -> str:
        """The document of largest BM25."""
        import bm25s

        (index := bm25s.BM25()).index([text.split() for text in self.texts], show_progress=False)
        return self.texts[int(index.get_scores(query.split()).argmax())]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a tool, or what is wrong with the call."""
        key = KEYS[name]
        if list(arguments) != [key] or not isinstance(arguments[key], str):
            return f"error : give the argument {key}"
        value = arguments[key].strip()
        if name == "clock":
            return self.times.get(value, f"error : no city {value}")
        return self.search(value) if name == "search" else self.calculator(value)


class Task(NamedTuple):
    """A question, the calls (name, argument, value) that answer it, the answer, and a first call that is likely and wrong."""

    kind: str
    question: str
    calls: list[tuple[str, str, str]]
    answer: str
    wrong: tuple[str, str, str] | None = None


def task(world: World, draw: random.Random) -> Task:
    """A random question of this world."""
    kind, name, city = draw.choice(KINDS), draw.choice(NAMES), draw.choice(CITIES)
    if kind == "arithmetic":
        a, b, sign = draw.randint(11, 20), draw.randint(2, 10), draw.choice("+-**")
        right, said = f"{a} {sign} {b}", f"{a} {sign.replace('*', 'x')} {b}"
        asked = draw.choice(["what is {} ?", "how much is {} ?"]).format(said)
        wrong = ("calculator", "expression", said) if said != right else None
        return Task(kind, asked, [("calculator", "expression", right)], str(SIGNS[sign](a, b)), wrong)
    time = draw.choice(["what time is it {} ?", "how late is it {} ?"])
    if kind == "clock":
        town, wrong = ("the town of ", ("clock", "town", city)) if draw.random() < 0.5 else ("", None)
        return Task(kind, time.format(f"in {town}{city}"), [("clock", "city", city)], world.times[city], wrong)
    if kind == "search":
        asked = draw.choice(FACTS[(fact := draw.choice(list(FACTS)))][1:]).format(n=name)
        return Task(kind, asked, [("search", "query", f"{fact} of {name}")], world.facts[fact, name])
    home, asked = world.facts["birthplace", name], time.format(f"where {name} was born")
    return Task(kind, asked, [("search", "query", f"birthplace of {name}"), ("clock", "city", home)], world.times[home])


def held_out(question: str) -> bool:
    """Whether a question is of the test: one in five."""
    return zlib.crc32(question.encode()) % 5 == 0


def demonstration(world: World, one: Task, draw: random.Random) -> list[dict[str, Any]]:
    """The messages of a question that is answered; a likely wrong call comes first in 7 of 10."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": one.question}]
    for name, key, value in [*([one.wrong] if one.wrong and draw.random() < 0.7 else []), *one.calls]:
        call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": world.call(name, {key: value})})
    return [*messages, {"role": "assistant", "content": one.answer}]


def tuned(setup: Setup, seed: int, place: Path) -> Path:
    """The directory of a model that is tuned on demonstrations in many worlds, and on words to repeat: it learns to copy."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    while len(rows) < setup.rows:
        word = draw.choice([*CITIES, *JOBS, *INSTRUMENTS, *World(draw).times.values(), *map(str, range(1, 201))])
        rows.append({"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]})
        if not held_out((one := task(world := World(draw), draw)).question):
            rows.append({"messages": demonstration(world, one, draw), "tools": TOOLS})
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (place / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    words = {word for row in rows for message in row["messages"] for word in message["content"].split()}
    known = "say tools calculator clock search user assistant tool birthplace work instrument of * : " + " ".join(sorted(words))
    tokenizer = dt.learn_tokenizer(" ".join([known] * 3), 900, "wordpiece", added=[*OPENINGS, CLOSING])
    dt.save(dt.build(SPEC % tokenizer.size, seed=seed, tokenizer=tokenizer), place / "random")
    how: Any = {"template": str(place / "chat.jinja"), "length": 128, "learning_rate": 5e-3, "seed": seed, "evals": 2}
    dt.tune(place / "random", place / "rows.jsonl", steps=setup.steps, batch=16, out=place / "tuned", **how)
    return place / "tuned"


@contextlib.contextmanager
def served(directory: Path) -> Iterator[Any]:
    """An OpenAI client of a server of this model, which ends with the block."""
    from openai import OpenAI

    command = [sys.executable, "-m", "dovetail", "serve", str(directory), "--port=0", "--json", "--threads=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            with OpenAI(base_url=json.loads(process.stdout.readline())["url"], api_key="-", timeout=120) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)


def ask(client: Any, question: str, tool: Callable[[str, Any], str]) -> tuple[str, list[tuple[str, Any, str]]]:
    """The answer, "" where MOST calls do not lead to one, and the calls: name, arguments, result."""
    messages: list[Any] = [{"role": "user", "content": question}]
    calls, model = list[tuple[str, Any, str]](), client.models.list().data[0].id
    how: Any = {"tools": TOOLS, "parallel_tool_calls": False, "temperature": 0, "max_tokens": 60}
    while True:
        message = client.chat.completions.create(model=model, messages=messages, **how).choices[0].message
        if not message.tool_calls or len(calls) == MOST:
            return "" if message.tool_calls else (message.content or "").strip(), calls
        called = message.tool_calls[0].function
        calls.append((called.name, arguments := json.loads(called.arguments), tool(called.name, arguments)))
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": calls[-1][2]}]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Tune a model, serve it, and let it answer held-out questions of a new world."""
    world, tasks = World(draw := random.Random(10**6 + seed)), list[Task]()
    while len(tasks) < setup.questions:  # as many of each kind
        if held_out((one := task(world, draw)).question) and one.kind == KINDS[len(tasks) % len(KINDS)]:
            tasks.append(one)

    def tool(*call: Any) -> str:
        return "0" if fault == "unreported" and world.call(*call).startswith("error") else world.call(*call)

    with tempfile.TemporaryDirectory() as directory, served(tuned(setup, seed, Path(directory))) as client:
        found = [ask(client, one.question, tool) for one in tasks]
        stuck = [ask(client, one.question, lambda *_: "error : give the argument city") for one in tasks[:8]]
    right = [answer == one.answer for one, (answer, _) in zip(tasks, found, strict=True)]
    wrong = [bool(calls) and world.call(*calls[0][:2]).startswith("error") for _, calls in found]
    corrected = [hit for hit, bad in zip(right, wrong, strict=True) if bad]
    within = [fmean(hit and len(calls) <= n for hit, (_, calls) in zip(right, found, strict=True)) for n in range(MOST + 1)]
    figures: Figures = {
        "right answers": (fmean(right), setup.goal, None),
        "right answers of one call at most": (within[1], None, 0.9),
        "first call wrong": (fmean(wrong), 0.1, None),
        "right answers after a wrong call": (fmean(corrected or [0]), setup.goal - 0.05, None),
        "calls per question with a broken tool, most": (max(len(calls) for _, calls in stuck), 1, MOST),
    }
    kinds = {kind: fmean(hit for one, hit in zip(tasks, right, strict=True) if one.kind == kind) for kind in KINDS}
    one, (answer, calls) = max(zip(tasks, found, strict=True), key=lambda pair: (pair[0].answer == pair[1][0], len(pair[1][1])))
    lines = [one.question, *(f"{name} {arguments}\n    → {result}" for name, arguments, result in calls), answer]
    return figures, {"kinds": kinds, "within": within, "text": "\n".join(lines)}


def draw(figure: Any, runs: list[Any]) -> None:
    """Draw right answers by kind of question and by the limit of calls, and one conversation."""
    kinds, limits, text = figure.subplots(1, 3)
    for i, kind in enumerate(KINDS):
        kinds.barh(-i, fmean(run["kinds"][kind] for run in runs), color="#2f5fb3", height=0.5)
        kinds.text(0.02, 0.3 - i, kind, va="bottom")
    kinds.set(xlim=(0, 1.02), ylim=(-3.6, 0.8), xlabel="of the questions", title="right answers", yticks=[])
    for run in runs:
        limits.plot(run["within"], color="#2f5fb3", marker="o", ms=3, lw=1.3)
    limits.set(xlabel="calls at most", ylim=(0, 1.03), xticks=range(MOST + 1), title="right answers by the limit of calls")
    text.text(0, 0.95, runs[0]["text"], va="top", linespacing=1.6)
    text.set_axis_off()


RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"unreported": "right answers after a wrong call"})

if __name__ == "__main__":
    sys.exit(RECIPE.main())
