"""The settings of a script, which has values of its own in their place."""

from __future__ import annotations

import os

import torch

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE: torch.device = torch.device("cpu")
STEPS: int = 1
MODEL_SEED: int = 0
BATCH_SEEDS: list[int] = []
STEP_SEEDS: list[list[int]] = []
TOLERANCE: float = 0.0
TIMEOUT: int = 30
BACKEND: str = "gloo"
