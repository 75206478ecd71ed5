"""mlx-lm 0.32.2: a list of prompts ends the thread that generates; every later request gets 404.

mlx_lm.server --model DIR --port 8080
python benchmarks/server_faults/mlx_list.py http://127.0.0.1:8080/v1
"""

import json
import sys
import urllib.error
import urllib.request


def ask(prompt: object) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(sys.argv[1] + "/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read(200).decode()}"


for prompt in ("one text", ["two", "texts"], "one text"):
    print(f"{prompt!r}: {ask(prompt)}")
