"""Options of training whose help is long."""

from __future__ import annotations

from dovetail.api.options import InDir, InFile, OutDir, Sets, Spec
from dovetail.base.option import BatchSize, Option

SPEC = Spec(
    "A preset's name, a .yaml file, or a run file: YAML with `spec` and any flag as keys, which flags here override; "
    "without it, the spec of --from.",
    argument=True,
)
DATA = Option("Token shards of `dovetail data build` to train on, DIR or DIR=WEIGHT; may be given many times.", repeat=True)
TASK = Option(
    "A synthetic task to learn, every batch new: aggregation, dyck, far_copy, induction, modular_sum, mqar, multi_hop, "
    "multi_key, needle, parity, selective_copy, sorting or variable_tracking, or its fields as YAML: {kind: mqar, pairs: 8}."
)
LABELS = InFile('Labeled rows to classify: JSON Lines of {"text": …, "label": …}, or an .npz of images and labels.')
TAGS = InFile('Words with a tag each, as of entities: JSON Lines of {"tokens": ["…", "…"], "tags": ["B-PER", "O"]}.')
PAIRS = InFile(
    'Pairs of texts, to match or, by an encoder–decoder, to translate: JSON Lines of {"source": …, "target": …} (or '
    '"a" and "b"), or a .tsv.'
)
OBJECTIVE = Option(
    "next_token, masked_tokens, span_corruption, denoising, answers, classification, token_classification, contrastive "
    "or translation (default: by the spec and data)."
)
FROM = InDir("Start from the weights and the tokenizer of a model directory, or of the newest checkpoint of a run.")
ADAPTER = Option(
    "Train an adapter on the frozen weights of --from: lora, dora, ia3, or its fields as YAML: {kind: lora, rank: 8}."
)
OUT = OutDir("The model directory to write (default: SPEC-trained; for the run.yaml of a run, its directory).", short="-o")
SET = Sets(
    "Change a field first: --set layers.*.mixer.kv_heads=1, or a key of the run file: --set run.batch=4; may be "
    "given many times."
)
EPOCHS = Option("", low=0.0, above=True)  # not a flag of train: of tune
TOKENIZER = Option("The kind of tokenizer; byte_pair encodes any text without loss.")
LOG = Option(
    "Also log the metrics for tensorboard or wandb (Weights & Biases), in the model directory; may be given many times.",
    repeat=True,
)
LEARNING_RATE = Option("The peak learning rate, after the warm-up (default: 0.0025; with --adapter ten times as much).")
MINUTES = Option("Train for about N minutes: the first steps are measured (default: 5, if no other end is given).")
BEAMS = BatchSize("translation: beams of the search by which held-out pairs are decoded at evals (default: 4).")
