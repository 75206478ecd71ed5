"""`dovetail train` and `dovetail map`, as a user calls them."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Engine, decoders, models, pre_tokenizers, processors

from dovetail.cli import main
from dovetail.files.model_dir import save
from dovetail.files.spec import load_spec
from dovetail.hf.load import load
from dovetail.model.construction import build
from dovetail.text.tokenizer import Tokenizer
from dovetail.views.map import attention_of

SMALL = [
    "--set=width=28", "--set=vocab=270", "--set=layers.*.mixer.heads=2",
    "--set=layers.*.mixer.kv_heads=1", "--set=layers.*.ffn.hidden=44",
    "--batch=4", "--length=16", "--sample=12",
]  # fmt: skip
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tale.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(*args):
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return end.value.code


def test_a_run_reports_and_leaves_a_model_that_map_can_draw(home, capsys):
    pytest.importorskip("matplotlib")
    assert run("train", "llama-tiny", "--text", "tale.txt", "--steps", "25", "--learning-rate", "1e-2", *SMALL) == 0
    shown = capsys.readouterr()
    assert "25 steps, 1,600 tokens" in shown.out
    assert "train loss (mean of the last 25 steps): " in shown.out
    assert f"llama-tiny --set {SMALL[0].removeprefix('--set=')} --set vocab=270" in shown.err
    assert "a sample after 'The ':" in shown.out
    assert "predicting the next token" in shown.err
    made = home / "llama-tiny-trained"
    names = {
        "dovetail.yaml",
        "model.safetensors",
        "tokenizer.json",
        "run.yaml",
        "loss.jsonl",
        "loss.png",
        "checkpoints",
        "initial.json",
    }
    assert {path.name for path in made.iterdir()} == names
    losses = [json.loads(line) for line in (made / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses] == list(range(1, 26))
    assert losses[-1]["loss"] < 0.8 * losses[0]["loss"]

    assert run("map", "llama-tiny-trained", "the worst of times", "-o", "map.png", "--layer", "-1", "--heads", "1") == 0
    assert "layer 5 of 6" in capsys.readouterr().out
    assert (home / "map.png").stat().st_size > 5000
    model = load(made)
    assert (model.part.width, model.part.vocab) == (28, 270)
    tokens = Tokenizer.load(made).encode("the worst of times")
    assert attention_of(model, tokens, 5).shape == (2, len(tokens), len(tokens))


def test_json_is_one_object_and_a_seed_gives_the_same_again(home, capsys):
    reports = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert run("train", "llama-tiny", "--text", "tale.txt", "--steps=3", "--json", "-o", name, "--seed", seed, *SMALL) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["train_loss_steps"] for report in reports] == [3, 3, 3]
    for field in ("first_loss", "train_loss", "held_out_loss", "held_out_bits_per_byte", "sample"):
        assert reports[0][field] == reports[1][field]
    assert reports[0]["train_loss"] != reports[2]["train_loss"]
    assert reports[0]["tokens"] == 3 * 4 * 16
    assert (home / "a" / "model.safetensors").read_bytes() == (home / "b" / "model.safetensors").read_bytes()


def test_the_run_is_named_after_the_changed_spec(home, capsys):
    assert run("train", "llama-tiny", "--text", "tale.txt", "--steps=1", "--swap", "position=alibi", *SMALL) == 0
    assert "\nllama-tiny --swap position=alibi --set width=28 " in capsys.readouterr().err


def test_a_bidirectional_spec_fills_in_and_does_not_generate(home, capsys):
    both = ["--set=layers.*.mixer.mask=full", "--set=head=masked_lm"]
    assert run("train", "llama-tiny", "--text", "tale.txt", "--steps=2", "--json", *SMALL, *both) == 0
    shown = capsys.readouterr()
    assert "masked tokens" in shown.err
    assert "sample" not in json.loads(shown.out)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["llama-tiny", "--text", "none.txt"], 4, "none.txt: cannot be read (No such file"),
        (["lama-tiny", "--text", "tale.txt"], 4, "lama-tiny: no such file, directory or preset"),
        (["llama-tiny", "--text", "tale.txt", "--minutes", "0"], 2, "--minutes: 0.0 is not above 0"),
        (["llama-tiny", "--text", "tale.txt", "--learning-rate", "nan"], 2, "--learning-rate: nan is not above 0"),
        (["llama-tiny", "--text", "tale.txt", "--length", "9000", "--set=vocab=270"], 4, "too few for sequences of 9000"),
        (["llama-tiny", "--text", "tale.txt", "--set=vocab=100"], 3, "vocab: 100 is too small"),
        (["llama-tiny", "--text", "tale.txt", "--set=head=classifier"], 3, "head: training on text needs logits"),
        (["llama-tiny", "--text", "tale.txt", "--set=head=token_classifier"], 3, "head: training on text needs logits"),
        (["llama-tiny", "--text", "mine/rows.jsonl"], 4, "mine/rows.jsonl: is JSON, not plain text; extract the text first"),
        (["llama-tiny", "--text", "tale.txt", "-o", "mine"], 4, "mine: exists and is not a model directory; choose another"),
        (["llama-tiny", "--text", "tale.txt", "-o", "mine", "--force"], 4, "mine: exists and is not a model directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(home, capsys, args, code, says):
    (home / "mine").mkdir()
    (home / "mine" / "thesis.txt").write_text("ten years")
    (home / "mine" / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    assert run("train", *args, "--steps=1") == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err.splitlines()[-1]
    assert {path.name for path in home.iterdir()} == {"tale.txt", "mine"}
    assert (home / "mine" / "thesis.txt").read_text() == "ten years"


def test_a_model_is_replaced_only_by_force(home, capsys):
    args = ["train", "llama-tiny", "--text", "tale.txt", "--steps=1", *SMALL]
    assert run(*args) == 0
    first = (home / "llama-tiny-trained" / "model.safetensors").read_bytes()
    assert run(*args, "--seed=1") == 4
    assert "holds another run: seed is 0 in run.yaml, and 1 here" in capsys.readouterr().err
    assert run(*args, "--seed=1", "--force") == 0
    assert (home / "llama-tiny-trained" / "model.safetensors").read_bytes() != first


def test_a_trained_model_is_refused_and_its_spec_is_trained_from_scratch(home, capsys):
    args = ["--text", "tale.txt", "--steps=1", *SMALL[-3:]]
    assert run("train", "llama-tiny", "-o", "first", *args, *SMALL) == 0
    capsys.readouterr()
    assert run("train", "first", "-o", "second", *args) == 4
    shown = capsys.readouterr()
    assert shown.err.startswith("dovetail: first: holds model.safetensors, which train would discard")
    assert "give first/dovetail.yaml" in shown.err
    assert not (home / "second").exists()
    assert run("train", "first/dovetail.yaml", "-o", "second", *args) == 0
    (home / "first" / "model.safetensors").unlink()
    assert run("train", "first", "-o", "third", *args) == 4
    assert "first: holds tokenizer.json" in capsys.readouterr().err
    (home / "first" / "tokenizer.json").unlink()
    assert run("train", "first", "-o", "third", *args) == 0


def test_map_names_what_is_missing(home, capsys):
    assert run("map", "nowhere", "text") == 4
    assert "nowhere: no such directory" in capsys.readouterr().err


def test_map_shows_the_special_tokens_that_the_tokenizer_adds(home, capsys):
    pytest.importorskip("matplotlib")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "best", "of", "times"]
    engine = Engine(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    engine.decoder = decoders.WordPiece(cleanup=False)
    spec = load_spec("bert-tiny").set("vocab", len(words))
    save(build(spec), spec, "bert", {"tokenizer.json": engine.to_str()})
    assert run("map", "bert", "the best of times", "-o", "map.svg", "--heads", "0") == 0
    assert ", 6 tokens: map.svg" in capsys.readouterr().out
    assert run("map", "bert", "the best of times", "-o", "map.html") == 0
    assert "[CLS]" in (home / "map.html").read_text()
    masked = spec.set("head", "masked_lm")
    save(build(masked), masked, "masked", {"tokenizer.json": engine.to_str()})
    assert run("map", "masked", "the best of times", "-o", "lens.html", "--of", "lens") == 0
    assert "4 points of the residual stream, 6 tokens: lens.html" in capsys.readouterr().out
    assert run("map", "masked", "the best of times", "-o", "other.html", "--of", "lens", "--layer", "1") == 2
    assert "a lens shows every layer" in capsys.readouterr().err
    drawn = (home / "map.svg").read_text()  # each label is in a comment beside its outline
    assert [drawn.count(f"<!-- {label} -->") for label in ("[CLS]", "the", "[SEP]")] == [2, 2, 2]


def test_divergence_has_its_own_exit_code(home, capsys):
    assert run("train", "llama-tiny", "--text", "tale.txt", "--steps=60", "--learning-rate=1e30", *SMALL) == 5
    assert "lower the learning rate (--learning-rate)" in capsys.readouterr().err


def test_weights_that_overflow_in_the_last_step_are_not_saved(home, capsys):
    """The loss and the gradient of the only step are finite; the updated weights are not."""
    assert run("train", "llama-tiny", "--text", "tale.txt", "--steps=1", "--learning-rate=1e300", "--json", *SMALL) == 5
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 1: the held-out loss is nan; embed.table holds" in shown.err.splitlines()[-1]
    names = {path.name for path in (home / "llama-tiny-trained").iterdir()}
    assert names == {"dovetail.yaml", "tokenizer.json", "run.yaml", "loss.jsonl", "initial.json"}


@pytest.mark.parametrize("verb", ["train", "map"])
def test_help_does_not_wait_for_torch(verb):
    code = f"""
import sys
from dovetail.cli import main
try:
    main(["{verb}", "--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "--out" in done.stdout
