"""A program that imports torch and ends."""

import torch  # noqa: F401
