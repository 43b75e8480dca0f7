"""Architectures for text: encoders, decoders, both, state space and recurrent ones, mixtures of experts."""

from __future__ import annotations

from tests.models import batches as b
from tests.models.architecture import (
    DECODER,
    DECODER_ONLY,
    ENCODER,
    ENDS,
    EXPERTS,
    GPT2,
    MIXTURE,
    RECURRENT,
    SEQ2SEQ,
    T5,
    TEXT,
    TWO_STACKS,
    last_state,
)
from tests.models.architecture import Architecture as A

ROWS: dict[str, A] = {
    "bert": A(ENCODER, "BERT, masked language model", "BertForMaskedLM", b.masked_lm, TEXT),
    "bert_classes": A(
        ENCODER, "BERT, classes of texts", "BertForSequenceClassification", b.text_classes, {**TEXT, "num_labels": 3}
    ),
    "bert_bare": A(
        *(ENCODER, "BERT, a custom head on the last hidden state", "BertModel", b.ids_only),
        TEXT,
        loss=last_state,
        expected={"DDP102": "the pooler, which this loss does not read"},
    ),
    "roberta": A(ENCODER, "RoBERTa, masked language model", "RobertaForMaskedLM", b.masked_lm, TEXT),
    "squeezebert": A(
        *(ENCODER, "SqueezeBERT", "SqueezeBertForMaskedLM", b.masked_lm),
        {**TEXT, "embedding_size": 32},
        expected={"DDP102": "the pooler, which masked language modelling does not use"},
        unlike={
            "sharded": {"DDP102": "the pooler, as under DDP"}
            | {"DDP501": "its encoder calls `layer.forward(x)`, past the hooks that gather the layer's parameters"}
        },
    ),
    "ibert": A(
        *(ENCODER, "I-BERT", "IBertForMaskedLM", b.masked_lm),
        TEXT,
        expected={"DDP215": "ranges of activations, which each rank measures on its own samples"},
        unlike={"sharded": {"DDP214": "the same ranges, which nothing broadcasts: they stay different"}},
    ),
    "electra": A(
        ENCODER, "ELECTRA, replaced tokens", "ElectraForPreTraining", b.replaced_tokens, {**TEXT, "embedding_size": 16}
    ),
    "deberta": A(
        *(ENCODER, "DeBERTa, classes of tokens", "DebertaForTokenClassification", b.token_classes),
        {**TEXT, "num_labels": 3, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    ),
    "deberta_v2": A(
        *(ENCODER, "DeBERTa v2, masked language model", "DebertaV2ForMaskedLM", b.masked_lm),
        {**TEXT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]}
        | {"norm_rel_ebd": "layer_norm"},
    ),
    "albert": A(
        ENCODER, "ALBERT, masked language model", "AlbertForMaskedLM", b.masked_lm, {**TEXT, "embedding_size": 16}
    ),
    "distilbert": A(
        *(ENCODER, "DistilBERT, questions", "DistilBertForQuestionAnswering", b.answers),
        {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64} | {"max_position_embeddings": 64},
    ),
    "modernbert": A(
        *(ENCODER, "ModernBERT, masked language model", "ModernBertForMaskedLM", b.masked_lm),
        {**TEXT, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 4, "bos_token_id": 1}
        | {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "mpnet": A(ENCODER, "MPNet, masked language model", "MPNetForMaskedLM", b.masked_lm, TEXT),
    "fnet": A(
        *(ENCODER, "FNet, masked language model", "FNetForMaskedLM"),
        lambda step: {k: v for k, v in b.masked_lm(step).items() if k != "attention_mask"},
        TEXT,
        expected={"DDP102": "the pooler, which is built for every task"},
    ),
    "xlnet": A(
        *(ENCODER, "XLNet, language model", "XLNetLMHeadModel", b.causal_lm),
        {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
        expected={"DDP101": "segment and mask embeddings, for inputs that are not given"},
    ),
    "longformer": A(
        *(ENCODER, "Longformer, masked language model", "LongformerForMaskedLM", b.masked_lm),
        {**TEXT, "attention_window": 4},
        expected={"DDP101": "global attention, when no token is global"},
    ),
    "bigbird": A(
        *(ENCODER, "BigBird, masked language model", "BigBirdForMaskedLM", b.masked_lm),
        {**TEXT, "attention_type": "original_full"},
        expected={"DDP102": "the pooler, which is built for every task"},
    ),
    "funnel": A(
        *(ENCODER, "Funnel transformer, masked language model", "FunnelForMaskedLM", b.masked_lm),
        {"vocab_size": 96, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
        | {"num_decoder_layers": 1},
    ),
    "nystromformer": A(
        *(ENCODER, "Nystromformer, masked language model", "NystromformerForMaskedLM", b.masked_lm),
        {**TEXT, "num_landmarks": 5, "segment_means_seq_len": 10},
        expected={"DDP304": "the first guess of its inverse is scaled by the largest value in the batch"},
    ),
    "gpt2": A(DECODER_ONLY, "GPT-2", "GPT2LMHeadModel", b.causal_lm, GPT2),
    "gpt2_padded": A(
        *(DECODER_ONLY, "GPT-2 on padded texts of different lengths", "GPT2LMHeadModel", b.padded_causal_lm),
        GPT2,
        expected={"DDP305": "a mean over tokens, whose number differs between ranks"},
    ),
    "gpt_neo": A(
        *(DECODER_ONLY, "GPT-Neo", "GPTNeoForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
        | {"num_heads": 2, "window_size": 4, "max_position_embeddings": 64, "bos_token_id": 1}
        | {"eos_token_id": 2},
    ),
    "gptj": A(*(DECODER_ONLY, "GPT-J", "GPTJForCausalLM", b.causal_lm), {**GPT2, "rotary_dim": 8}),
    "gpt_neox": A(DECODER_ONLY, "GPT-NeoX", "GPTNeoXForCausalLM", b.causal_lm, {**TEXT, **ENDS}),
    "llama": A(DECODER_ONLY, "Llama", "LlamaForCausalLM", b.causal_lm, DECODER),
    "mistral": A(DECODER_ONLY, "Mistral", "MistralForCausalLM", b.causal_lm, {**DECODER, "sliding_window": 4}),
    "qwen2": A(DECODER_ONLY, "Qwen2", "Qwen2ForCausalLM", b.causal_lm, DECODER),
    "qwen3": A(DECODER_ONLY, "Qwen3", "Qwen3ForCausalLM", b.causal_lm, {**DECODER, "head_dim": 16}),
    "gemma": A(DECODER_ONLY, "Gemma", "GemmaForCausalLM", b.causal_lm, {**DECODER, "head_dim": 16}),
    "gemma2": A(
        *(DECODER_ONLY, "Gemma 2", "Gemma2ForCausalLM", b.causal_lm),
        {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    "gemma3": A(
        *(DECODER_ONLY, "Gemma 3", "Gemma3ForCausalLM", b.causal_lm),
        {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4},
        config="Gemma3TextConfig",
    ),
    "phi": A(DECODER_ONLY, "Phi", "PhiForCausalLM", b.causal_lm, {**TEXT, **ENDS}),
    "phi3": A(DECODER_ONLY, "Phi-3", "Phi3ForCausalLM", b.causal_lm, DECODER),
    "falcon": A(DECODER_ONLY, "Falcon", "FalconForCausalLM", b.causal_lm, {**TEXT, **ENDS}),
    "opt": A(
        *(DECODER_ONLY, "OPT", "OPTForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
        | {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "bloom": A(
        *(DECODER_ONLY, "BLOOM", "BloomForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2},
    ),
    "mpt": A(
        *(DECODER_ONLY, "MPT", "MptForCausalLM", b.causal_lm),
        {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "expansion_ratio": 2},
    ),
    "stablelm": A(DECODER_ONLY, "StableLM", "StableLmForCausalLM", b.causal_lm, DECODER),
    "cohere": A(DECODER_ONLY, "Command R", "CohereForCausalLM", b.causal_lm, DECODER),
    "olmo2": A(DECODER_ONLY, "OLMo 2", "Olmo2ForCausalLM", b.causal_lm, DECODER),
    "granite": A(DECODER_ONLY, "Granite", "GraniteForCausalLM", b.causal_lm, DECODER),
    "t5": A(SEQ2SEQ, "T5", "T5ForConditionalGeneration", b.sequence_to_sequence, T5),
    "umt5": A(SEQ2SEQ, "UMT5", "UMT5ForConditionalGeneration", b.sequence_to_sequence, T5),
    "bart": A(SEQ2SEQ, "BART", "BartForConditionalGeneration", b.sequence_to_sequence, TWO_STACKS),
    "marian": A(SEQ2SEQ, "Marian", "MarianMTModel", b.sequence_to_sequence, TWO_STACKS),
    "pegasus": A(SEQ2SEQ, "Pegasus", "PegasusForConditionalGeneration", b.sequence_to_sequence, TWO_STACKS),
    "mbart": A(SEQ2SEQ, "mBART", "MBartForConditionalGeneration", b.sequence_to_sequence, TWO_STACKS),
    "m2m100": A(
        *(SEQ2SEQ, "M2M-100 (drops layers)", "M2M100ForConditionalGeneration", b.sequence_to_sequence),
        {**TWO_STACKS, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4},
        expected={"DDP104": "layers that a rank skips at random"},
    ),
    "led": A(
        *(SEQ2SEQ, "LED", "LEDForConditionalGeneration", b.sequence_to_sequence),
        {**{k: v for k, v in TWO_STACKS.items() if k != "max_position_embeddings"}, "attention_window": 4}
        | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        expected={"DDP101": "global attention, when no token is global"},
    ),
    "prophetnet": A(
        *(SEQ2SEQ, "ProphetNet", "ProphetNetForConditionalGeneration", b.sequence_to_sequence),
        {"vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 64, "num_encoder_layers": 2}
        | {"num_encoder_attention_heads": 2, "decoder_ffn_dim": 64, "num_decoder_layers": 2}
        | {"num_decoder_attention_heads": 2, "max_position_embeddings": 64, "ngram": 2, "num_buckets": 8}
        | {"relative_max_distance": 16, "decoder_start_token_id": 2},
    ),
    "mamba": A(
        *(RECURRENT, "Mamba", "MambaForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4},
    ),
    "mamba2": A(
        *(RECURRENT, "Mamba-2", "Mamba2ForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 4}
        | {"head_dim": 16, "n_groups": 1, "chunk_size": 4, **ENDS},
    ),
    "rwkv": A(
        *(RECURRENT, "RWKV", "RwkvForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
        | {"intermediate_size": 64, "context_length": 64},
    ),
    "recurrentgemma": A(
        *(RECURRENT, "RecurrentGemma", "RecurrentGemmaForCausalLM", b.causal_lm),
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "intermediate_size": 64, "lru_width": 32, "attention_window_size": 4}
        | {"head_dim": 16},
    ),
    "jamba": A(
        *(RECURRENT, "Jamba (Mamba, attention and experts)", "JambaForCausalLM", b.causal_lm),
        {**DECODER, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4}
        | {"mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "mixtral": A(
        *(MIXTURE, "Mixtral", "MixtralForCausalLM", b.causal_lm),
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral_balanced": A(
        *(MIXTURE, "Mixtral with its load-balancing loss", "MixtralForCausalLM", b.causal_lm),
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        | {"router_aux_loss_coef": 0.1},
        expected={"DDP304": "the load-balancing loss multiplies means over the batch"},
    ),
    "switch": A(
        *(MIXTURE, "Switch transformer", "SwitchTransformersForConditionalGeneration", b.sequence_to_sequence),
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"expert_capacity": 64},
        unlike={"sharded on 4": {"DDP104": "experts that get no token of the 3 samples of a rank, as under DDP"}},
    ),
    "qwen2_moe": A(
        MIXTURE, "Qwen2-MoE", "Qwen2MoeForCausalLM", b.causal_lm, {**EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "qwen3_moe": A(MIXTURE, "Qwen3-MoE", "Qwen3MoeForCausalLM", b.causal_lm, {**EXPERTS, "head_dim": 16}),
    "olmoe": A(
        MIXTURE, "OLMoE", "OlmoeForCausalLM", b.causal_lm, {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "gpt_oss": A(
        *(MIXTURE, "GPT-OSS", "GptOssForCausalLM", b.causal_lm),
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4},
    ),
    "deepseek_v3": A(
        *(MIXTURE, "DeepSeek-V3", "DeepseekV3ForCausalLM", b.causal_lm),
        {**DECODER, "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}
        | {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
}
