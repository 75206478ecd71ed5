"""The app: routes, the guard before them, and errors as OpenAI's clients read them.

POST /v1/completions          GET /v1/models       GET /health     open, without a key; 503 while the server ends
POST /v1/chat/completions     POST /tokenize       GET /version
POST /v1/embeddings           POST /detokenize     GET /metrics
POST /v1/rerank, /score                            GET /openapi.json
POST /v1/load_lora_adapter, /v1/unload_lora_adapter            for administrators
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dovetail.base.errors import InputError, SpecError
from dovetail.decoding.generation import Vocabulary
from dovetail.serving.client import Busy, Client, EngineDead
from dovetail.serving.http.adapters import AdapterRoutes, LoadBody, UnloadBody
from dovetail.serving.http.body import ClientGone, read_body
from dovetail.serving.http.chat_schema import ChatBody, DetokenizeBody, TokenizeBody
from dovetail.serving.http.embeddings import EmbeddingBody, EmbeddingRoutes, RerankBody, ScoreBody
from dovetail.serving.http.errors import ApiError, answer_error
from dovetail.serving.http.guard import OPEN, Gate, Guard
from dovetail.serving.http.log import RequestLog
from dovetail.serving.http.options import Options
from dovetail.serving.http.run import now
from dovetail.serving.http.schema import CompletionBody
from dovetail.serving.http.service import Service

ANSWERED = (ApiError, Busy, EngineDead, HTTPException, InputError, RequestValidationError, SpecError, Exception)
GONE = 499  # as nginx logs a request whose client closed the connection
REFERENCE = "#/components/schemas/{model}"


def make_app(client: Client, vocabulary: Vocabulary, options: Options) -> FastAPI:
    """Return the app of one engine. `app.state.gate` drains it (server.py)."""
    service, gate = Service(client, vocabulary, options), Gate()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.encoder.close()
        await service.grammars.close()

    app = FastAPI(title="Dovetail", version=options.version, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.gate, app.state.service = gate, service
    for kind in ANSWERED:
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_middleware(Guard, options=options, gate=gate)
    app.add_middleware(RequestLog)  # the outermost: it logs what the guard refuses, too
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_state(app, service, gate)
    _describe(app)
    return app


def _post(app: FastAPI, path: str, schema: type[BaseModel], route: Callable[[Request], Awaitable[Response]]) -> None:
    """Add a route that reads its body itself (body.py); the schema is documented."""
    described = schema.model_json_schema(ref_template=REFERENCE)
    described.pop("$defs", None)  # in `_describe`
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}

    async def call(request: Request) -> Response:
        return await route(request)

    app.post(path, name=path, openapi_extra=extra, response_model=None)(call)


def _describe(app: FastAPI) -> None:
    """Add the schemas inside the bodies to /openapi.json."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schemas = plain().setdefault("components", {}).setdefault("schemas", {})
        for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, RerankBody):
            schemas |= body.model_json_schema(ref_template=REFERENCE).get("$defs", {})
        return plain()

    app.openapi = described


def _add_generation(app: FastAPI, service: Service) -> None:
    _post(app, "/v1/completions", CompletionBody, service.completions)
    _post(app, "/v1/chat/completions", ChatBody, service.chat)

    adapters = AdapterRoutes(service)
    _post(app, "/v1/load_lora_adapter", LoadBody, adapters.load)
    _post(app, "/v1/unload_lora_adapter", UnloadBody, adapters.unload)

    pooled = EmbeddingRoutes(service)
    _post(app, "/v1/embeddings", EmbeddingBody, pooled.embeddings)
    for path in ("/v1/rerank", "/rerank"):
        _post(app, path, RerankBody, pooled.rerank)
    for path in ("/v1/score", "/score"):
        _post(app, path, ScoreBody, pooled.score)


def _add_models(app: FastAPI, service: Service) -> None:
    created = now()

    def card(name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": created, "owned_by": "dovetail"}
        parent = None if service.models[name] is None else next(iter(service.models))
        return {**about, "max_model_len": service.client.longest, "parent": parent}

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(card(service.model(name)))


def _add_tokens(app: FastAPI, service: Service) -> None:
    encoder = service.encoder

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        service.model(body.model)
        ids = (
            await encoder.chat(body, add_special=body.special)
            if body.prompt is None
            else await encoder.encode(body.prompt, add_special=body.special)
        )
        names = [service.names.unique(token) for token in ids] if body.return_token_strs else None
        sizes = {"count": len(ids), "max_model_len": service.client.longest}
        return JSONResponse({**sizes, "tokens": ids, "token_strs": names})

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        service.model(body.model)
        ids, tokenizer = encoder.checked(body.tokens), encoder.tokenizer
        return JSONResponse({"prompt": await encoder.run(lambda: tokenizer.decode(ids, skip_special=False))})

    _post(app, "/tokenize", TokenizeBody, tokenize)
    _post(app, "/detokenize", DetokenizeBody, detokenize)


def _add_state(app: FastAPI, service: Service, gate: Gate) -> None:
    @app.get(OPEN)
    async def health() -> JSONResponse:
        if not service.client.alive():
            raise EngineDead
        if gate.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": service.options.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)
