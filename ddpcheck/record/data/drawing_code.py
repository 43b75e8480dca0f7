"""Whether a dataset draws random numbers for its samples, by the code of what it calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ddpcheck.findings.source_lines import is_user_file

_MOST_OBJECTS = 64
_OF_TORCH = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("uniform_", "normal_", "bernoulli_", "random_"),
}
_OWN_GENERATORS = {"default_rng", "Generator", "RandomState", "Random", "manual_seed", "seed"}
_RANDOM_TRANSFORM = re.compile(r"Random|Jitter|AutoAugment|TrivialAugment|AugMix|MixUp|CutMix")


def drawing_code(dataset: Any) -> str:
    """The function of a dataset or of one of its transforms that draws from a global generator; "" if there is none."""
    for item in _callables(dataset):
        kind = type(item)
        if kind.__module__.startswith(("torchvision.transforms", "torchaudio.transforms")):
            if _RANDOM_TRANSFORM.search(kind.__name__):
                return kind.__name__
        for name in ("__getitem__", "__call__", "forward"):
            code = getattr(item if inspect.isfunction(item) else getattr(kind, name, None), "__code__", None)
            if code is not None and is_user_file(code.co_filename) and (drawn := _drawing(code, item)):
                return drawn
    return ""


def _callables(dataset: Any) -> Iterator[Any]:
    """A dataset and what it holds, which may make its samples: transforms, lists of them, datasets beneath."""
    pending, seen = [dataset], {id(dataset)}
    for item in pending:  # which grows
        yield item
        held = [item] if isinstance(item, list | tuple) else list(getattr(item, "__dict__", {}).values())
        for one in (part for value in held for part in (value if isinstance(value, list | tuple) else (value,))):
            if callable(one) or hasattr(type(one), "__getitem__"):
                if id(one) not in seen and len(pending) < _MOST_OBJECTS and not isinstance(one, str | bytes | type):
                    seen.add(id(one))
                    pending.append(one)


def _draws(names: set[str], constants: tuple[Any, ...]) -> bool:
    if any(isinstance(constant, tuple) and "generator" in constant for constant in constants):  # names of arguments
        return False
    return "random" in names or bool(names & _OF_TORCH)  # `random` is Python's module, or numpy's


def _drawing(code: CodeType, item: Any) -> str:
    """The name of a function that calls a generator, if this one does or one of its methods that it calls."""
    pending, seen = [code], {code}
    for one in pending:  # which grows
        names = set(one.co_names)
        if not names & _OWN_GENERATORS and _draws(names, one.co_consts):
            return str(getattr(one, "co_qualname", one.co_name))
        called = [getattr(getattr(type(item), name, None), "__code__", None) for name in names]
        inner = [constant for constant in one.co_consts if isinstance(constant, CodeType)]
        for found in (*called, *inner):
            if found is not None and found not in seen:
                seen.add(found)
                pending.append(found)
    return ""
