"""`ddpcheck run` on a script that trains with Lightning's `Trainer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_run import run_forked

SCRIPT = """
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
        loss = self.layer(batch[0]).square().mean()
        self.log("reduced", loss, sync_dist=True)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
saves = [pl.callbacks.ModelCheckpoint(dirpath=name, monitor=name) for name in ("reduced", "val_loss")]
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=saves, **quiet)
trainer.fit(Net(), data, data)
"""


@pytest.mark.slow
def test_a_metric_of_each_rank_by_which_a_checkpoint_is_chosen_and_none_that_is_reduced(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_forked("train.py", cwd=tmp_path)
    assert ended.stderr.count("DDP518 unreduced-metric") == 1, ended.stderr
    assert "ModelCheckpoint decides by val_loss" in ended.stderr and "decides by reduced" not in ended.stderr
    (line,) = [number for number, text in enumerate(SCRIPT.splitlines(), 1) if '"val_loss", loss)' in text]
    assert f"at train.py:{line}" in ended.stderr
