"""transformers 5.22.2: `transformers serve` samples only where the model's generation_config.json has do_sample.

transformers serve DIR --port 8000
python benchmarks/server_faults/transformers_temperature.py http://127.0.0.1:8000/v1 DIR
"""

import json
import sys
import urllib.request

answers = set()
for seed in range(8):
    body = {"model": sys.argv[2], "prompt": "once upon a time", "max_tokens": 8, "temperature": 2.0, "seed": seed}
    request = urllib.request.Request(
        sys.argv[1] + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answers.add(json.load(response)["choices"][0]["text"])
print(f"different answers at temperature 2 with 8 seeds: {len(answers)}")
