"""`tagging.py` with ddpcheck's callback, and nothing else changed.

    torchrun --nproc-per-node 2 examples/transformers/tagging_checked.py

ddpcheck reports DDP102 (non-contributing-parameter): the pooler of `tagging.py`, in the first step.
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from ddpcheck.integrations.transformers import DDPCheckCallback

TEXT = [line[:16].ljust(16) for name in sorted(dir(str)) for line in (getattr(str, name).__doc__ or "").splitlines()]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=16,
            )
        )
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.bert(input_ids).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def collate(lines: list[str]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[min(ord(character), 127) for character in line] for line in lines]),
        "labels": torch.tensor([[int(character in "aeiou") for character in line] for line in lines]),
    }


def main() -> None:
    trainer = Trainer(
        model=Tagger(),
        args=TrainingArguments(
            output_dir="tagging",
            per_device_train_batch_size=8,
            ddp_find_unused_parameters=False,
            max_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
        ),
        train_dataset=TEXT,
        data_collator=collate,
        callbacks=[DDPCheckCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
