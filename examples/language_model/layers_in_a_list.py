"""The language model with its blocks in a Python list instead of a `ModuleList`.

They take part in every step, but `parameters()` does not know them: DDP does not synchronise them and the optimizer
does not move them. ddpcheck reports DDP106 (unregistered-parameter).
"""

from __future__ import annotations

from typing import Any

from language_training import DEPTH, Block, LanguageModel, batch, loss

__all__ = ["batch", "loss", "model"]


class ListOfBlocks(LanguageModel):
    blocks: Any

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.blocks = [Block() for _ in range(DEPTH)]


def model() -> ListOfBlocks:
    return ListOfBlocks()
