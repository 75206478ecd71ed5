"""transformers 5.22.2: an answer of `transformers serve` ends with the stop string, not before it.

transformers serve DIR --port 8000
python benchmarks/server_faults/transformers_stop.py http://127.0.0.1:8000/v1 DIR
"""

import json
import sys
import urllib.request


def ask(**more: object) -> str:
    body = {"model": sys.argv[2], "prompt": "once upon a time", "max_tokens": 12, "temperature": 0, **more}
    request = urllib.request.Request(
        sys.argv[1] + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


free = ask()
stop = free[4:6]
print(
    f"ends with the stop string: {ask(stop=[stop]).endswith(stop)}; before it: {ask(stop=[stop]) == free[: free.index(stop)]}"
)
