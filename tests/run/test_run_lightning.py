"""`ddpcheck run` on a script that trains with Lightning's `Trainer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_run import run_forked

pytestmark = [pytest.mark.slow]

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, _):
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist="--fixed" in sys.argv)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
saves = pl.callbacks.ModelCheckpoint(dirpath="saved", monitor="val_loss")
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[saves], **quiet)
trainer.fit(Net(), data, data)
"""


def test_a_metric_of_each_rank_by_which_a_checkpoint_is_chosen(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPT)
    found = run_forked("train.py", cwd=tmp_path)
    assert "DDP518 unreduced-metric" in found.stderr and "ModelCheckpoint decides by val_loss" in found.stderr
    line = 1 + SCRIPT.splitlines().index(next(one for one in SCRIPT.splitlines() if "self.log(" in one))
    assert f"at train.py:{line}" in found.stderr
    right = run_forked("train.py", "--fixed", cwd=tmp_path)
    assert right.returncode == 0 and "DDP518" not in right.stderr
