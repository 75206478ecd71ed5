"""Embeddings and relevance:

    POST /v1/embeddings          {"input": …}                          OpenAI's
    POST /v1/rerank, /rerank     {"query": …, "documents": […]}        Jina's and Cohere's
    POST /score                  {"text_1": …, "text_2": …}            vLLM's

Relevance is the score of the model's head where it has one number per document, else the cosine of two embeddings.
"""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dovetail.base.errors import FileError
from dovetail.base.limits import REQUEST_INPUTS
from dovetail.decoding.embedding import shortened
from dovetail.serving.http.base_schema import MAX_ID, Body, Ids, Short, Text, first_is
from dovetail.serving.http.body import read_body
from dovetail.serving.http.errors import ApiError
from dovetail.serving.http.prompts import too_long
from dovetail.serving.http.respond import while_connected
from dovetail.serving.http.service import Service

Texts = Annotated[list[Text], Field(min_length=1, max_length=REQUEST_INPUTS, fail_fast=True)]
Input = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Texts, Tag("strings")]
    | Annotated[list[Ids], Field(min_length=1, max_length=REQUEST_INPUTS, fail_fast=True), Tag("lists")],
    Discriminator(first_is({int: "ids", str: "strings"}, "lists")),
]
Sides = Annotated[Annotated[Text, Tag("string")] | Annotated[Texts, Tag("strings")], Discriminator(first_is({}, "strings"))]


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    input: Input
    model: Short | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    add_special_tokens: bool = True
    user: Short | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list."""
        if isinstance(self.input, str):
            return [self.input]
        return self.input if self.input and not isinstance(self.input[0], int) else [self.input]  # type: ignore[return-value]


class Document(Body):
    """A document of text."""

    text: Text


class RerankBody(Body):
    """`POST /v1/rerank`."""

    query: Text
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("string")] | Annotated[Document, Tag("object")],
                Discriminator(lambda value: "string" if isinstance(value, str) else "object"),
            ]
        ],
        Field(min_length=1, max_length=REQUEST_INPUTS, fail_fast=True),
    ]
    model: Short | None = None
    top_n: Annotated[int, Field(ge=1, le=MAX_ID)] | None = None
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        """The documents as strings."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreBody(Body):
    """`POST /score`."""

    text_1: Sides
    text_2: Sides
    model: Short | None = None

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        first, second = self.pairs
        if len(first) != len(second):
            raise ValueError("text_2: has another number of texts than text_1; give as many, or one text_1")
        return self

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides as lists; one text on the first side stands beside each of the second."""
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        return (first * len(second) if len(first) == 1 else first), second


class EmbeddingRoutes:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self.service, self.client, self.encoder = service, service.client, service.encoder

    async def embeddings(self, request: Request) -> Response:
        """Answer `POST /v1/embeddings`."""
        body = await read_body(request, EmbeddingBody)
        model, given = self.service.model(body.model), body.inputs
        ids = [
            await self.encoder.encode(one, add_special=body.add_special_tokens)
            if isinstance(one, str)
            else self.encoder.checked(one)
            for one in given
        ]
        vectors = await while_connected(request, self.client.embed(ids, self.service.models[model]))
        short = [shortened(torch.tensor(one), body.dimensions).tolist() for one in vectors]
        encode = FORMATS[body.encoding_format]
        data = [{"object": "embedding", "index": i, "embedding": encode(one)} for i, one in enumerate(short)]
        return JSONResponse({"object": "list", "data": data, "model": model, "usage": _usage(sum(map(len, ids)))})

    async def rerank(self, request: Request) -> Response:
        """Answer `POST /v1/rerank`."""
        body = await read_body(request, RerankBody)
        model, texts = self.service.model(body.model), body.texts
        scores, count = await self._relevance(request, model, [body.query] * len(texts), texts)
        order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if body.return_documents else {})}
            for i in order
        ]
        return JSONResponse({"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": _usage(count)})

    async def score(self, request: Request) -> Response:
        """Answer `POST /score`."""
        body = await read_body(request, ScoreBody)
        model = self.service.model(body.model)
        scores, count = await self._relevance(request, model, *body.pairs)
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        about = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "model": model}
        return JSONResponse({**about, "data": data, "usage": _usage(count)})

    async def _relevance(
        self, request: Request, model: str, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], int]:
        """The score of each pair, and the number of tokens."""
        adapter = self.service.models[model]
        if self.client.ranks:
            pairs = [await self._pair(*pair) for pair in zip(first, second, strict=True)]
            scores = await while_connected(request, self.client.score(pairs, adapter))
            return scores, sum(len(ids) for ids, _ in pairs)
        texts = list(dict.fromkeys([*first, *second]))
        ids = [await self.encoder.encode(one) for one in texts]
        vectors = await while_connected(request, self.client.embed(ids, adapter))
        unit = {text: torch.tensor(vector) for text, vector in zip(texts, vectors, strict=True)}
        return [float(unit[a] @ unit[b]) for a, b in zip(first, second, strict=True)], sum(map(len, ids))

    async def _pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        tokenizer = self.encoder.tokenizer
        if len(first) + len(second) > self.encoder.most:
            raise too_long("a query and its document have more characters than fit")
        try:
            ids, types = await self.encoder.run(lambda: tokenizer.pair(first, second))
        except FileError:
            raise ApiError(400, "the texts cannot be encoded", param="documents") from None
        return self.encoder.checked(ids), types


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


FORMATS = {"float": list, "base64": _base64}


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
