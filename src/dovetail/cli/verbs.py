"""The verbs: `dovetail VERB …` calls the function of the api room that is called like it, or one of those named here."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb: its line in the help, and how its command differs from a call of the function that is called like it."""

    summary: str
    functions: tuple[str, ...] | None = None  # of the api room, if they are not called like the verb
    json: str = "Print one JSON object."  # the help of --json
    page: str = ""  # the help of --html, which writes the result as a page
    streams: bool = False  # whether results are printed when they are known, with --jsonl as JSON
    loads: bool = True  # whether --load registers parts: the verb reads a spec
    out: str = ""  # what is written without --out: a path with {} (the model's), {name} (the last part of it) and options


VERBS = {
    "show": Verb("print the parts, shapes and costs of a model", page="Also write an HTML page."),
    "parts": Verb("list the parts", functions=("list_parts",), json="Print a JSON list."),
    "diff": Verb("compare two specs tensor by tensor", page="Also write an HTML page, the models side by side."),
    "match": Verb("find the field value that makes two specs equal in parameters, FLOPs or decode state"),
    "graft": Verb("change the spec of a trained model and carry its weights over", out="{}-grafted"),
    "quantize": Verb("store the matrices of a model in fewer bits", out="{}-quantized"),
    "merge": Verb("merge adapters into the weights of a model", out="{}-merged"),
    "laws": Verb("run the laws (property tests) on parts, a spec or a model of another library", streams=True),
    "verify": Verb("find where two implementations of a model diverge, and why", page="Also write an HTML page.", streams=True),
    "record": Verb("record the activations of a model inside another engine, for verify"),
    "data build": Verb("turn text, JSON Lines and Parquet into token shards", functions=("build_data",), loads=False),
    "data show": Verb(
        "print the contents of a corpus of token shards, or the learned tokens of a tuning file",
        functions=("show_data",),
        loads=False,
    ),
    "plan": Verb(
        "plan training on many GPUs: layouts that fit, memory, traffic, time and cost",
        functions=("plan", "plan_serving"),
        page="Also write an HTML page, with a picture of the layout.",
        streams=True,
    ),
    "train": Verb("train a model on text or token shards, in a run that resumes"),
    "tune": Verb("tune a model on chats, preferences or rewards, in a run that resumes", out="{name}-{method}"),
    "runs": Verb("list, compare and plot training runs", page="Also write an HTML page.", streams=True),
    "lab": Verb("compare architectures by paired runs, with a verdict per arm", streams=True),
    "scaling": Verb("fit a scaling law to runs, and find the best size for a compute", loads=False),
    "generate": Verb("generate text from a prompt"),
    "chat": Verb("talk with a model in the terminal"),
    "serve": Verb("serve a model by OpenAI's HTTP routes", functions=("serve", "serve_vllm")),
    "can-serve": Verb("report whether an engine can serve a model, else the part that prevents it"),
    "look": Verb(
        "find what heads, channels and layers do, each with its evidence; or read a training run",
        functions=("report",),
        page="Also write an HTML page.",
    ),
    "probe": Verb(
        "measure what a model does with a long context, by length and depth: needles, look-ups, copying",
        page="Also write an HTML page.",
    ),
    "map": Verb("draw the attention maps of a layer", json="Print one JSON object, with the attention probs.", out="map.png"),
    "import": Verb("convert a model directory from Hugging Face layout to ours", functions=("import_",)),
    "export": Verb("convert a model directory to Hugging Face layout"),
    "tiny": Verb("write a small checkpoint of a model, in Hugging Face layout"),
    "port": Verb(
        "list the Hugging Face model types that can be imported and exported",
        functions=("list_families",),
        json="Print a JSON list.",
        loads=False,
    ),
    "recipes": Verb(
        "list the recipes: small programs that prove a point, to run and to change",
        functions=("list_recipes",),
        json="Print a JSON list.",
        loads=False,
    ),
    "recipes copy": Verb("copy a recipe to start from", functions=("copy_recipe",), loads=False),
    "learn": Verb("list the exercises of the book", functions=("list_exercises",), json="Print a JSON list.", loads=False),
    "learn check": Verb("check an answer to an exercise of the book", functions=("check_exercise",), loads=False),
    "emit": Verb(
        "write a model as one PyTorch file without imports of dovetail",
        json="Print one JSON object, with the text of the file.",
    ),
    "doctor": Verb("print versions, processor, memory and missing packages", functions=("check_node",), loads=False),
    "completion": Verb("print a script that completes verbs, flags and presets in a shell", functions=(), loads=False),
}
