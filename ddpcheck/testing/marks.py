"""The options of a test's world, from `@pytest.mark.ddp(...)` and the session, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.wording import counted, suggestion
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
    """The settings of a session; `options` are the names of those that are flags and ini options of pytest.

    Raises:
        UsageError: A flag has a value that cannot be.
        ConfigError: The environment or a file has.
    """
    return load_settings(
        {name: config.getoption(f"ddp_{name}") for name in options},
        ini={name: config.getini(f"ddp_{name}") for name in options},
        start=config.rootpath,
        defaults=defaults,
    )


def read(item: pytest.Item) -> dict[str, Any]:
    """The options of a test's marks, of which the closest wins.

    Raises:
        UsageError: A mark says something that cannot be.
    """
    found: dict[str, Any] = {}
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
        found = {**options, **found}
    return found


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size, where a test's mark lists several."""
    try:
        sizes = read(metafunc.definition).get("world_size")
    except UsageError:
        return  # the test says so when it runs; a mistake in one test is no reason not to collect the others
    if isinstance(sizes, list | tuple):
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        ids = [counted(size, "rank").replace(" ", "_") for size in sizes]  # which `-k` can name
        metafunc.parametrize("world_size", sizes, ids=ids)


def expected_failure(item: pytest.Item) -> Any:
    """The exceptions that `@pytest.mark.xfail(raises=...)` names; `None` where it does not."""
    return next((mark.kwargs["raises"] for mark in item.iter_markers("xfail") if "raises" in mark.kwargs), None)


def check_options(options: Mapping[str, Any], whose: str, more: Iterable[str] = ()) -> None:
    """Refuse options that neither a test's world has nor `more` names, and values that cannot be."""
    known = (*OPTIONS, *more)
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"{whose} has no option {name!r}; {suggestion(name, known, 'options')}")
        if name in _CHECKS:
            _CHECKS[name](f"{name} of {whose}", value)
