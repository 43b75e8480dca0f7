"""The script of train.py and a callback: `python examples/lightning/train_checked.py` stops in the first step.

It says which parameters take no part, and the line that cuts the path of those that are used.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddpcheck.integrations.lightning import DDPCheckCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.reconstruct = nn.Linear(16, 2)  # left over from pretraining
        self.head = nn.Linear(16, 2)

    def forward(self, points):
        features = self.encoder(points)
        return self.head(features.detach())  # left over from a linear probe

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = cross_entropy(self(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def samples():
    """Points of the plane, and whether they lie inside of a circle."""
    points = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(points, (points.norm(dim=1) < 1.0).long()), batch_size=32)


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy="ddp",
        devices=2,
        callbacks=[DDPCheckCallback()],
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), samples())
