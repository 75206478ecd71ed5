"""Presets as data: one YAML file a model."""
