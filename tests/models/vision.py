"""Architectures for images: classes, segmentation, detection, masked images."""

from __future__ import annotations

from tests.models import batches as b
from tests.models.architecture import IMAGE, VISION, Nested
from tests.models.architecture import Architecture as A

DETR = (
    {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    | {
        "backbone_config": Nested(
            "ResNetConfig",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
            | {"layer_type": "basic", "out_features": ["stage2"]},
        )
    }
    | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
    | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 4}
    | {"num_labels": 3}
)

ROWS: dict[str, A] = {
    "vit": A(VISION, "ViT", "ViTForImageClassification", b.image_classes(), IMAGE),
    "deit": A(VISION, "DeiT", "DeiTForImageClassification", b.image_classes(), IMAGE),
    "beit": A(
        VISION, "BEiT", "BeitForImageClassification", b.image_classes(), {**IMAGE, "use_relative_position_bias": True}
    ),
    "dinov2": A(
        *(VISION, "DINOv2", "Dinov2ForImageClassification", b.image_classes()),
        IMAGE,
        expected={"DDP101": "the mask token, in training without masks"},
    ),
    "swin": A(
        *(VISION, "Swin", "SwinForImageClassification", b.image_classes()),
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
        | {"window_size": 4, "num_labels": 3},
    ),
    "vit_mae": A(
        *(VISION, "ViT, masked autoencoder", "ViTMAEForPreTraining", b.image_only()),
        {**IMAGE, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
        | {"decoder_intermediate_size": 64},
    ),
    "convnext": A(
        *(VISION, "ConvNeXt", "ConvNextForImageClassification", b.image_classes()),
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32}
        | {"drop_path_rate": 0.1},
    ),
    "convnextv2": A(
        *(VISION, "ConvNeXt V2", "ConvNextV2ForImageClassification", b.image_classes()),
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32}
        | {"drop_path_rate": 0.1},
    ),
    "resnet": A(
        *(VISION, "ResNet", "ResNetForImageClassification", b.image_classes()),
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "layer_type": "basic"},
        expected={"DDP304": "BatchNorm"},
    ),
    "regnet": A(
        *(VISION, "RegNet", "RegNetForImageClassification", b.image_classes()),
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "mobilenet_v2": A(
        *(VISION, "MobileNetV2", "MobileNetV2ForImageClassification", b.image_classes()),
        {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4, "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "mobilenet_v1": A(
        *(VISION, "MobileNetV1", "MobileNetV1ForImageClassification", b.image_classes()),
        {"depth_multiplier": 0.25, "min_depth": 4, "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "mobilevitv2": A(
        *(VISION, "MobileViTV2", "MobileViTV2ForImageClassification", b.image_classes(64)),
        {"width_multiplier": 0.25, "image_size": 64, "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "textnet": A(
        *(VISION, "TextNet", "TextNetForImageClassification", b.image_classes(64)),
        {"stem_out_channels": 8, "hidden_sizes": [8, 16, 16, 16, 16], "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "bit": A(
        *(VISION, "BiT", "BitForImageClassification", b.image_classes()),
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4, "num_labels": 3},
    ),
    "efficientnet": A(
        *(VISION, "EfficientNet", "EfficientNetForImageClassification", b.image_classes()),
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
        | {"in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2]}
        | {"num_block_repeats": [1, 2], "expand_ratios": [1, 6], "depthwise_padding": [], "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "levit": A(
        *(VISION, "LeViT", "LevitForImageClassification", b.image_classes(128)),
        {"image_size": 128, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2]}
        | {"depths": [1, 1, 1], "key_dim": [8, 8, 8], "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "poolformer": A(
        *(VISION, "PoolFormer", "PoolFormerForImageClassification", b.image_classes()),
        {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3]}
        | {"strides": [4, 2], "padding": [2, 1], "num_labels": 3},
    ),
    "segformer": A(
        *(VISION, "SegFormer, segmentation", "SegformerForSemanticSegmentation", b.segmentation()),
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
        | {"decoder_hidden_size": 16, "num_labels": 3},
        expected={"DDP304": "BatchNorm"},
    ),
    "dpt": A(
        *(VISION, "DPT, segmentation", "DPTForSemanticSegmentation", b.segmentation()),
        {**IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        | {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False}
        | {"add_projection": False},
        expected={"DDP101": "the first fusion layer's unit for a missing residual"}
        | {"DDP102": "the last norm of the backbone", "DDP304": "BatchNorm"},
    ),
    "upernet": A(
        *(VISION, "UPerNet, segmentation", "UperNetForSemanticSegmentation", b.segmentation(64)),
        {
            "backbone_config": Nested(
                "ConvNextConfig",
                {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_stages": 4}
                | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
            )
        }
        | {"hidden_size": 8, "num_labels": 3, "auxiliary_channels": 8, "auxiliary_in_channels": 8}
        | {"pool_scales": [1, 2]},
        expected={"DDP304": "BatchNorm"},
    ),
    "maskformer": A(
        *(VISION, "MaskFormer, segmentation", "MaskFormerForInstanceSegmentation", b.mask_labels(64)),
        {
            "backbone_config": Nested(
                "SwinConfig",
                {"image_size": 64, "patch_size": 4, "embed_dim": 8}
                | {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2}
                | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
            )
        }
        | {
            "decoder_config": Nested(
                "DetrConfig",
                {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
                | {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
                | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 4}
                | {"use_timm_backbone": False}
                | {"backbone_config": Nested("ResNetConfig", {"out_features": ["stage4"]})},
            )
        }
        | {"fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3},
        shard=b.shard_lists,
        needs=("scipy",),
        expected={"DDP102": "the last norm of the backbone"}
        | {"DDP107": "the first self-attention of the decoder: its values are zeros"},
    ),
    "detr": A(
        *(VISION, "DETR, detection", "DetrForObjectDetection", b.detection(64)),
        DETR,
        shard=b.shard_lists,
        needs=("scipy",),
        expected={"DDP107": "the first self-attention of the decoder: its values are zeros"},
    ),
    "conditional_detr": A(
        *(VISION, "Conditional DETR, detection", "ConditionalDetrForObjectDetection", b.detection(64)),
        DETR,
        shard=b.shard_lists,
        needs=("scipy",),
        expected={"DDP107": "the first self-attention of the decoder: its values are zeros"},
    ),
    "table_transformer": A(
        *(VISION, "Table Transformer, detection", "TableTransformerForObjectDetection", b.detection(64)),
        DETR,
        shard=b.shard_lists,
        needs=("scipy",),
        expected={"DDP107": "the first self-attention of the decoder: its values are zeros"},
    ),
    "yolos": A(
        *(VISION, "YOLOS, detection", "YolosForObjectDetection", b.detection()),
        {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4},
        shard=b.shard_lists,
        needs=("scipy",),
    ),
}
