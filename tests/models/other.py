"""Architectures for sound, for several modalities at once, for time series and control."""

from __future__ import annotations

import torch

from tests.models import batches as b
from tests.models.architecture import (
    AUDIO,
    DECODER,
    GPT2,
    IMAGE,
    NO_LAYER_DROP,
    PLAIN_SPEECH,
    SERIES,
    SEVERAL,
    SPEECH,
    TEXT,
    TIME,
    TWO_STACKS,
    Nested,
    on_output,
    reconstruction,
)
from tests.models.architecture import Architecture as A

ROWS: dict[str, A] = {
    "wav2vec2": A(
        *(AUDIO, "Wav2Vec2, CTC", "Wav2Vec2ForCTC", b.speech_ctc()),
        PLAIN_SPEECH,
        expected={"DDP305": "its CTC loss is a sum (ctc_loss_reduction)"},
    ),
    "wav2vec2_layerdrop": A(
        *(AUDIO, "Wav2Vec2, CTC (drops layers)", "Wav2Vec2ForCTC", b.speech_ctc()),
        {**SPEECH, "layerdrop": 0.3, "mask_time_prob": 0.0},
        expected={"DDP104": "layers that a rank skips at random; its CTC loss is also a sum"},
    ),
    "hubert": A(
        *(AUDIO, "HuBERT, CTC", "HubertForCTC", b.speech_ctc()),
        PLAIN_SPEECH,
        expected={"DDP305": "its CTC loss is a sum (ctc_loss_reduction)"},
    ),
    "hubert_layerdrop": A(
        *(AUDIO, "HuBERT, CTC (drops layers)", "HubertForCTC", b.speech_ctc()),
        {**SPEECH, "layerdrop": 0.3, "mask_time_prob": 0.0},
        expected={"DDP104": "layers that a rank skips at random; its CTC loss is also a sum"},
    ),
    "wavlm": A(AUDIO, "WavLM, CTC", "WavLMForCTC", b.speech_ctc(), PLAIN_SPEECH),
    "sew": A(AUDIO, "SEW, CTC", "SEWForCTC", b.speech_ctc(), {**PLAIN_SPEECH, "squeeze_factor": 2}),
    "data2vec_audio": A(
        AUDIO, "Data2Vec, CTC", "Data2VecAudioForCTC", b.speech_ctc(), {**PLAIN_SPEECH, "ctc_loss_reduction": "mean"}
    ),
    "moonshine": A(
        *(AUDIO, "Moonshine", "MoonshineForConditionalGeneration", b.raw_audio(2000, labels=True)),
        {"vocab_size": b.VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
        | {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2}
        | {"decoder_num_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
    ),
    "dac": A(
        *(AUDIO, "DAC, codec with vector quantisers", "DacModel", b.raw_audio(128, channels=True)),
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "decoder_hidden_size": 16, "n_codebooks": 2}
        | {"codebook_size": 16, "codebook_dim": 4, "hidden_size": 32},
        loss=reconstruction,
        expected={"DDP304": "quantiser dropout, which applies to the first half of any batch"},
    ),
    "whisper": A(
        *(AUDIO, "Whisper", "WhisperForConditionalGeneration", b.whisper(20, 8)),
        {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
    ),
    "whisper_layerdrop": A(
        *(AUDIO, "Whisper (drops layers)", "WhisperForConditionalGeneration", b.whisper(20, 8)),
        {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
        | {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
        expected={"DDP104": "layers that a rank skips at random"},
    ),
    "speech2text": A(
        *(AUDIO, "Speech2Text", "Speech2TextForConditionalGeneration", b.spectrogram(20, 8)),
        {**TWO_STACKS, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16}
        | {"max_source_positions": 20, "max_target_positions": 16},
    ),
    "ast": A(
        *(AUDIO, "Audio spectrogram transformer", "ASTForAudioClassification", b.audio_classes(24, 16)),
        {**IMAGE, "max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8} | {"time_stride": 8},
    ),
    "clip": A(
        *(SEVERAL, "CLIP, contrastive loss", "CLIPModel", b.image_and_text(return_loss=True)),
        {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE, "projection_dim": 16},
        expected={"DDP304": "negatives from the rank's own samples"},
    ),
    "siglip": A(
        *(SEVERAL, "SigLIP, sigmoid loss", "SiglipModel", b.image_and_text(return_loss=True)),
        {"text_config": TEXT, "vision_config": IMAGE},
        expected={"DDP304": "negatives from the rank's own samples"},
    ),
    "blip": A(
        *(SEVERAL, "BLIP, captions", "BlipForConditionalGeneration", b.image_and_text(labels=True)),
        {"text_config": {**TEXT, "encoder_hidden_size": 32, "bos_token_id": 1, "pad_token_id": 0}}
        | {"vision_config": IMAGE},
    ),
    "git": A(
        *(SEVERAL, "GIT, captions", "GitForCausalLM", b.image_and_text(labels=True)),
        {**TEXT, "vision_config": IMAGE, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "vilt": A(
        *(SEVERAL, "ViLT, questions on images", "ViltForQuestionAnswering", b.image_question()),
        {**TEXT, **IMAGE, "max_image_length": 16},
    ),
    "lxmert": A(
        *(SEVERAL, "LXMERT, questions on images", "LxmertForQuestionAnswering", b.regions),
        {**TEXT, "num_qa_labels": 3, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 20},
        expected={"DDP102": "the last visual layer, which only the bare model returns"}
        | {"DDP107": "token types: index 0 is the padding of their embedding"},
    ),
    "llava": A(
        *(SEVERAL, "LLaVA", "LlavaForConditionalGeneration", b.image_tokens(4, 16)),
        {"text_config": Nested("LlamaConfig", DECODER), "vision_config": Nested("CLIPVisionConfig", IMAGE)}
        | {"image_token_index": 4, "image_seq_length": 16, "vision_feature_layer": -1},
        expected={"DDP102": "the last norm of the vision tower"},
    ),
    "paligemma": A(
        *(
            SEVERAL,
            "PaliGemma",
            "PaliGemmaForConditionalGeneration",
            lambda step: {**(x := b.image_tokens(4, 16)(step)), "token_type_ids": torch.ones_like(x["input_ids"])},
        ),
        {"text_config": Nested("GemmaConfig", {**DECODER, "head_dim": 16})}
        | {"vision_config": Nested("SiglipVisionConfig", {**IMAGE, "projection_dim": 32, "vision_use_head": False})}
        | {"image_token_id": 4, "image_token_index": 4, "projection_dim": 32},
    ),
    "vision_text": A(
        *(SEVERAL, "ViT and GPT-2, captions", "VisionEncoderDecoderModel"),
        lambda step: {"pixel_values": b.images(), "labels": b.tokens(6)},
        {"encoder": {"model_type": "vit", **IMAGE}, "decoder_start_token_id": 1, "pad_token_id": 0}
        | {"decoder": {**GPT2, "model_type": "gpt2", "is_decoder": True, "add_cross_attention": True}},
        expected={"DDP102": "the pooler of the vision encoder"},
    ),
    "time_series": A(
        *(TIME, "Time series transformer (drops layers)", "TimeSeriesTransformerForPrediction", b.series()),
        SERIES,
        expected={"DDP104": "layers that a rank skips at random"},
    ),
    "informer": A(
        *(TIME, "Informer", "InformerForPrediction", b.series()),
        {**SERIES, **NO_LAYER_DROP},
        expected={"DDP304": "BatchNorm"},
    ),
    "autoformer": A(
        *(TIME, "Autoformer", "AutoformerForPrediction", b.series()),
        {**SERIES, **NO_LAYER_DROP, "moving_average": 5, "label_length": 4},
        expected={"DDP304": "delays are chosen by a mean over the batch"},
    ),
    "patchtst": A(
        *(TIME, "PatchTST", "PatchTSTForPrediction", b.channels()),
        {"num_input_channels": 2, "context_length": 24, "prediction_length": 4, "patch_length": 4}
        | {"patch_stride": 4, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32},
        expected={"DDP304": "BatchNorm"},
    ),
    "patchtsmixer": A(
        *(TIME, "PatchTSMixer", "PatchTSMixerForPrediction", b.channels()),
        {"num_input_channels": 2, "context_length": 24, "prediction_length": 4, "patch_length": 4}
        | {"patch_stride": 4, "d_model": 8, "num_layers": 2, "dropout": 0.1},
    ),
    "decision": A(
        *(TIME, "Decision transformer", "DecisionTransformerModel", b.decisions),
        {"state_dim": 4, "act_dim": 2, "hidden_size": 32, "max_ep_len": 16, "n_layer": 2, "n_head": 2}
        | {"n_positions": 64, "vocab_size": 1},
        loss=on_output("action_preds"),
        expected={"DDP101": "token embeddings of the GPT-2 in it"}
        | {"DDP102": "the heads for states and returns, which this loss does not read"},
    ),
}
