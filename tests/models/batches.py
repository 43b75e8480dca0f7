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


def masked_lm(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": masked_labels(ids)}


def causal_lm(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def padded_causal_lm(_step: int) -> Batch:
    """Texts of different lengths, padded, as most people train."""
    ids = tokens()
    lengths = torch.arange(SAMPLES) % (LENGTH - 3) + 3
    padding = torch.arange(LENGTH) >= lengths[:, None]
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": ids.masked_fill(padding, -100)}


def ids_only(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_classes(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 3, (SAMPLES,))}


def token_classes(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": torch.randint(0, 3, ids.shape)}


def replaced_tokens(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": torch.randint(0, 2, ids.shape)}


def answers(_step: int) -> Batch:
    places = torch.randint(0, LENGTH, (2, SAMPLES))
    return {"input_ids": tokens(), "start_positions": places[0], "end_positions": places[1]}


def sequence_to_sequence(_step: int) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": tokens(7)}


def images(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(SAMPLES, channels, size, size)


def image_classes(size: int = 32) -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size), "labels": torch.randint(0, 3, (SAMPLES,))}


def image_only(size: int = 32) -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size)}


def masked_patches(patches: int, size: int = 32) -> Callable[[int], Batch]:
    def batch(_step: int) -> Batch:
        hidden = torch.rand(SAMPLES, patches).argsort(1) < patches // 2
        return {"pixel_values": images(size), "bool_masked_pos": hidden}

    return batch


def segmentation(size: int = 32, key: str = "labels") -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size), key: torch.randint(0, 3, (SAMPLES, size, size))}


def depth(size: int = 32) -> Callable[[int], Batch]:
    return lambda _step: {"pixel_values": images(size), "labels": torch.rand(SAMPLES, size, size) + 0.1}


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
    return lambda _step: {
        "input_features": torch.randn(SAMPLES, bins, frames),
        "labels": torch.randint(5, 90, (SAMPLES, 6)),
    }


def audio_classes(frames: int, bins: int) -> Callable[[int], Batch]:
    return lambda _step: {
        "input_values": torch.randn(SAMPLES, frames, bins),
        "labels": torch.randint(0, 3, (SAMPLES,)),
    }


def image_and_text(size: int = 32, *, labels: bool = False, **more: bool) -> Callable[[int], Batch]:
    def batch(_step: int) -> Batch:
        ids = tokens()
        found: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images(size), **more}
        return {**found, "labels": ids.clone()} if labels else found

    return batch


def image_question(size: int = 32, classes: int = 3) -> Callable[[int], Batch]:
    def batch(_step: int) -> Batch:
        ids = tokens()
        return {"input_ids": ids, "pixel_values": images(size), "labels": torch.rand(SAMPLES, classes)}

    return batch


def image_tokens(image_token: int, count: int, size: int = 32) -> Callable[[int], Batch]:
    """A text whose first `count` tokens stand for the image."""

    def batch(_step: int) -> Batch:
        ids = tokens(LENGTH + count)
        labels = ids.clone()
        ids[:, :count] = image_token
        labels[:, :count] = -100
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": images(size),
            "labels": labels,
        }

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

    def batch(_step: int) -> Batch:
        return {
            "past_values": torch.randn(SAMPLES, past).cumsum(1),
            "past_time_features": torch.randn(SAMPLES, past, 1),
            "past_observed_mask": torch.ones(SAMPLES, past),
            "future_values": torch.randn(SAMPLES, prediction),
            "future_time_features": torch.randn(SAMPLES, prediction, 1),
        }

    return batch


def channels(context: int = 24, prediction: int = 4, count: int = 2) -> Callable[[int], Batch]:
    return lambda _step: {
        "past_values": torch.randn(SAMPLES, context, count),
        "future_values": torch.randn(SAMPLES, prediction, count),
    }


def decisions(_step: int) -> Batch:
    return {
        "states": torch.randn(SAMPLES, 5, 4),
        "actions": torch.randn(SAMPLES, 5, 2),
        "rewards": torch.randn(SAMPLES, 5, 1),
        "returns_to_go": torch.randn(SAMPLES, 5, 1),
        "timesteps": torch.arange(5).repeat(SAMPLES, 1),
        "attention_mask": torch.ones(SAMPLES, 5),
    }
