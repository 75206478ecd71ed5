"""A small model that learned a text with emoji, and the real app under uvicorn on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import httpx2
import openai
import torch
from small_engine import SmallEngine

import dovetail as dt
from dovetail.decoding.generation import Vocabulary
from dovetail.serving.http.app import make_app
from dovetail.serving.http.options import Options
from dovetail.serving.http.server import bound_socket, make_server
from dovetail.text.chat import ChatTemplate
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

TEXT = "the cat 🙂 sat on the mat 🐈‍⬛, über allen Gipfeln 日本語 ist Ruh 👩‍👩‍👧; all is well.\n"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPEC = "{width: 32, vocab: 300, layers: [{repeat: 2, mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}]}"
KEY, OTHER = "secret-key", "other-key"


class Served:
    """A running server: its engine, its address, and clients of it."""

    def __init__(self, engine: SmallEngine, vocabulary: Vocabulary, options: Options) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.app = make_app(engine, vocabulary, options)
        sock = bound_socket("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.server = make_server(self.app)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        headers = {"Authorization": f"Bearer {options.keys[0]}"} if options.keys else {}
        self.http = httpx2.Client(base_url=self.url, headers=headers, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=options.keys[0] if options.keys else "-", max_retries=0)

    def _serve(self, sock) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve([sock]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, **body) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"temperature": 0, "max_tokens": 12, **body})

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(10)
        self.loop.close()
        self.engine.threads.shutdown()


def train_small() -> tuple[dt.Transformer, Vocabulary]:
    """Weights that continue TEXT: emoji of four and more bytes are generated token by token."""
    torch.manual_seed(0)
    tokenizer = learn("a plain text of words without a sign " * 20, 300)
    spec = dt.from_yaml(SPEC)
    spec = spec.set("vocab", tokenizer.size)
    model = dt.build(spec, seed=1).train()
    ids = tokenizer.encode(TEXT * 3)
    windows = ids.unfold(0, 64, 24)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(70):
        loss = model.loss(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    template = ChatTemplate(TEMPLATE, "/secret/place/chat_template.jinja")
    vocabulary = Vocabulary(tokenizer=tokenizer, stop=frozenset([tokenizer.id_of(END)]), chat_template=template)
    return model.eval(), vocabulary


@contextlib.contextmanager
def serving(trained: tuple[dt.Transformer, Vocabulary], *, options: Options | None = None, **engine) -> Iterator[Served]:
    model, vocabulary = trained
    served = Served(SmallEngine(model, **engine), vocabulary, options or Options(models={"tiny": None}, version="test"))
    try:
        yield served
    finally:
        served.close()
