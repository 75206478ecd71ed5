"""Train a Llama by a peer, in its own environment (benchmarks/peers/make trainer, litgpt), as a process that takes requests.

    python train_worker.py trainer|litgpt '{"width": 512, "layers": 8, …, "compiled": true, "fused": true}'

trainer is transformers' Trainer, its own loop, which waits in a callback between requests; litgpt is the step of its
pretraining (model, loss, Fabric, clipping). Both train on the same random rows again and again. One line of JSON goes out once
the first step, which compiles, is done; then lines come in on stdin, and one goes out for each:

    {"steps": 4}     train so many steps                       {"seconds": …, "loss": …}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Requests:
    """Counts steps: after the last one of a request it answers, and waits for the next."""

    def __init__(self, version: str) -> None:
        self.first, self.left, self.begin, self.version, self.steps = True, 0, 0.0, version, 0

    def step(self, loss: Callable[[], float]) -> bool:
        """Call after every step; False ends the training."""
        self.left -= 1
        if self.first:
            self.first = False
            self._answer(version=self.version, loss=loss())
        elif self.left:
            return True
        else:
            self._answer(seconds=time.perf_counter() - self.begin, loss=loss())
        line = sys.stdin.readline()
        if not line:
            return False
        self.left, self.begin = json.loads(line)["steps"], time.perf_counter()
        return True

    def _answer(self, **what: Any) -> None:
        os.write(OUT, (json.dumps(what) + "\n").encode())


def trainer(shape: SimpleNamespace) -> None:
    """transformers' Trainer."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=False,
        )
    )
    if shape.compiled:
        for layer in model.model.layers:
            layer.compile()
    rows = [{"input_ids": row, "labels": row} for row in tokens(shape)[:, :-1]]
    requests, last = Requests(transformers.__version__), [0.0]

    class Waits(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if not requests.step(lambda: float(last[0])):
                control.should_training_stop = True
            return control

    class Kept(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            last[0] = found = super().training_step(*args, **kwargs)
            return found

    with tempfile.TemporaryDirectory() as place:
        options = TrainingArguments(
            output_dir=place,
            per_device_train_batch_size=shape.batch,
            max_steps=1_000_000,
            learning_rate=shape.rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            optim="adamw_torch_fused" if shape.fused else "adamw_torch",
            use_cpu=True,
            bf16=shape.bf16,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        Kept(model=model, args=options, train_dataset=rows, callbacks=[Waits()]).train()


def litgpt(shape: SimpleNamespace) -> None:
    """litgpt: what its pretraining does at each step."""
    from importlib.metadata import version

    from lightning import Fabric
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        name="llama",
        block_size=shape.tokens,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_query_groups=shape.kv_heads,
        n_embd=shape.width,
        intermediate_size=shape.hidden,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if shape.bf16 else "32-true")
    model: Any = GPT(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    model = fabric.setup(torch.compile(model) if shape.compiled else model)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=shape.rate, weight_decay=0.1, betas=(0.9, 0.95), fused=shape.fused
    )
    optimizer = fabric.setup_optimizers(optimizer)
    rows = tokens(shape)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    requests, going = Requests(version("litgpt")), True
    while going:
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        going = requests.step(loss.item)


def tokens(shape: SimpleNamespace) -> torch.Tensor:
    """The rows (batch, tokens + 1)."""
    return torch.randint(0, shape.vocab, (shape.batch, shape.tokens + 1), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    OUT = os.dup(1)  # answers alone go to stdout
    os.dup2(2, 1)
    settings = SimpleNamespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    {"trainer": trainer, "litgpt": litgpt}[sys.argv[1]](settings)
