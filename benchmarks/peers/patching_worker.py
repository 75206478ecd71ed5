"""Patch residual streams by TransformerLens or nnsight, each in its own environment (benchmarks/peers/make), as a process that
takes requests.

    python patching_worker.py transformer-lens DIR --threads 2

DIR holds a Llama in Hugging Face layout. The clean value of the residual stream before each layer is patched at each position
into the corrupt run, and the metric is the difference of two logits of the last token. TransformerLens: its
`patching.get_act_patch_resid_pre`, which runs the model once per patch. nnsight: one trace per layer with an invoke per
position, which it runs as one batch. One line of JSON goes out when the model is loaded; then, for each line on stdin:

    {"clean": [[…]], "corrupt": [[…]], "answers": [3, 5]}          {"metric": [[…], …] (layers, positions), "seconds": …}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Patched = Callable[[Tensor, Tensor, list[int]], Tensor]  # clean, corrupt, answers -> (layers, positions)


def load(directory: str):
    """The model of a directory in Hugging Face layout."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval().requires_grad_(False)
    model.load_state_dict(load_file(f"{directory}/model.safetensors"))
    return model


def transformer_lens(directory: str) -> Patched:
    from transformer_lens import patching
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    theirs = load(directory)
    bridge = build_bridge_from_module(theirs, "LlamaForCausalLM", hf_config=theirs.config, model_name="benchmark").eval()

    def patched(clean: Tensor, corrupt: Tensor, answers: list[int]) -> Tensor:
        _, cache = bridge.run_with_cache(clean)
        a, b = answers
        return patching.get_act_patch_resid_pre(bridge, corrupt, cache, lambda x: (x[:, -1, a] - x[:, -1, b]).mean())

    return patched


def nnsight(directory: str) -> Patched:
    from nnsight import TransformersModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"0": 0}, "0")), pad_token="0", unk_token="0")
    model = TransformersModel(load(directory), task="text-generation", tokenizer=words)

    def patched(clean: Tensor, corrupt: Tensor, answers: list[int]) -> Tensor:
        layers, positions, (a, b), rows = len(model.model.layers), corrupt.shape[1], answers, []
        streams: list[Tensor] = []
        with model.trace(clean):
            for layer in range(layers):
                streams.append(model.model.layers[layer].input.save())
        for layer in range(layers):
            values: list[Tensor] = []
            with model.trace() as tracer:
                for position in range(positions):
                    with tracer.invoke(corrupt):
                        model.model.layers[layer].input[:, position] = streams[layer][:, position]
                        logits = model.lm_head.output
                        values.append((logits[:, -1, a] - logits[:, -1, b]).mean().save())
            rows.append(torch.stack(values))
        return torch.stack(rows)

    return patched


PEERS = {"transformer-lens": transformer_lens, "nnsight": nnsight}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="report CPU time")
    flags = parser.parse_args()
    clock = time.process_time if flags.cpu_time else time.perf_counter
    warnings.simplefilter("ignore")
    torch.set_num_threads(flags.threads)
    torch.set_grad_enabled(False)
    os.environ["TQDM_DISABLE"] = "1"
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    patched = PEERS[flags.peer](flags.directory)
    print(json.dumps({"version": version(flags.peer), "settings": {"torch": torch.__version__}}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = clock()
        metric = patched(torch.tensor(request["clean"]), torch.tensor(request["corrupt"]), request["answers"])
        answer = {"seconds": clock() - begin, "metric": metric.tolist()}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
