"""The training loop, its plan and its objectives."""
