"""World options of a test from `@pytest.mark.ddp(...)` and the session: read and validate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.wording import plural, suggestion
from ddpcheck.report.settings import Settings, load_settings
from ddpcheck.worlds import validation

MARKER = "ddp"
OPTIONS = ("world_size", "backend", "device", "timeout", "reuse", "threads", "env", "preload")
_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "world_size": partial(validation.check_count, most=validation.MAX_WORLD_SIZE),
    "backend": partial(validation.check_choice, choices=validation.BACKENDS),
    "device": partial(validation.check_choice, choices=validation.DEVICES),
    "timeout": validation.check_seconds,
    "reuse": partial(validation.check_choice, choices=("test", "module")),
    "threads": partial(validation.check_count, most=validation.MAX_WORLD_SIZE),
}


def settings(config: pytest.Config, options: Iterable[str], **defaults: Any) -> Settings:
    """Return the settings of a session; `options` are names of flags and ini options."""
    return load_settings(
        {name: config.getoption(f"ddp_{name}") for name in options},
        ini={name: config.getini(f"ddp_{name}") for name in options},
        start=config.rootpath,
        defaults=defaults,
    )


def merged_options(item: pytest.Item) -> dict[str, Any]:
    """Return the merged options of a test's marks; the closest mark wins."""
    merged: dict[str, Any] = {}
    for mark in item.iter_markers(MARKER):
        if len(mark.args) > 1:
            raise UsageError(
                f"@pytest.mark.ddp takes the world size and named options, got {len(mark.args)} arguments without a "
                "name."
            )
        if mark.args and "world_size" in mark.kwargs:
            raise UsageError("@pytest.mark.ddp names the world size twice.")
        options = {**dict(zip(["world_size"], mark.args, strict=False)), **mark.kwargs}
        sizes = options.get("world_size", 1)
        if sizes in ([], ()):
            raise UsageError("@pytest.mark.ddp: world_size is an empty list; name at least one number of ranks.")
        for size in sizes if isinstance(sizes, list | tuple) else [sizes]:
            check_options({**options, "world_size": size}, "@pytest.mark.ddp")
        merged = {**options, **merged}
    return merged


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test over the world sizes listed in its mark."""
    try:
        sizes = merged_options(metafunc.definition).get("world_size")
    except UsageError:
        return  # reported when the test runs, so that the other tests are collected
    if isinstance(sizes, list | tuple):
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        ids = [plural(size, "rank").replace(" ", "_") for size in sizes]  # selectable with `-k`
        metafunc.parametrize("world_size", sizes, ids=ids)


def expected_failure(item: pytest.Item) -> Any:
    """Return the `raises` of the closest `@pytest.mark.xfail`, or `None`."""
    return next((mark.kwargs["raises"] for mark in item.iter_markers("xfail") if "raises" in mark.kwargs), None)


def check_options(options: Mapping[str, Any], whose: str, more: Iterable[str] = ()) -> None:
    """Raise `UsageError` for unknown options (`more` are also allowed) and invalid values."""
    allowed = (*OPTIONS, *more)
    for name, value in options.items():
        if name not in allowed:
            raise UsageError(f"{whose} has no option {name!r}; {suggestion(name, allowed, 'options')}")
        if name in _CHECKS:
            _CHECKS[name](f"{name} of {whose}", value)
