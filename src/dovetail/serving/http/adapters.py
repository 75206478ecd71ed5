"""Adapters loaded and unloaded by name, as vLLM's clients ask for it:

    POST /v1/load_lora_adapter      {"lora_name": "legal", "lora_path": "legal-2024"}
    POST /v1/unload_lora_adapter    {"lora_name": "legal"}

Requests then give the name as their model. A directory that a client names is read from disk, so that both routes need a key
of the administrator, and a path is taken from one directory of the server alone, links followed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dovetail.base.errors import InputError
from dovetail.serving.client import LOG
from dovetail.serving.http.base_schema import Body
from dovetail.serving.http.body import read_body
from dovetail.serving.http.errors import ApiError, without_paths
from dovetail.serving.http.guard import ADMIN
from dovetail.serving.http.options import NAME
from dovetail.serving.http.service import Service

Name = Annotated[str, Field(pattern=NAME)]


class LoadBody(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]


class UnloadBody(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Name


class AdapterRoutes:
    """The two routes."""

    def __init__(self, service: Service) -> None:
        self.service, self.root = service, service.options.adapter_root

    async def load(self, request: Request) -> Response:
        """Load an adapter."""
        root = self._checked(request)
        body, models = await read_body(request, LoadBody), self.service.models
        if body.lora_name in models:
            raise ApiError(400, f"lora_name: {body.lora_name!r} is served already; unload it first", param="lora_name")
        place = inside(root, body.lora_path)
        try:
            await self.service.client.load_adapter(body.lora_name, place)
        except InputError as error:
            LOG.warning("adapter %s: %s", body.lora_name, error)
            raise ApiError(400, _reason(str(error), str(place), body.lora_path), param="lora_path") from None
        models[body.lora_name] = body.lora_name
        return JSONResponse({"status": "ok", "message": f"{body.lora_name}: loaded"})

    async def unload(self, request: Request) -> Response:
        """Unload an adapter: requests that run end with it."""
        self._checked(request)
        body, models = await read_body(request, UnloadBody), self.service.models
        if models.get(body.lora_name) is None:
            raise ApiError(404, f"lora_name: no adapter {body.lora_name!r} is served here", param="lora_name")
        del models[body.lora_name]
        await self.service.client.unload_adapter(body.lora_name)
        return JSONResponse({"status": "ok", "message": f"{body.lora_name}: unloaded"})

    def _checked(self, request: Request) -> Path:
        """The directory of adapters, for an administrator."""
        if self.root is None:
            message = "adapters are not loaded by requests here; start the server with --adapter-root and --admin-key-file"
            raise ApiError(403, message, code="adapters_not_offered", headers={"Connection": "close"})
        if not request.scope[ADMIN]:
            raise ApiError(403, "needs a key of the administrator", code="admin_only", headers={"Connection": "close"})
        return self.root


def _reason(message: str, directory: str, given: str) -> str:
    """A message about an adapter's directory without a path of the server: what the client called it stands instead."""
    return given.join(without_paths(part) for part in message.split(directory))


def inside(root: Path, path: str) -> Path:
    """The directory of a path in `root`, links followed; ApiError where it is elsewhere or not there."""
    try:
        root = root.resolve()
        place = (root / path).resolve()
        if place.is_relative_to(root) and place != root and place.is_dir():
            return place
    except (OSError, ValueError, RuntimeError):  # a name that is too long, a zero byte, a circle of links
        pass
    raise ApiError(404, "lora_path: is not a directory of the adapters", param="lora_path")
