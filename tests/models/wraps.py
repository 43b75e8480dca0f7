"""Other wraps for the same architectures: `fully_shard` layer by layer, and DDP around a compiled model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without a forward of their own, so that `fully_shard` refuses them


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers in the `ModuleList` of `module` that holds the most parameters."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    largest = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=nn.ModuleList())
    layers = [layer for layer in largest if not isinstance(layer, CONTAINERS)]
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def by_layer(module: nn.Module, device: torch.device) -> nn.Module:
    """Call `fully_shard` on each layer, then on the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            if parameter.ndim == 0:  # which `fully_shard` refuses
                setattr(part, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(module, mesh=mesh)
    return sharded


def compiled(backend: str) -> Callable[[nn.Module, torch.device], nn.Module]:
    """DDP around a model that `backend` compiles."""

    def wrap(module: nn.Module, _device: torch.device) -> nn.Module:
        whole: nn.Module = torch.compile(module, backend=backend)  # type: ignore[assignment]
        return nn.parallel.DistributedDataParallel(whole)

    return wrap


WRAPS = {"sharded": by_layer, "compiled": compiled("aot_eager"), "inductor": compiled("inductor")}

COMPILED = {
    "compiled": (  # healthy ones of each family, and two that are not
        *("bert", "electra", "albert", "distilbert", "modernbert", "gpt2", "llama", "mistral", "qwen2", "gemma", "opt"),
        *("t5", "bart", "mamba", "mixtral", "vit", "deit", "convnext", "swin", "whisper", "gpt2_padded", "resnet"),
    ),
    "inductor": ("gpt2", "albert", "vit"),
}
"""Which architectures are compiled: that takes a minute each."""
