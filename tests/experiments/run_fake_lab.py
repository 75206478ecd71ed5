"""A process that runs a lab of drawn losses, to be killed: `python run_fake_lab.py LAB.yaml OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_training

from dovetail.experiments.design import read_design
from dovetail.experiments.lab import run_lab

if __name__ == "__main__":
    run_lab(read_design(sys.argv[1]), Path(sys.argv[2]), fake_training.train, workers=2)
