"""Laws on a running OpenAI-compatible server, by its URL alone."""
