"""Tune a model on chats, completions, preferences or rewards, by supervised learning, DPO, GRPO and other methods.

The data is JSON Lines. Messages are rendered by the model's own chat template, and only the answers are learned, with the
token that ends them: `dovetail data show DATA --model MODEL` prints which. The run directory is that of `dovetail train`:
settings, metrics, checkpoints, the model and a plot; the same command again resumes a run that was interrupted or killed.

    dovetail tune llama-tiny-trained --data chats.jsonl --template plain -o chat
    dovetail tune chat --data pairs.jsonl --method dpo --beta 0.1 -o preferred
    dovetail tune base --data sums.jsonl --method grpo --reward digit_sum --max-tokens 4 -o solver
"""

from __future__ import annotations

from pathlib import Path

from dovetail.cli.command import Options, call
from dovetail.cli.printing import print_result
from dovetail.core.errors import UsageError


def run(given: Options, json: bool) -> int:
    """Tune, and print the losses. Ctrl-C ends the run after the current step and writes what there is."""
    from dovetail.api.tune import tune

    if ":" in given.get("reward", ""):
        raise UsageError("--reward: an import path is valid only in Python: dovetail.tune(..., reward='module:function')")
    out = given.get("out") or Path(f"{given['model'].absolute().name}-{given.get('method', 'sft')}")
    return print_result(call(tune, {**given, "out": out}), json)
