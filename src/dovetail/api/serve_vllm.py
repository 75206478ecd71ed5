"""serve_vllm: a model behind vLLM's own server, until a signal ends it.

    a directory in Hugging Face layout     as it is: by vLLM's model of that family, or by our plugin
    one of ours                            exported to a temporary directory first: by a family that can express the spec, else
                                           with the spec inside, for the plugin

vLLM runs as a process of its own in the same environment. It is not imported here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from dovetail.api.export import export
from dovetail.api.options import (
    API_KEY,
    API_KEY_FILE,
    BUDGET,
    HOST,
    LONGEST,
    PORT,
    ROWS,
    SERVED,
    SERVED_DTYPE,
    SERVED_NAME,
    SHARE,
)
from dovetail.base.errors import SpecError, UsageError, install_command
from dovetail.base.option import Option
from dovetail.disk.model_files import CONFIG_FILE
from dovetail.disk.untrusted import Directory
from dovetail.serving.http.access import check_exposed, read_keys, url_of
from dovetail.serving.vllm.process import running, wait_until_ready

SERVER = "vllm.entrypoints.openai.api_server"


def serve_vllm(
    model: Annotated[str | Path, SERVED],
    *,
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, PORT] = 8000,
    name: Annotated[str | None, SERVED_NAME] = None,
    api_key: Annotated[Sequence[str], API_KEY] = (),
    api_key_file: Annotated[str | Path | None, API_KEY_FILE] = None,
    tensor: Annotated[int, Option("--engine vllm: ranks of tensor parallelism.", low=1, high=1024)] = 1,
    longest: Annotated[int | None, LONGEST] = None,
    rows: Annotated[int | None, ROWS] = None,
    budget: Annotated[int | None, BUDGET] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, SERVED_DTYPE] = None,
    share: Annotated[bool, SHARE] = True,
    vllm_flag: Annotated[
        Sequence[str],
        Option("--engine vllm: a further flag of its server; may be given many times.", form="--FLAG=VALUE", repeat=True),
    ] = (),
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the model of a directory by vLLM until SIGTERM or SIGINT.

    `tensor` are the ranks of tensor parallelism; `longest`, `rows`, `budget` and `share` are `max-model-len`, `max-num-seqs`,
    `max-num-batched-tokens` and prefix caching, with vLLM's defaults; `vllm_flag` are further flags of its server. SpecError
    names the part that the plugin cannot serve. DovetailError: vLLM ended by itself.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"vllm: is not installed in this environment: {install_command('vllm')}; or choose the engine native")
    keys = (*api_key, *(() if api_key_file is None else read_keys(api_key_file)))
    check_exposed(host, keys)
    if len(keys) > 1:
        raise UsageError(f"--api-key: vLLM takes one key where other users of the machine cannot read it, not {len(keys)}")
    if port == 0:
        raise UsageError("--port 0: vLLM does not say which port is free; give one")
    sizes = {"max-model-len": longest, "max-num-seqs": rows, "max-num-batched-tokens": budget, "dtype": dtype}
    flags = [f"--{flag}={value}" for flag, value in sizes.items() if value is not None]
    flags += [] if share else ["--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory(prefix="dovetail-vllm-") as place:
        directory, eager = readable(Directory(model), Path(place) / "model", tensor)
        shown = name or Path(model).resolve().name
        flags += [f"--host={host}", f"--port={port}", f"--served-model-name={shown}", f"--tensor-parallel-size={tensor}"]
        command = [sys.executable, "-P", "-m", SERVER, f"--model={directory}", *flags, *eager, *vllm_flag]
        environment = os.environ | {"PYTHONSAFEPATH": "1"} | ({"VLLM_API_KEY": keys[0]} if keys else {})
        with running(command, environment) as child:
            if wait_until_ready(child, host, port) and ready is not None:
                ready(url_of(host, port))
            child.wait()


def readable(where: Directory, out: Path, tensor: int) -> tuple[Path, list[str]]:
    """A directory that vLLM reads, and the flags that its model needs: the plugin's is not compiled."""
    from dovetail.hf.origin import origin
    from dovetail.hf.own_config import MODEL_TYPE, is_own
    from dovetail.serving.can_serve import require

    eager = ["--enforce-eager"]
    found = origin(where)
    if where.has(CONFIG_FILE):
        own = is_own(where.json(CONFIG_FILE))
        if own:
            require(found.spec, "vllm", tensor)
        return where.place, eager if own else []
    try:
        return export(where.place, out).directory, []
    except SpecError:  # no family can express the spec
        require(found.spec, "vllm", tensor)
        return export(where.place, out, family=MODEL_TYPE).directory, eager
