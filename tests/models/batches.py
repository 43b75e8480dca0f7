"""Global batches for the architectures: random inputs, and labels with the same count on every sample."""

from collections.abc import Callable
from typing import Any

import torch

Batch = dict[str, Any]
SAMPLES = 12  # in equal parts over 2, 3 and 4 ranks
LENGTH = 10
VOCABULARY = 96


def tokens(length: int = LENGTH, low: int = 5, high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(low, high, (SAMPLES, length))


def masked_labels(ids: torch.Tensor, count: int = 3) -> torch.Tensor:
    """`ids` at `count` places of every sample, -100 (no label) elsewhere."""
    chosen = torch.rand(ids.shape).argsort(1) < count
    return ids.masked_fill(~chosen, -100)


def texts(*, mask: bool = True, labels: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Callable[[int], Batch]:
    """Batches of ids, with an attention mask if wanted, and labels computed from the ids."""

    def batch(_step: int) -> Batch:
        ids = tokens()
        found = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})
        return found | ({"labels": labels(ids)} if labels else {})

    return batch


ids_only = texts()
masked_lm = texts(labels=masked_labels)
causal_lm = texts(mask=False, labels=torch.clone)
text_classes = texts(labels=lambda _ids: torch.randint(0, 3, (SAMPLES,)))
token_classes = texts(mask=False, labels=lambda ids: torch.randint(0, 3, ids.shape))
replaced_tokens = texts(mask=False, labels=lambda ids: torch.randint(0, 2, ids.shape))
sequence_to_sequence = texts(labels=lambda _ids: tokens(7))


def padded_causal_lm(_step: int) -> Batch:
    """Texts of different lengths, padded, as most people train."""
    ids = tokens()
    lengths = torch.arange(SAMPLES) % (LENGTH - 3) + 3
    padding = torch.arange(LENGTH) >= lengths[:, None]
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": ids.masked_fill(padding, -100)}


def answers(_step: int) -> Batch:
    places = torch.randint(0, LENGTH, (2, SAMPLES))
    return {"input_ids": tokens(), "start_positions": places[0], "end_positions": places[1]}


def images(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(SAMPLES, channels, size, size)


def image_classes(size: int = 32) -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size), "labels": torch.randint(0, 3, (SAMPLES,))}


def image_only(size: int = 32) -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size)}


def segmentation(size: int = 32, key: str = "labels") -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size), key: torch.randint(0, 3, (SAMPLES, size, size))}


def detection(size: int = 32) -> Callable[[int], Batch]:
    """Two objects in every image; the labels are a list with a dict for each."""

    def batch(_step: int) -> Batch:
        objects = [
            {"class_labels": torch.randint(0, 3, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2} for _ in range(SAMPLES)
        ]
        return {"pixel_values": images(size), "labels": objects}

    return batch


def mask_labels(size: int = 32) -> Callable[[int], Batch]:
    def batch(_step: int) -> Batch:
        masks = [(torch.rand(2, size, size) > 0.5).float() for _ in range(SAMPLES)]
        classes = [torch.randint(0, 3, (2,)) for _ in range(SAMPLES)]
        return {"pixel_values": images(size), "mask_labels": masks, "class_labels": classes}

    return batch


def shard_lists(batch: Batch, rank: int, world_size: int) -> Batch:
    """Like the default, and splits lists with an entry for each sample, too."""
    share = SAMPLES // world_size
    return {key: value[rank * share : (rank + 1) * share] for key, value in batch.items()}


def speech_ctc(samples: int = 400) -> Callable[[int], Batch]:
    return lambda _step: {"input_values": torch.randn(SAMPLES, samples), "labels": torch.randint(1, 30, (SAMPLES, 3))}


def spectrogram(frames: int, bins: int, key: str = "input_features") -> Callable[[int], Batch]:
    """Bins in the last dimension, as AST and Speech2Text read it."""
    return lambda _step: {key: torch.randn(SAMPLES, frames, bins), "labels": torch.randint(5, 30, (SAMPLES, 5))}


def raw_audio(samples: int, *, channels: bool = False, labels: bool = False) -> Callable[[int], Batch]:
    shape = (SAMPLES, 1, samples) if channels else (SAMPLES, samples)
    return lambda _step: {"input_values": torch.randn(shape)} | ({"labels": tokens(6)} if labels else {})


def whisper(frames: int, bins: int) -> Callable[[int], Batch]:
    labels = (5, 90, (SAMPLES, 6))
    return lambda _step: {"input_features": torch.randn(SAMPLES, bins, frames), "labels": torch.randint(*labels)}


def audio_classes(frames: int, bins: int) -> Callable[[int], Batch]:
    labels = (0, 3, (SAMPLES,))
    return lambda _step: {"input_values": torch.randn(SAMPLES, frames, bins), "labels": torch.randint(*labels)}


def image_and_text(size: int = 32, *, labels: bool = False, **more: bool) -> Callable[[int], Batch]:
    def batch(_step: int) -> Batch:
        ids = tokens()
        found: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images(size), **more}
        return {**found, "labels": ids.clone()} if labels else found

    return batch


def image_question(size: int = 32, classes: int = 3) -> Callable[[int], Batch]:
    return lambda _step: {"input_ids": tokens(), "pixel_values": images(size), "labels": torch.rand(SAMPLES, classes)}


def image_tokens(image_token: int, count: int, size: int = 32) -> Callable[[int], Batch]:
    """A text whose first `count` tokens stand for the image."""

    def batch(_step: int) -> Batch:
        ids = tokens(LENGTH + count)
        labels = ids.clone()
        ids[:, :count] = image_token
        labels[:, :count] = -100
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": images(size), "labels": labels}

    return batch


def regions(_step: int) -> Batch:
    ids = tokens()
    return {
        "input_ids": ids,
        "visual_feats": torch.randn(SAMPLES, 4, 20),
        "visual_pos": torch.rand(SAMPLES, 4, 4),
        "labels": torch.randint(0, 3, (SAMPLES,)),
    }


def series(context: int = 24, prediction: int = 4, lags: int = 4) -> Callable[[int], Batch]:
    past = context + lags
    return lambda _step: {
        "past_values": torch.randn(SAMPLES, past).cumsum(1),
        "past_time_features": torch.randn(SAMPLES, past, 1),
        "past_observed_mask": torch.ones(SAMPLES, past),
        "future_values": torch.randn(SAMPLES, prediction),
        "future_time_features": torch.randn(SAMPLES, prediction, 1),
    }


def channels(context: int = 24, prediction: int = 4, count: int = 2) -> Callable[[int], Batch]:
    return lambda _step: {
        "past_values": torch.randn(SAMPLES, context, count),
        "future_values": torch.randn(SAMPLES, prediction, count),
    }


def decisions(_step: int) -> Batch:
    widths = {"states": 4, "actions": 2, "rewards": 1, "returns_to_go": 1}
    drawn = {key: torch.randn(SAMPLES, 5, width) for key, width in widths.items()}
    return {**drawn, "timesteps": torch.arange(5).repeat(SAMPLES, 1), "attention_mask": torch.ones(SAMPLES, 5)}
