"""The architectures: each a class of `transformers`, a tiny configuration and a batch.

`ddpcheck report tests.models.catalogue:bert` checks one of them: every key of `CATALOGUE` is an attribute of this module.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpcheck import Recipe
from tests.models import batches as b

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations only: nothing is ever fetched

TEXT = {
    "vocab_size": b.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}
TWO_STACKS = {
    "vocab_size": b.VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": b.VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
PLAIN_SPEECH = {**SPEECH, "layerdrop": 0.0, "mask_time_prob": 0.0}
SERIES = {
    "prediction_length": 4,
    "context_length": 24,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


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
        options: Of its configuration.
        batch: Its global batches.
        expected: Codes that are true of it, each with what the finding is about, in a few words.
        why: What makes them true.
        config: Class of the configuration, where it does not follow from `cls`.
        loss: Of model and batch; the model's own by default.
        shard: Where the batch is more than tensors.
        needs: Modules that must be there.
    """

    family: str
    title: str
    cls: str
    options: dict[str, Any]
    batch: Callable[[int], b.Batch]
    expected: tuple[str, ...] = ()
    why: str = ""
    config: str = ""
    loss: Callable[[nn.Module, b.Batch], Any] = None  # type: ignore[assignment]
    shard: Callable[[b.Batch, int, int], b.Batch] | None = None
    needs: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """Make the model with random weights, in train mode."""
        cls = getattr(importlib.import_module("transformers"), self.cls)
        config = Nested(self.config or cls.config_class.__name__, self.options).build()
        module: nn.Module = cls(config)
        return module.train()

    def recipe(self) -> Recipe:
        """As ddpcheck wants it."""
        return Recipe(model=self.build, batch=self.batch, loss=self.loss or own_loss, shard=self.shard)


def own_loss(model: nn.Module, batch: b.Batch) -> torch.Tensor:
    """What the model computes from the labels in the batch."""
    loss: torch.Tensor = model(**batch).loss
    return loss.mean()


def last_state(model: nn.Module, batch: b.Batch) -> torch.Tensor:
    """A stand-in for a head of one's own on the last hidden state."""
    state: torch.Tensor = model(**batch).last_hidden_state
    return state.square().mean()


def on_output(name: str) -> Callable[[nn.Module, b.Batch], torch.Tensor]:
    """The mean square of one output."""

    def loss(model: nn.Module, batch: b.Batch) -> torch.Tensor:
        value: torch.Tensor = getattr(model(**batch), name)
        return value.square().mean()

    return loss


A = Architecture
ENCODER, DECODER_ONLY, SEQ2SEQ = "Encoders", "Decoders", "Encoder-decoders"
VISION, AUDIO, SEVERAL, RECURRENT = "Vision", "Audio", "Several modalities", "State space and recurrent"
MIXTURE, TIME = "Mixtures of experts", "Time series and control"

CATALOGUE: dict[str, Architecture] = {
    "bert": A(ENCODER, "BERT, masked language model", "BertForMaskedLM", TEXT, b.masked_lm),
    "bert_classes": A(ENCODER, "BERT, classes of texts", "BertForSequenceClassification", {**TEXT, "num_labels": 3}, b.text_classes),
    "bert_bare": A(ENCODER, "BERT, a head of one's own on the last hidden state", "BertModel", TEXT, b.ids_only, loss=last_state),
    "roberta": A(ENCODER, "RoBERTa, masked language model", "RobertaForMaskedLM", TEXT, b.masked_lm),
    "electra": A(ENCODER, "ELECTRA, replaced tokens", "ElectraForPreTraining", {**TEXT, "embedding_size": 16}, b.replaced_tokens),
    "deberta": A(ENCODER, "DeBERTa, classes of tokens", "DebertaForTokenClassification", {**TEXT, "num_labels": 3, "relative_attention": True, "pos_att_type": "c2p|p2c"}, b.token_classes),
    "deberta_v2": A(ENCODER, "DeBERTa v2, masked language model", "DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}, b.masked_lm),
    "albert": A(ENCODER, "ALBERT, masked language model", "AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, b.masked_lm),
    "distilbert": A(ENCODER, "DistilBERT, questions", "DistilBertForQuestionAnswering", {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}, b.answers),
    "modernbert": A(ENCODER, "ModernBERT, masked language model", "ModernBertForMaskedLM", {**TEXT, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}, b.masked_lm),
    "mpnet": A(ENCODER, "MPNet, masked language model", "MPNetForMaskedLM", TEXT, b.masked_lm),
    "fnet": A(ENCODER, "FNet, masked language model", "FNetForMaskedLM", TEXT, lambda step: {k: v for k, v in b.masked_lm(step).items() if k != "attention_mask"}),
    "xlnet": A(ENCODER, "XLNet, language model", "XLNetLMHeadModel", {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}, b.causal_lm),
    "longformer": A(ENCODER, "Longformer, masked language model", "LongformerForMaskedLM", {**TEXT, "attention_window": 4}, b.masked_lm),
    "bigbird": A(ENCODER, "BigBird, masked language model", "BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}, b.masked_lm),
    "funnel": A(ENCODER, "Funnel transformer, masked language model", "FunnelForMaskedLM", {"vocab_size": 96, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "num_decoder_layers": 1}, b.masked_lm),
    "nystromformer": A(ENCODER, "Nystromformer, masked language model", "NystromformerForMaskedLM", {**TEXT, "num_landmarks": 5, "segment_means_seq_len": 10}, b.masked_lm),
    "gpt2": A(DECODER_ONLY, "GPT-2", "GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "gpt2_padded": A(DECODER_ONLY, "GPT-2 on padded texts of different lengths", "GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, b.padded_causal_lm),
    "gpt_neo": A(DECODER_ONLY, "GPT-Neo", "GPTNeoForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 2, "window_size": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "gptj": A(DECODER_ONLY, "GPT-J", "GPTJForCausalLM", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "gpt_neox": A(DECODER_ONLY, "GPT-NeoX", "GPTNeoXForCausalLM", {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "llama": A(DECODER_ONLY, "Llama", "LlamaForCausalLM", DECODER, b.causal_lm),
    "mistral": A(DECODER_ONLY, "Mistral", "MistralForCausalLM", {**DECODER, "sliding_window": 4}, b.causal_lm),
    "qwen2": A(DECODER_ONLY, "Qwen2", "Qwen2ForCausalLM", DECODER, b.causal_lm),
    "qwen3": A(DECODER_ONLY, "Qwen3", "Qwen3ForCausalLM", {**DECODER, "head_dim": 16}, b.causal_lm),
    "gemma": A(DECODER_ONLY, "Gemma", "GemmaForCausalLM", {**DECODER, "head_dim": 16}, b.causal_lm),
    "gemma2": A(DECODER_ONLY, "Gemma 2", "Gemma2ForCausalLM", {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16}, b.causal_lm),
    "gemma3": A(DECODER_ONLY, "Gemma 3", "Gemma3ForCausalLM", {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}, b.causal_lm, config="Gemma3TextConfig"),
    "phi": A(DECODER_ONLY, "Phi", "PhiForCausalLM", {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "phi3": A(DECODER_ONLY, "Phi-3", "Phi3ForCausalLM", DECODER, b.causal_lm),
    "falcon": A(DECODER_ONLY, "Falcon", "FalconForCausalLM", {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "opt": A(DECODER_ONLY, "OPT", "OPTForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0}, b.causal_lm),
    "bloom": A(DECODER_ONLY, "BLOOM", "BloomForCausalLM", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "mpt": A(DECODER_ONLY, "MPT", "MptForCausalLM", {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "expansion_ratio": 2}, b.causal_lm),
    "stablelm": A(DECODER_ONLY, "StableLM", "StableLmForCausalLM", DECODER, b.causal_lm),
    "cohere": A(DECODER_ONLY, "Command R", "CohereForCausalLM", DECODER, b.causal_lm),
    "olmo2": A(DECODER_ONLY, "OLMo 2", "Olmo2ForCausalLM", DECODER, b.causal_lm),
    "granite": A(DECODER_ONLY, "Granite", "GraniteForCausalLM", DECODER, b.causal_lm),
    "t5": A(SEQ2SEQ, "T5", "T5ForConditionalGeneration", T5, b.sequence_to_sequence),
    "umt5": A(SEQ2SEQ, "UMT5", "UMT5ForConditionalGeneration", T5, b.sequence_to_sequence),
    "bart": A(SEQ2SEQ, "BART", "BartForConditionalGeneration", TWO_STACKS, b.sequence_to_sequence),
    "marian": A(SEQ2SEQ, "Marian", "MarianMTModel", TWO_STACKS, b.sequence_to_sequence),
    "pegasus": A(SEQ2SEQ, "Pegasus", "PegasusForConditionalGeneration", TWO_STACKS, b.sequence_to_sequence),
    "mbart": A(SEQ2SEQ, "mBART", "MBartForConditionalGeneration", TWO_STACKS, b.sequence_to_sequence),
    "m2m100": A(SEQ2SEQ, "M2M-100 (drops layers)", "M2M100ForConditionalGeneration", {**TWO_STACKS, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}, b.sequence_to_sequence),
    "led": A(SEQ2SEQ, "LED", "LEDForConditionalGeneration", {**{k: v for k, v in TWO_STACKS.items() if k != "max_position_embeddings"}, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, b.sequence_to_sequence),
    "prophetnet": A(SEQ2SEQ, "ProphetNet", "ProphetNetForConditionalGeneration", {"vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 64, "num_encoder_layers": 2, "num_encoder_attention_heads": 2, "decoder_ffn_dim": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 2, "max_position_embeddings": 64, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16, "decoder_start_token_id": 2}, b.sequence_to_sequence),
    "vit": A(VISION, "ViT", "ViTForImageClassification", IMAGE, b.image_classes()),
    "deit": A(VISION, "DeiT", "DeiTForImageClassification", IMAGE, b.image_classes()),
    "beit": A(VISION, "BEiT", "BeitForImageClassification", {**IMAGE, "use_relative_position_bias": True}, b.image_classes()),
    "dinov2": A(VISION, "DINOv2", "Dinov2ForImageClassification", IMAGE, b.image_classes()),
    "swin": A(VISION, "Swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "num_labels": 3}, b.image_classes()),
    "vit_mae": A(VISION, "ViT, masked autoencoder", "ViTMAEForPreTraining", {**IMAGE, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 64}, b.image_only()),
    "convnext": A(VISION, "ConvNeXt", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32, "drop_path_rate": 0.1}, b.image_classes()),
    "convnextv2": A(VISION, "ConvNeXt V2", "ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32, "drop_path_rate": 0.1}, b.image_classes()),
    "resnet": A(VISION, "ResNet", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "layer_type": "basic"}, b.image_classes()),
    "regnet": A(VISION, "RegNet", "RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 3}, b.image_classes()),
    "mobilenet_v2": A(VISION, "MobileNetV2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4, "num_labels": 3}, b.image_classes()),
    "efficientnet": A(VISION, "EfficientNet", "EfficientNetForImageClassification", {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2], "num_block_repeats": [1, 2], "expand_ratios": [1, 6], "depthwise_padding": [], "num_labels": 3}, b.image_classes()),
    "levit": A(VISION, "LeViT", "LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "num_labels": 3}, b.image_classes(64)),
    "poolformer": A(VISION, "PoolFormer", "PoolFormerForImageClassification", {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "num_labels": 3}, b.image_classes()),
    "segformer": A(VISION, "SegFormer, segmentation", "SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3}, b.segmentation()),
    "dpt": A(VISION, "DPT, segmentation", "DPTForSemanticSegmentation", {**IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False, "add_projection": False}, b.segmentation()),
    "upernet": A(VISION, "UPerNet, segmentation", "UperNetForSemanticSegmentation", {"backbone_config": Nested("ConvNextConfig", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_stages": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}), "hidden_size": 8, "num_labels": 3, "auxiliary_channels": 8, "auxiliary_in_channels": 8, "pool_scales": [1, 2]}, b.segmentation(64)),
    "maskformer": A(VISION, "MaskFormer, segmentation", "MaskFormerForInstanceSegmentation", {"backbone_config": Nested("SwinConfig", {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"]}), "decoder_config": Nested("DetrConfig", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 4, "use_timm_backbone": False, "backbone_config": Nested("ResNetConfig", {"out_features": ["stage4"]})}), "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3}, b.mask_labels(64), shard=b.shard_lists, needs=("scipy",)),
    "detr": A(VISION, "DETR, detection", "DetrForObjectDetection", {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": Nested("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}), "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 4, "num_labels": 3}, b.detection(64), shard=b.shard_lists, needs=("scipy",)),
    "yolos": A(VISION, "YOLOS, detection", "YolosForObjectDetection", {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4}, b.detection(), shard=b.shard_lists, needs=("scipy",)),
    "wav2vec2": A(AUDIO, "Wav2Vec2, CTC", "Wav2Vec2ForCTC", PLAIN_SPEECH, b.speech_ctc()),
    "wav2vec2_layerdrop": A(AUDIO, "Wav2Vec2, CTC, as configured by default (drops layers, masks time)", "Wav2Vec2ForCTC", {**SPEECH, "mask_time_length": 2, "mask_time_prob": 0.3}, b.speech_ctc()),
    "hubert": A(AUDIO, "HuBERT, CTC", "HubertForCTC", PLAIN_SPEECH, b.speech_ctc()),
    "wavlm": A(AUDIO, "WavLM, CTC", "WavLMForCTC", PLAIN_SPEECH, b.speech_ctc()),
    "sew": A(AUDIO, "SEW, CTC", "SEWForCTC", {**PLAIN_SPEECH, "squeeze_factor": 2}, b.speech_ctc()),
    "whisper": A(AUDIO, "Whisper", "WhisperForConditionalGeneration", {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}, b.whisper(20, 8)),
    "speech2text": A(AUDIO, "Speech2Text", "Speech2TextForConditionalGeneration", {**TWO_STACKS, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "max_source_positions": 20, "max_target_positions": 16}, b.spectrogram(20, 8)),
    "ast": A(AUDIO, "Audio spectrogram transformer", "ASTForAudioClassification", {**IMAGE, "max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}, b.audio_classes(24, 16)),
    "clip": A(SEVERAL, "CLIP, contrastive loss", "CLIPModel", {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE, "projection_dim": 16}, b.image_and_text(return_loss=True)),
    "siglip": A(SEVERAL, "SigLIP, sigmoid loss", "SiglipModel", {"text_config": TEXT, "vision_config": IMAGE}, b.image_and_text(return_loss=True)),
    "blip": A(SEVERAL, "BLIP, captions", "BlipForConditionalGeneration", {"text_config": {**TEXT, "encoder_hidden_size": 32, "bos_token_id": 1, "pad_token_id": 0}, "vision_config": IMAGE}, b.image_and_text(labels=True)),
    "git": A(SEVERAL, "GIT, captions", "GitForCausalLM", {**TEXT, "vision_config": IMAGE, "bos_token_id": 1, "eos_token_id": 2}, b.image_and_text(labels=True)),
    "vilt": A(SEVERAL, "ViLT, questions on images", "ViltForQuestionAnswering", {**TEXT, **IMAGE, "max_image_length": 16}, b.image_question()),
    "lxmert": A(SEVERAL, "LXMERT, questions on images", "LxmertForQuestionAnswering", {**TEXT, "num_qa_labels": 3, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 20}, b.regions),
    "llava": A(SEVERAL, "LLaVA", "LlavaForConditionalGeneration", {"text_config": Nested("LlamaConfig", DECODER), "vision_config": Nested("CLIPVisionConfig", IMAGE), "image_token_index": 4, "image_seq_length": 16, "vision_feature_layer": -1}, b.image_tokens(4, 16)),
    "paligemma": A(SEVERAL, "PaliGemma", "PaliGemmaForConditionalGeneration", {"text_config": Nested("GemmaConfig", {**DECODER, "head_dim": 16}), "vision_config": Nested("SiglipVisionConfig", {**IMAGE, "projection_dim": 32, "vision_use_head": False}), "image_token_id": 4, "image_token_index": 4, "projection_dim": 32}, lambda step: {**(x := b.image_tokens(4, 16)(step)), "token_type_ids": torch.ones_like(x["input_ids"])}),
    "vision_text": A(SEVERAL, "ViT and GPT-2, captions", "VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **IMAGE}, "decoder": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "is_decoder": True, "add_cross_attention": True}, "decoder_start_token_id": 1, "pad_token_id": 0}, lambda step: {"pixel_values": b.images(), "labels": b.tokens(6)}),
    "mamba": A(RECURRENT, "Mamba", "MambaForCausalLM", {"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4}, b.causal_lm),
    "mamba2": A(RECURRENT, "Mamba-2", "Mamba2ForCausalLM", {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4, "bos_token_id": 1, "eos_token_id": 2}, b.causal_lm),
    "rwkv": A(RECURRENT, "RWKV", "RwkvForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 64, "context_length": 64}, b.causal_lm),
    "xlstm": A(RECURRENT, "xLSTM", "xLSTMForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_blocks": 2, "num_heads": 2, "chunk_size": 5, "mode": "train", "return_last_states": False}, b.causal_lm),
    "recurrentgemma": A(RECURRENT, "RecurrentGemma", "RecurrentGemmaForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "lru_width": 32, "attention_window_size": 4, "head_dim": 16}, b.causal_lm),
    "jamba": A(RECURRENT, "Jamba (Mamba, attention and experts)", "JambaForCausalLM", {**DECODER, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, b.causal_lm),
    "mixtral": A(MIXTURE, "Mixtral", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, b.causal_lm),
    "mixtral_balanced": A(MIXTURE, "Mixtral with its load-balancing loss", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}, b.causal_lm),
    "switch": A(MIXTURE, "Switch transformer", "SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}, b.sequence_to_sequence),
    "qwen2_moe": A(MIXTURE, "Qwen2-MoE", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 32}, b.causal_lm),
    "qwen3_moe": A(MIXTURE, "Qwen3-MoE", "Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16}, b.causal_lm),
    "olmoe": A(MIXTURE, "OLMoE", "OlmoeForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}, b.causal_lm),
    "gpt_oss": A(MIXTURE, "GPT-OSS", "GptOssForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4}, b.causal_lm),
    "deepseek_v3": A(MIXTURE, "DeepSeek-V3", "DeepseekV3ForCausalLM", {**DECODER, "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}, b.causal_lm),
    "time_series": A(TIME, "Time series transformer", "TimeSeriesTransformerForPrediction", SERIES, b.series()),
    "informer": A(TIME, "Informer", "InformerForPrediction", SERIES, b.series()),
    "autoformer": A(TIME, "Autoformer", "AutoformerForPrediction", {**SERIES, "moving_average": 5, "label_length": 4}, b.series()),
    "patchtst": A(TIME, "PatchTST", "PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 24, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}, b.channels()),
    "patchtsmixer": A(TIME, "PatchTSMixer", "PatchTSMixerForPrediction", {"num_input_channels": 2, "context_length": 24, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "d_model": 8, "num_layers": 2, "dropout": 0.1}, b.channels()),
    "decision": A(TIME, "Decision transformer", "DecisionTransformerModel", {"state_dim": 4, "act_dim": 2, "hidden_size": 32, "max_ep_len": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1}, b.decisions, loss=on_output("action_preds")),
}  # fmt: skip


def __getattr__(name: str) -> Recipe:
    if name in CATALOGUE:
        return CATALOGUE[name].recipe()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
