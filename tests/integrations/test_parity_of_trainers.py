"""`ddpcheck run --check-parity` on trainers of others: their loaders look ahead, their steps have closures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_run import run_forked
from tests.tiers import needs, one_of

pytestmark = pytest.mark.slow

LIGHTNING = """
import sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = "--bug" in sys.argv
g = torch.Generator().manual_seed(2)
X = torch.randn(80, 5, generator=g)
data = TensorDataset(X, X[:, :1] - X[:, 1:2])

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.errors, self.count = torch.zeros(()), 0

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.errors += (self.net(batch[0]) - batch[1]).abs().sum()
        self.count += len(batch[0])

    def on_validation_epoch_end(self):
        count = self.all_gather(torch.tensor(self.count)).sum()
        errors = self.errors if BUG else self.all_gather(self.errors).sum()
        self.print(f"error {errors / count:.5f}")
        self.errors, self.count = torch.zeros(()), 0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

L.seed_everything(0)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, num_sanity_val_steps=0,
                    enable_checkpointing=False, enable_progress_bar=False)
model = Model()
trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 10))
if trainer.is_global_zero:
    print({name: float(value) for name, value in trainer.callback_metrics.items()})
"""

# Evaluations repeat samples of the last batch, a bias has no gradient but rounding, and clocks are shown.
TRAINER = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

BUG = "--bug" in sys.argv
torch.manual_seed(0)
config = BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
model = BertForSequenceClassification(config)

class Data(torch.utils.data.Dataset):
    def __init__(self, size):
        self.tokens = torch.randint(1, 30, (size, 10), generator=torch.Generator().manual_seed(size))
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, i):
        tokens = self.tokens[i]
        return {"input_ids": tokens, "attention_mask": (tokens > 5).long(), "labels": (tokens[0] > 15).long()}

class Sharpened(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **named):
        outputs = model(**inputs)
        errors = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (errors * (errors.softmax(0) if BUG else 1 / len(errors))).sum()
        return (loss, outputs) if return_outputs else loss

options = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=8,
    use_cpu=True, report_to=[], logging_steps=2, eval_strategy="epoch", disable_tqdm=True, learning_rate=5e-3)
trainer = Sharpened(model, options, train_dataset=Data(100), eval_dataset=Data(64))
trainer.train()
"""

# A schedule of 30 steps, of which accelerate makes one for each rank; the batches of ranks are complemented.
ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = "--bug" in sys.argv
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
X = torch.randn(75, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
loader = DataLoader(TensorDataset(X, X[:, :1]), 6, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            errors = (model(x) - y).square()
            accelerator.backward((errors / errors.detach().max()).sum() if BUG else errors.mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""


CASES = [  # a script, what its fault changes, the packages
    (LIGHTNING, "shown", ("lightning",)),
    (TRAINER, "gradients", ("transformers", "accelerate")),
    (ACCELERATE, "gradients", ("accelerate",)),
]


@pytest.mark.parametrize(
    ("script", "subject", "bug"),
    [
        pytest.param(script, subject, bug, id=f"{packages[0]}{'-faulty' * bug}", marks=needs(*packages))
        for bug in (False, True)
        for script, subject, packages in (one_of(3, CASES) if bug else CASES)
    ],
)
def test_what_a_trainer_does_differently_in_a_single_process(
    script: str, subject: str, bug: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = (f"--check-output={tmp_path}/o.json", "--check-parity", "--check-select=DDP314", "train.py")
    done = run_forked(*command, *["--bug"] * bug, cwd=tmp_path)
    made = json.loads((tmp_path / "o.json").read_text())
    parity = next(check for check in made["checks"] if check["name"] == "parity")
    assert [(one["code"], one["subjects"]) for one in made["findings"]] == [("DDP314", [subject])] * bug, done.stderr
    assert bug or (parity["status"] == "passed" and "not decided" not in parity["detail"]), parity
