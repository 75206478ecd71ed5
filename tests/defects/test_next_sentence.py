"""BERT's head for next-sentence prediction is imported, computes what transformers does, and is written back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.disk.model_files import CONFIG_FILE, WEIGHTS_FILE
from dovetail.hf.hf import from_hf, to_hf
from dovetail.hf.tensors import DroppedTensors
from dovetail.hf.write import export_directory, import_directory

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 62, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 44}
NEXT, BOTH = "BertForNextSentencePrediction", "BertForPreTraining"


def checkpoint(name: str, place: Path) -> tuple[Path, object]:
    """A random tiny model of this class with biases, in the directory, and the model."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.BertConfig(**SIZES, max_position_embeddings=32)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(place / name)
    return place / name, model


def renamed(place: Path, architecture: str) -> None:
    """Write another class into the config of a directory."""
    config = json.loads((place / CONFIG_FILE).read_text())
    (place / CONFIG_FILE).write_text(json.dumps({**config, "architectures": [architecture]}))


def pair_of_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and token types of two pairs of texts."""
    ids = torch.randint(62, (2, 9), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])


def test_e4_next_sentence_logits_are_those_of_transformers(tmp_path: Path) -> None:
    place, theirs = checkpoint(NEXT, tmp_path)
    ids, types = pair_of_texts()
    model = dt.load(place)
    assert model.spec.head is not None
    assert model.spec.head.kind == "next_sentence"
    with torch.no_grad():
        wanted = theirs(ids, token_type_ids=types)  # type: ignore[operator]
        torch.testing.assert_close(model(ids, types=types), wanted.logits, rtol=0, atol=1e-6)
        labels = torch.tensor([0, 1])
        loss = theirs(ids, token_type_ids=types, labels=labels).loss  # type: ignore[operator]
        torch.testing.assert_close(model.loss(ids, labels, types=types), loss)


def test_e4_next_sentence_is_written_back_bit_for_bit(tmp_path: Path) -> None:
    place, _ = checkpoint(NEXT, tmp_path)
    assert import_directory(place, tmp_path / "ours").dropped == []
    ported = export_directory(tmp_path / "ours", tmp_path / "back")
    assert ported.form.architecture == NEXT
    before, after = (load_file(directory / WEIGHTS_FILE) for directory in (place, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    back = transformers.BertForNextSentencePrediction.from_pretrained(tmp_path / "back").eval()
    ids, types = pair_of_texts()
    with torch.no_grad():
        torch.testing.assert_close(back(ids, token_type_ids=types).logits, dt.load(place)(ids, types=types))


def test_e4_two_classes_without_dropout_are_no_next_sentences() -> None:
    """The classes of transformers have their weights under different names, so the specs differ."""
    for name in (NEXT, "BertForSequenceClassification"):
        config = {"model_type": "bert", "architectures": [name], "classifier_dropout": 0.0, **SIZES}
        assert to_hf(from_hf(config)).form.architecture == name


def test_e4_a_checkpoint_with_two_heads_is_refused_or_reported(tmp_path: Path) -> None:
    place, theirs = checkpoint(BOTH, tmp_path)
    with pytest.raises((FileError, SpecError), match=r"architectures.*two heads.*write BertForMaskedLM or BertForNextSentence"):
        dt.load(place)
    ids, types = pair_of_texts()
    with torch.no_grad():
        wanted = theirs(ids, token_type_ids=types)  # type: ignore[operator]
    renamed(place, NEXT)
    with pytest.warns(DroppedTensors, match=r"cls\.predictions\.\*: .*masked tokens.*write BertForMaskedLM"):
        model = dt.load(place)
    torch.testing.assert_close(model(ids, types=types), wanted.seq_relationship_logits, rtol=0, atol=1e-6)
    renamed(place, "BertForMaskedLM")
    with pytest.warns(DroppedTensors) as caught:  # its pooler, too
        model = dt.load(place)
    (told,) = (str(one.message) for one in caught if str(one.message).startswith("cls."))
    assert "next-sentence prediction; to import it instead, write BertForNextSentencePrediction" in told
    torch.testing.assert_close(model(ids, types=types), wanted.prediction_logits, rtol=0, atol=1e-5)
