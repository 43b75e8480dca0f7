"""What an architecture of the catalogue is: a class of `transformers`, a tiny configuration, a batch, and its truth."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpcheck import Recipe
from tests.models import batches as b
from tests.models.wraps import WRAPS

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations only: nothing is ever fetched

ENCODER, DECODER_ONLY, SEQ2SEQ = "Encoders", "Decoders", "Encoder-decoders"
VISION, AUDIO, SEVERAL, RECURRENT = "Vision", "Audio", "Several modalities", "State space and recurrent"
MIXTURE, TIME = "Mixtures of experts", "Time series and control"

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
TEXT = {**LAYERS, "vocab_size": b.VOCABULARY, "max_position_embeddings": 64}
DECODER = {**TEXT, **ENDS, "num_key_value_heads": 1, "pad_token_id": 0}
GPT2 = {"vocab_size": b.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **ENDS}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = {**LAYERS, "image_size": 32, "patch_size": 8, "num_labels": 3}
TWO_STACKS = (
    {"vocab_size": b.VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_ffn_dim": 64}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "pad_token_id": 0}
    | {**ENDS, "max_position_embeddings": 64, "decoder_start_token_id": 2}
)
T5 = {"vocab_size": b.VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2} | {
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
SPEECH = {**LAYERS, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)} | {
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
PLAIN_SPEECH = {**SPEECH, "layerdrop": 0.0, "mask_time_prob": 0.0}
SERIES = (
    {"prediction_length": 4, "context_length": 24, "lags_sequence": [1, 2, 4], "num_time_features": 1}
    | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
    | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
)

NO_LAYER_DROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


@dataclass(frozen=True)
class Nested:
    """A configuration inside a configuration."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Make the configuration."""
        transformers = importlib.import_module("transformers")
        options = {key: value.build() if isinstance(value, Nested) else value for key, value in self.options.items()}
        return getattr(transformers, self.kind)(**copy.deepcopy(options))


@dataclass(frozen=True)
class Architecture:
    """One architecture, how it is trained here, and what is true of it under DDP.

    Attributes:
        family: Heading in the table.
        title: What it is called there.
        cls: Class in `transformers`.
        batch: Its global batches.
        options: Of its configuration.
        expected: Codes that are true of it, each with what makes it true, in a few words (DDP105 counts as DDP104).
        config: Class of the configuration, where it does not follow from `cls`.
        loss: Of model and batch; the model's own by default.
        shard: Where the batch is more than tensors.
        needs: Modules that must be there.
        unlike: By wrap (`WRAPS`), or by wrap and ranks ("sharded on 4"), the codes that are true there in the place of
            `expected`.
    """

    family: str
    title: str
    cls: str
    batch: Callable[[int], b.Batch]
    options: dict[str, Any]
    expected: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    loss: Callable[[nn.Module, b.Batch], Any] = None  # type: ignore[assignment]
    shard: Callable[[b.Batch, int, int], b.Batch] | None = None
    needs: tuple[str, ...] = ()
    unlike: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def expected_in(self, wrap: str, world_size: int) -> Mapping[str, str]:
        """The codes that are true of it in the wrap of that name, or under plain DDP, on so many ranks."""
        return self.unlike.get(f"{wrap} on {world_size}", self.unlike.get(wrap, self.expected))

    def build(self) -> nn.Module:
        """Make the model with random weights, in train mode."""
        cls = getattr(importlib.import_module("transformers"), self.cls)
        config = Nested(self.config or cls.config_class.__name__, self.options).build()
        module: nn.Module = cls(config)
        return module.train()

    def recipe(self, wrap: str = "") -> Recipe:
        """As ddpcheck wants it, in the wrap of that name or in plain DDP."""
        loss = self.loss or own_loss
        return Recipe(model=self.build, batch=self.batch, loss=loss, shard=self.shard, wrap=WRAPS.get(wrap))


def own_loss(model: nn.Module, batch: b.Batch) -> torch.Tensor:
    """What the model computes from the labels in the batch."""
    loss: torch.Tensor = model(**batch).loss
    return loss.mean()


def last_state(model: nn.Module, batch: b.Batch) -> torch.Tensor:
    """A stand-in for a head of one's own on the last hidden state."""
    state: torch.Tensor = model(**batch).last_hidden_state
    return state.square().mean()


def reconstruction(model: nn.Module, batch: b.Batch) -> torch.Tensor:
    """The model's own loss and the distance of the audio that it makes from the one that it was given."""
    output = model(**batch)
    loss: torch.Tensor = output.loss.mean() + (output.audio_values - batch["input_values"]).square().mean()
    return loss


def on_output(name: str) -> Callable[[nn.Module, b.Batch], torch.Tensor]:
    """The mean square of one output."""

    def loss(model: nn.Module, batch: b.Batch) -> torch.Tensor:
        value: torch.Tensor = getattr(model(**batch), name)
        return value.square().mean()

    return loss
