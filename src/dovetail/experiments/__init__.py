"""Comparisons of architectures: labs of paired runs, verdicts by confidence sequences, scaling laws."""
