"""The plugin for vLLM: our modules run inside it, with its KV cache, attention, scheduler and server (extra `vllm`)."""
