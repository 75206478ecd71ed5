"""Replicas of the native engine on a Ray cluster, behind a prefix-aware router.

    serve run --app-dir deploy/ray deploy/ray/serve.yaml              needs: pip install "dovetail-lm[serve]" "ray[serve]"

    client -> Ray's HTTP proxy -> Front: Guard, Relay -> PrefixRouter -> Engine: the app of `dovetail serve`, and its engine
                                                                      -> Engine …

Front reads the body, since Ray's proxy does not; it has no model and takes no GPU. Each Engine has the engine in a process of
its own, as `dovetail serve` has, which ends with the replica. All nodes need this version of Dovetail and Ray, the model
directory and the file of API keys under the same paths; keys are read there, and no configuration of Ray has them. Ray moves
calls between processes as pickles: a cluster must be as trusted as its machines, and only the port of the proxy may be
reached from outside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail import __version__
from dovetail.api.engine import EngineOptions
from dovetail.api.serve import open_app
from dovetail.base.errors import UsageError
from dovetail.serving.client import Busy
from dovetail.serving.http.access import read_keys
from dovetail.serving.http.guard import Gate, Guard
from dovetail.serving.http.options import HttpOptions, Options
from dovetail.serving.replicas.relay import Placement, Relay, ReplicaCall, ReplicaLost, answer, merge
from dovetail.serving.worker import QUEUED

OPTIONS = ("name", "api_key_file", "allow_host", "allow_origin", "adapter", "metrics_prefix", "tool_parser")  # of the server
METRICS_SECONDS = 5.0


class PrefixRouter(RequestRouter):
    """Sends a prompt to the replica that has had its longest prefix (dovetail/serving/replicas/relay.py)."""

    def initialize_state(self, slack: int = 4) -> None:
        self.placement = Placement(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # where all replicas are full; Ray tries without a pause otherwise
            )
        loads = {id: self.replica_queue_len_cache.get(one.replica_id) or 0 for id, one in replicas.items()}
        ranks = self.placement.ranks(_keys(pending_request), loads) if loads else []
        return [[replicas[id] for id in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self.placement.record(_keys(pending_request), replica_id.unique_id)


def _keys(request: PendingRequest | None) -> tuple[bytes, ...]:
    """The keys of a call's prompt; none for other methods of a replica."""
    first = request.args[0] if request is not None and request.args else None
    return first.keys if isinstance(first, ReplicaCall) else ()


def server_options(
    model: str,
    api_key_file: str,
    name: str | None = None,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    adapter: Mapping[str, str] | None = None,
    **http: Any,
) -> Options:
    """The options of the server, from those of `dovetail serve`."""
    adapters = adapter or {}
    return Options(
        models={name or Path(model).resolve().name: None, **dict(zip(adapters, adapters, strict=True))},
        version=__version__,
        keys=tuple(read_keys(api_key_file)),
        hosts=tuple(allow_host),
        origins=tuple(allow_origin),
        **vars(HttpOptions(**http)),
    )


@serve.deployment
class Engine:
    """A replica: the app of one engine."""

    async def __init__(self, model: str, server: dict[str, Any], engine: dict[str, Any]) -> None:
        self.stack = AsyncExitStack()
        queued = engine.pop("queued", QUEUED)
        options = EngineOptions(**engine, adapters=server.get("adapter") or {})
        opened = open_app(model, server_options(model, **server), options, queued=queued)
        self.app = await self.stack.enter_async_context(opened)
        await self.stack.enter_async_context(self.app.router.lifespan_context(self.app))

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        """Yield the parts of a response."""
        async with aclosing(answer(self.app, call)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> tuple[str, str]:
        """Return the name of the replica, and its metrics."""
        return serve.get_replica_context().replica_id.unique_id, self.app.state.service.metrics.text().decode()

    async def check_health(self) -> None:
        """Raise where the engine has ended, so that Ray starts another replica."""
        if not self.app.state.service.client.alive():
            raise RuntimeError("the engine has ended")

    async def __del__(self) -> None:
        await self.stack.aclose()


class Through(Response):
    """A response that an app sends."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@serve.deployment
class Front:
    """Checks requests and passes them to the replicas."""

    def __init__(self, engines: DeploymentHandle, model: str, server: dict[str, Any]) -> None:
        self.engines = engines
        self.app = Guard(Relay(self.ask, self.metrics), server_options(model, **server), Gate())

    async def __call__(self, request: Request) -> Response:
        return Through(self.app)

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        """Yield the parts of a replica's response."""
        parts = self.engines.options(stream=True).answer.remote(call)
        try:
            async for part in parts:
                yield part
        except RayActorError as error:
            raise ReplicaLost from error
        except BackPressureError as error:
            raise Busy(1.0) from error
        finally:
            parts.cancel()

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas."""
        pages = await self.engines.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        return merge(dict(page for page in pages if not isinstance(page, BaseException)))  # without those that just ended


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application; `args` are those of serve.yaml: the options of `dovetail serve`, with _ for -."""
    server = {name: args[name] for name in OPTIONS if name in args}
    engine = {name: value for name, value in args.items() if name not in (*OPTIONS, "model")}
    if "model" not in args or "api_key_file" not in args:
        raise UsageError("args: give model and api_key_file; Ray's proxies may listen on every address of every node")
    return Front.bind(Engine.bind(args["model"], server, engine), args["model"], server)
