"""Tune a model on chats, completions, preferences or rewards, by supervised learning, DPO, GRPO and other methods.

The data is JSON Lines. Messages are rendered by the model's own chat template, and only the answers are learned, with the
token that ends them: `dovetail data show DATA --model MODEL` prints which. The run directory is that of `dovetail train`:
settings, metrics, checkpoints, the model and a plot; the same command again resumes a run that was interrupted or killed.

    dovetail tune llama-tiny-trained --data chats.jsonl --template plain -o chat
    dovetail tune chat --data pairs.jsonl --method dpo --beta 0.1 -o preferred
    dovetail tune base --data sums.jsonl --method grpo --reward digit_sum --max-tokens 4 -o solver
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import BatchSize, InDir, InFile, Length, LoadFlags, NewTokens, OutDir, Seed, Steps
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options, print_view
from dovetail.core.errors import UsageError
from dovetail.training.plan import Plan, PrecisionChoice, ScheduleKind

INTERRUPTED = 130


@dc.dataclass
class Command(LoadFlags):
    """The model, the data and the method."""

    model: tyro.conf.Positional[InDir]
    """The model directory to start from, ours or in Hugging Face layout."""
    data: InFile
    """JSON Lines: messages, prompt and completion, prompt with chosen and rejected, or prompts to answer."""
    method: Literal["sft", "dpo", "ipo", "orpo", "kto", "reward", "grpo", "distill"] = "sft"
    """How it is tuned."""
    adapter: str | None = None
    """Train an adapter of this kind (lora …) and leave the other weights as they are."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Train only the weights whose paths match this pattern: 'layers.*.mixer.prefix_*'; may be given many times."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The run directory to write (default: MODEL-METHOD)."""
    force: bool = False
    """Replace an existing run."""
    template: str | None = None
    """A chat template in place of the model's: a file, or plain, which writes `role: content`."""
    epochs: float | None = None
    """Stop after N passes over the rows (default: 1, if no other end is given)."""
    steps: Steps | None = None
    """Stop after N steps."""
    minutes: float | None = None
    """Train for about N minutes."""
    batch: BatchSize = 8
    """Rows per step: packed conversations, pairs, or answers to prompts."""
    length: Length = 512
    """Tokens per row at most; longer examples are left out."""
    learning_rate: float | None = None
    """The peak learning rate (default: by the method, 1e-6 to 2e-5; ten times as large with an adapter)."""
    schedule: ScheduleKind = Plan.schedule
    """How the learning rate decays."""
    warmup: float = 0.1
    """The fraction of the run over which the learning rate rises to its peak."""
    weight_decay: float = 0.0
    """Weight decay of matrices and tables."""
    micro_batches: BatchSize = 1
    """Compute a batch in N pieces, in less memory; the result is the same."""
    precision: PrecisionChoice = Plan.precision
    """bf16: matmuls in bfloat16; weights, gradients and the optimizer's state stay in float32."""
    seed: Seed = 0
    """The seed of the order of rows, dropout and rollouts."""
    evals: Steps = Plan.evals
    """Times per run that the held-out rows are measured."""
    beta: float | None = None
    """dpo, ipo, orpo, kto: the strength of the reference (default: 0.1)."""
    teacher: InDir | None = None
    """distill: the model directory to learn from."""
    direction: Literal["forward", "reverse"] | None = None
    """distill: the divergence to minimize (default: forward)."""
    reward: str | None = None
    """grpo: digit_sum, or exact_answer, which compares with the field `answer` of a row."""
    group: BatchSize | None = None
    """grpo: answers per prompt (default: 8)."""
    max_tokens: NewTokens | None = None
    """grpo: tokens of an answer at most (default: 64)."""
    temperature: float | None = None
    """grpo, distill: divides the logits (default: 1)."""
    clip_ratio: float | None = None
    """grpo: how far the ratio of a token's probs may move (default: 0.2)."""
    kl: float | None = None
    """grpo: weight of the divergence from the initial weights (default: 0); above 0, a copy of them stays in memory."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Tune, and print the losses. Ctrl-C ends the run after the current step and writes what there is."""
        from pathlib import Path

        from dovetail.api.tune import tune

        if self.reward is not None and ":" in self.reward:
            raise UsageError("--reward: an import path is valid only in Python: dovetail.tune(..., reward='module:function')")
        out = self.out or Path(f"{self.model.absolute().name}-{self.method}")
        result = tune(**{**options(self, "json", "load"), "out": out}, note=print_note)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        if result.interrupted:
            print_note(f"interrupted after step {result.history[-1].step}; the same command resumes the run")
        return INTERRUPTED if result.interrupted else 0
