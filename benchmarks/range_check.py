"""In one environment: do foreign laws and verify pass on its versions of torch and transformers? One JSON object on stdout.

    .peers/range-5.0.0/bin/python benchmarks/range_check.py

Tiny random models, built by the transformers of this environment: three laws on each, and `verify` of the directory read by us
against the same directory run by transformers. Run by benchmarks/range.py.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAWS = ("causal", "chunked", "padded")
SIZES = {"vocab_size": 62, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 62, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64},
    "Qwen2": SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64},
    "GPT2": GPT2,
}


def told(check: Callable[[], str]) -> str:
    """What a check says, empty where it passes; an error is its first line."""
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def main() -> None:
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import transformers

    import dovetail

    transformers.logging.set_verbosity_error()
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in MODELS.items():
            place = Path(folder) / name
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**sizes)
            getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).save_pretrained(place)

            def laws(place: Path = place) -> str:
                failures = dovetail.laws(f"hf:{place}", only=LAWS).to_dict()["laws"]
                return "; ".join(f"{law['law']}: {law['detail']}" for law in failures if law["state"] != "passed")

            def verify(place: Path = place) -> str:
                verdict = dovetail.verify(str(place), f"hf:{place}", why=False).status
                return "" if verdict in ("equal", "rounding") else f"the verdict is {verdict}"

            results[f"{name}: laws"], results[f"{name}: verify"] = told(laws), told(verify)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "results": results}))


if __name__ == "__main__":
    main()
