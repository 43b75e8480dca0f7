"""`masked_lm.py` with ddpcheck's callback, and nothing else changed.

    torchrun --nproc-per-node 2 examples/transformers/masked_lm_checked.py

ddpcheck reports DDP514 (accumulation-scale): the mean of means that `masked_lm.py` takes.
"""

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from ddpcheck.integrations.transformers import DDPCheckCallback

PAD, MASK, CONTEXT = 0, 1, 64
LINES = [line for name in sorted(dir(str)) for line in (getattr(str, name).__doc__ or "").splitlines() if line]
GENERATOR = torch.Generator().manual_seed(0)


def collate(lines: list[str]) -> dict[str, Tensor]:
    ids = [torch.tensor([min(ord(character), 127) for character in line[:CONTEXT]]) for line in lines]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    masked = (torch.rand(tokens.shape, generator=GENERATOR) < 0.3) & (tokens != PAD)
    masked[:, 0] = True
    return {
        "input_ids": tokens.where(~masked, torch.tensor(MASK)),
        "attention_mask": (tokens != PAD).long(),
        "labels": tokens.where(masked, torch.tensor(-100)),
    }


def main() -> None:
    trainer = Trainer(
        model=BertForMaskedLM(
            BertConfig(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=CONTEXT,
            )
        ),
        args=TrainingArguments(
            output_dir="masked_lm",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=10,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
        ),
        train_dataset=LINES,
        data_collator=collate,
        callbacks=[DDPCheckCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
