"""Formats in which models write tool calls, one per file. A format declares the markers of the chat templates that use it, and
how calls are found in text."""
