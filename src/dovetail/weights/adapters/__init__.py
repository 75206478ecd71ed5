"""Adapters: small trained changes of a frozen model's linear leaves."""
