"""A small server with one of our models behind it: completions with log-probs, in OpenAI's form or in llama.cpp's.

python server.py DIRECTORY openai|llama.cpp|strict [WRONG]      prints its port, then serves until it is ended

`strict` refuses fields it does not know; WRONG is a number the logits are multiplied with, as a wrong scale would.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch

from dovetail.hf.load import load
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout

MODEL, FORM = load(sys.argv[1]), sys.argv[2]
WRONG = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0


@torch.no_grad()
def completion(asked: dict[str, Any]) -> dict[str, Any]:
    tokens = torch.tensor([asked["prompt"]])
    logits = MODEL(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape)))[0, -1] * WRONG
    numbers, ids = logits.log_softmax(-1).topk(int(asked["logprobs"]))
    best = [(f"token_id:{i}", i, p) for i, p in zip(ids.tolist(), numbers.tolist(), strict=True)]
    if FORM == "llama.cpp":
        top = [{"id": i, "token": text, "logprob": p} for text, i, p in best]
        return {"content": [{**top[0], "top_logprobs": top}]}
    return {"tokens": [best[0][0]], "token_logprobs": [best[0][2]], "top_logprobs": [{text: p for text, _, p in best}]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer(404, {"error": "no such path"})
        elif FORM == "strict" and "return_tokens_as_token_ids" in asked:
            self.answer(400, {"error": "unknown field"})
        else:
            self.answer(200, {"choices": [{"text": "", "logprobs": completion(asked)}]})

    def answer(self, code: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
