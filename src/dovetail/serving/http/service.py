"""From bodies to runs: what `/v1/completions` and `/v1/chat/completions` ask of the engine."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dovetail.base.limits import REQUEST_CHOICES
from dovetail.decoding.generation import Vocabulary
from dovetail.decoding.sampling import Sampling
from dovetail.serving.client import Client
from dovetail.serving.http.body import read_body
from dovetail.serving.http.chat_schema import ChatBody
from dovetail.serving.http.choice import Choice
from dovetail.serving.http.errors import ApiError
from dovetail.serving.http.grammars import GrammarChecker
from dovetail.serving.http.guard import TENANT
from dovetail.serving.http.log import PROMPT, REQUEST_ID, RUN
from dovetail.serving.http.logprobs import LogprobShapes, TokenNames
from dovetail.serving.http.metrics import Metrics
from dovetail.serving.http.options import Options
from dovetail.serving.http.prompts import PromptEncoder, too_long
from dovetail.serving.http.respond import respond
from dovetail.serving.http.run import Job, Run
from dovetail.serving.http.schema import CompletionBody, GenerationBody
from dovetail.serving.http.shapes import ChatShape, CompletionShape, Shape
from dovetail.serving.http.tool_stream import ToolCalls
from dovetail.serving.request import Request
from dovetail.text.grammar import Grammar
from dovetail.text.stream import TextStream
from dovetail.text.tool_calls.parser import parser_named, parser_of

CONTEXT = 64  # tokens of a prompt behind which text is decoded
SEED_BITS = 62


class Service:
    """What the routes share: the engine, the vocabulary and the options."""

    def __init__(self, client: Client, vocabulary: Vocabulary, options: Options) -> None:
        self.client, self.vocabulary, self.options = client, vocabulary, options
        self.models = dict(options.models)  # and the adapters that were loaded since
        self.names = TokenNames(vocabulary.tokenizer)
        self.encoder = PromptEncoder(vocabulary, client.longest, client.vocab)
        self.metrics = Metrics(client, next(iter(options.models)), options.metrics_prefix)
        self.running: set[Run] = set()
        self.grammars = GrammarChecker(self.encoder)
        template = "" if vocabulary.chat_template is None else vocabulary.chat_template.text
        self.tool_parser = parser_of(template) if options.tool_parser is None else parser_named(options.tool_parser)

    def abort_all(self) -> None:
        """Abort all runs: their clients get an error."""
        for run in list(self.running):
            run.abort()

    def model(self, name: str | None) -> str:
        """Return the name of the model that a request asks for, the first by default; ApiError for an unknown one."""
        name = next(iter(self.models)) if name is None else name
        if name not in self.models:
            raise ApiError(404, f"model: {name!r} is not served here", param="model", code="model_not_found")
        return name

    async def completions(self, request: HttpRequest) -> Response:
        """Answer `POST /v1/completions`."""
        body = await read_body(request, CompletionBody)
        model, id = self.model(body.model), f"cmpl-{uuid.uuid4().hex}"
        given = body.prompts
        if self.options.log_prompts:
            request.scope[PROMPT] = json.dumps(given, ensure_ascii=False)
        if len(given) * body.n > REQUEST_CHOICES:
            raise ApiError(400, f"n: {len(given)} prompts × {body.n} are more than {REQUEST_CHOICES} choices", param="n")
        prompts = [
            await self.encoder.encode(one, add_special=body.add_special_tokens)
            if isinstance(one, str)
            else self.encoder.checked(one)
            for one in given
        ]
        grammar = await self._grammar(request, body.grammar)
        jobs = self._jobs(request, id, model, body, prompts, body.max_tokens, body.logprobs, grammar)
        if body.echo:
            for job, one in zip(jobs, given, strict=True):
                await self._echo(job, one, body)
        run = Run(self.client, jobs, self.metrics, self.running)
        shape = CompletionShape(id, model, body, run, LogprobShapes(self.names, body.return_tokens_as_token_ids))
        return await self._respond(request, run, shape, body.stream)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer `POST /v1/chat/completions`."""
        body = await read_body(request, ChatBody)
        model, id = self.model(body.model), f"chatcmpl-{uuid.uuid4().hex}"
        if self.options.log_prompts:
            request.scope[PROMPT] = json.dumps([one.plain() for one in body.messages], ensure_ascii=False)
        self.encoder.checked_tools(body)
        calls = ToolCalls(body, self.tool_parser)
        prompt = await self.encoder.chat(body, add_special=body.add_special_tokens)
        max_tokens = body.max_completion_tokens or body.max_tokens or self.client.longest - len(prompt)
        grammar = await self._grammar(request, calls.grammar or body.grammar)
        logprobs = body.top_logprobs if body.logprobs else None
        jobs = self._jobs(request, id, model, body, [prompt], max_tokens, logprobs, grammar)
        run = Run(self.client, jobs, self.metrics, self.running)
        shape = ChatShape(id, model, body, run, LogprobShapes(self.names, body.return_tokens_as_token_ids), calls)
        return await self._respond(request, run, shape, body.stream)

    async def _grammar(self, request: HttpRequest, grammar: Grammar | None) -> str:
        """Return the constraint of a request in the engine's form."""
        address = "" if request.client is None else request.client.host
        return "" if grammar is None else await self.grammars.source(grammar, request.scope[TENANT] or address)

    async def _respond(self, request: HttpRequest, run: Run, shape: Shape, stream: bool) -> Response:
        request.scope[RUN], request.scope[REQUEST_ID] = run, shape.id
        return await respond(request, run, shape, stream)

    def _jobs(
        self,
        request: HttpRequest,
        id: str,
        model: str,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        max_tokens: int,
        logprobs: int | None,
        grammar: str,
    ) -> list[Job]:
        """Return one job per prompt. Without a seed the draws of each prompt are random."""
        stop = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.vocabulary.stop)
        tenant = request.scope[TENANT]
        salt = f"{tenant}:{body.cache_salt}" if tenant or body.cache_salt else ""
        jobs = list[Job]()
        for number, prompt in enumerate(prompts):
            if len(prompt) + max_tokens > self.client.longest:
                sizes = f"{len(prompt):,} tokens of the prompt and {max_tokens:,} new ones"
                raise too_long(f"{sizes} are more than {self.client.longest:,}")
            scores_prompt = isinstance(body, CompletionBody) and body.echo and (logprobs is not None or max_tokens == 0)
            engine_request = Request(
                id=f"{id}-{number}",
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                sampling=self._sampling(body),
                n=body.n,
                stop=stop,
                min_tokens=min(body.min_tokens, max_tokens),
                logprobs=logprobs,
                prompt_logprobs=max(body.prompt_logprobs or 0, logprobs or 0)
                if scores_prompt or body.prompt_logprobs is not None
                else None,
                salt=salt,
                adapter=self.models[model],
                grammar=grammar,
            )
            choices = [self._choice(number * body.n + i, engine_request, body) for i in range(body.n)]
            jobs.append(Job(engine_request, choices))
        return jobs

    def _sampling(self, body: GenerationBody) -> Sampling:
        bias = {int(token): value for token, value in body.logit_bias.items()}
        if bias and max(bias) >= self.client.vocab:
            raise ApiError(400, f"logit_bias: token id {max(bias)} is not below {self.client.vocab:,}", param="logit_bias")
        return Sampling(
            temperature=body.temperature,
            top_k=body.top_k if body.top_k > 0 else None,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=bias,
        )

    def _choice(self, index: int, request: Request, body: GenerationBody) -> Choice:
        tokenizer, continues = self.vocabulary.tokenizer, isinstance(body, CompletionBody) and not self.vocabulary.start
        before = request.prompt[-CONTEXT:] if continues else ()
        stream = None if tokenizer is None else TextStream(tokenizer, before, skip_special=body.skip_special_tokens)
        return Choice(index, stream, stops=body.stop_strings, min_tokens=body.min_tokens, stop_tokens=request.stop)

    async def _echo(self, job: Job, given: str | list[int], body: CompletionBody) -> None:
        """Set the text of a prompt, and where each of its tokens begins in it."""
        tokenizer = self.vocabulary.tokenizer
        if tokenizer is None:
            job.offsets = [0] * len(job.request.prompt)
            return
        skip = body.skip_special_tokens

        def decoded() -> tuple[str, list[int]]:
            text = given if isinstance(given, str) else tokenizer.decode(job.request.prompt, skip_special=skip)
            offsets, place, stream = list[int](), 0, TextStream(tokenizer, skip_special=skip)
            for token in job.request.prompt if body.logprobs is not None else ():
                offsets.append(min(place, len(text)))
                place += len(stream.push(token))
            return text, offsets

        job.text, job.offsets = await self.encoder.run(decoded)
