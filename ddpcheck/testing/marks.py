"""The options of a test's world, from `@pytest.mark.ddp(...)` and the session, read and checked.

This module is light: it never imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.report.settings import Settings, load_settings
from ddpcheck.worlds import validation

MARKER = "ddp"
OPTIONS = ("world_size", "backend", "device", "timeout", "reuse", "threads", "env", "preload")
REUSE = ("test", "module")


def settings(config: pytest.Config, options: Iterable[str], **defaults: Any) -> Settings:
    """The settings of a session.

    Args:
        config: pytest's.
        options: Names of those that are flags and ini options of pytest.
        **defaults: Instead of the usual ones.

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


def read(marks: Iterable[pytest.Mark]) -> dict[str, Any]:
    """The options of a test's marks, the closest mark first: what it says wins.

    Raises:
        UsageError: A mark says something that cannot be.
    """
    found: dict[str, Any] = {}
    for mark in marks:
        for name, value in _named(mark.args, mark.kwargs).items():
            found.setdefault(name, value)
    return found


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size, where a test's mark lists several."""
    try:
        listed = sizes(read(metafunc.definition.iter_markers(MARKER)))
    except UsageError:
        return  # the test says so when it runs; a mistake in one test is no reason not to collect the others
    if listed is not None:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", listed, ids=[_id(size) for size in listed])


def _id(size: int) -> str:
    return f"{size}_ranks" if size > 1 else "1_rank"  # which `-k` can name


def sizes(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The world sizes of a test that is to run once for each; `None` where it names at most one."""
    value = options.get("world_size")
    if not isinstance(value, list | tuple):
        return None
    if not value:
        raise UsageError("@pytest.mark.ddp: world_size is an empty list; name at least one number of ranks.")
    for size in value:
        check_world_size(size)
    return tuple(value)


def expected_failure(item: pytest.Item) -> Any:
    """The exceptions that `@pytest.mark.xfail(raises=...)` names; `None` where it does not."""
    return next((mark.kwargs["raises"] for mark in item.iter_markers("xfail") if "raises" in mark.kwargs), None)


def check_world_size(size: object) -> None:
    """Refuse what is not a number of ranks."""
    validation.check_count("world_size of @pytest.mark.ddp", size, validation.MAX_WORLD_SIZE)


def check_options(options: Mapping[str, Any], whose: str, more: Iterable[str] = ()) -> None:
    """Refuse options that no world of a test has, and values that cannot be.

    Args:
        options: By name.
        whose: They are, for the sentence.
        more: Names that are options, too.
    """
    known = (*OPTIONS, *more)
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}"
            raise UsageError(f"{whose} has no option {name!r}; {hint}")
        _check(name, value, f"{name} of {whose}")


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) > 1:
        raise UsageError(
            f"@pytest.mark.ddp takes the world size and named options, got {len(args)} arguments without a name."
        )
    if args and "world_size" in kwargs:
        raise UsageError("@pytest.mark.ddp names the world size twice.")
    options = {**({"world_size": args[0]} if args else {}), **kwargs}
    listed = options.get("world_size")
    single = {k: v for k, v in options.items() if k != "world_size"} if isinstance(listed, list | tuple) else options
    check_options(single, "@pytest.mark.ddp")
    return options


def _check(name: str, value: Any, where: str) -> None:
    if name == "world_size":
        validation.check_count(where, value, validation.MAX_WORLD_SIZE)
    elif name == "backend":
        validation.check_choice(where, value, validation.BACKENDS)
    elif name == "device":
        validation.check_choice(where, value, validation.DEVICES)
    elif name == "timeout":
        validation.check_seconds(where, value)
    elif name == "reuse":
        validation.check_choice(where, value, REUSE)
    elif name == "threads":
        validation.check_count(where, value, validation.MAX_WORLD_SIZE)
