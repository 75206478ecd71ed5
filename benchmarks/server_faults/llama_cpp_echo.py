"""llama-cpp-python 0.3.36: without BOS, `echo` gives token i the row that follows it.

python -m llama_cpp.server --model FILE.gguf --logits_all true --port 8000      (a model that adds no BOS)
python benchmarks/server_faults/llama_cpp_echo.py http://127.0.0.1:8000/v1
"""

import json
import sys
import urllib.request


def ask(prompt: str, tokens: int, **more: object) -> dict:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5, **more}
    request = urllib.request.Request(
        sys.argv[1] + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]


prompt = "once upon a time"
generated = ask(prompt, 1)
echo = ask(prompt + generated["text"], 1, echo=True)["logprobs"]
place = echo["tokens"].index(generated["text"], len(echo["tokens"]) - 2)  # the generated token as part of the prompt
rows = echo["top_logprobs"]
best = max(generated["logprobs"]["top_logprobs"][0].items(), key=lambda one: one[1])
print(f"the best log-prob of the generated token: {best[1]:.4f}")
print(f"echo, its own row: {max(rows[place].values()):.4f}; the row before: {max(rows[place - 1].values()):.4f}")
