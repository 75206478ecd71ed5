"""Generate greedily with vLLM, in vLLM's own environment: python run_vllm.py REQUEST ANSWER

The request is a JSON list of {"model", "prompts", "tokens", "ranks"}. The answer has, per model, the tokens of each prompt,
their log-probs, the number of prompt tokens that the prefix cache held when all prompts were asked for a second time, and the
tokens per block: BLOCK, or more where vLLM makes blocks as large as a recurrent state. Prompts are computed in chunks of CHUNK
tokens, beside those that decode.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_CI_ENV": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
CHUNK, BLOCK = 48, 32  # tokens; the CPU backend has no smaller blocks


def generate(model: str, prompts: list[list[int]], tokens: int, ranks: int) -> dict:
    import vllm

    limits = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True}
    limits |= {"block_size": BLOCK, "tensor_parallel_size": ranks}
    llm = vllm.LLM(model, dtype="float32", enforce_eager=True, enable_prefix_caching=True, skip_tokenizer_init=True, **limits)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    first, second = (llm.generate(asked, sampling, use_tqdm=False) for _ in range(2))
    answer = {
        "tokens": [[list(one.outputs[0].token_ids) for one in found] for found in (first, second)],
        "logprobs": [
            [row[token].logprob for row, token in zip(one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)]
            for one in first
        ],
        "cached": [one.num_cached_tokens for one in second],
        "block": llm.llm_engine.vllm_config.cache_config.block_size,
    }
    llm.llm_engine.engine_core.shutdown()
    return answer


def main(request: str, answer: str) -> None:
    answers = []
    for one in json.loads(Path(request).read_text()):
        try:
            answers.append(generate(**one))
        except Exception:
            answers.append({"error": traceback.format_exc()})
        gc.collect()
        Path(answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
