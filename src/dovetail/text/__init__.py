"""Tokenizers, chat templates and streamed text."""
