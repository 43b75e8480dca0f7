"""Which prefix makes the keys of a state fit those of a module."""

import pytest

from ddpcheck.record.replicas.module_uses import common_prefix

KEYS = ["head.weight", "head.bias", "norm.weight"]


@pytest.mark.parametrize(
    ("module", "state", "prefix"),
    [
        (KEYS, {f"module.{key}" for key in KEYS}, (True, "module.")),
        (KEYS, {"head.bias.0", "head.weight.1"}, None),
        (KEYS, {f"model.encoder.{key}" for key in KEYS} | {"step"}, (True, "model.encoder.")),
        ([f"module._orig_mod.{key}" for key in KEYS], set(KEYS), (False, "module._orig_mod.")),
        (KEYS, {"decoder.weight", "decoder.bias"}, None),
        (KEYS, {"decoder.norm.weight", "decoder.head.scale", "decoder.other"}, None),  # one of three fits by chance
        (KEYS, {"xhead.weight"}, None),
        (KEYS, set(), None),
        ([*KEYS, "a", "b", "c", "d", "x.lora", "y.lora"], {"module.x.lora", "module.y.lora"}, (True, "module.")),
        ([f"model.{key}" for key in "abcdefgh"], {"f", "g"}, (False, "model.")),
    ],
)
def test_the_prefix_of_keys(module: list[str], state: set[str], prefix: tuple[bool, str] | None) -> None:
    assert common_prefix(module, sorted(state)) == prefix
