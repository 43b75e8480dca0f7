"""Settings by precedence: command line, environment, `[tool.ddpcheck]`, default."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import ConfigError, UsageError, WrongTypeError
from ddpcheck.findings.files import read_file
from ddpcheck.findings.named_functions import set_named_functions
from ddpcheck.findings.rules import Severity, matching_rules
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.wording import suggestion

ENVIRONMENT_PREFIX = "DDPCHECK_"
_OF_ONE_COMMAND = frozenset({"output", "matrix", "repro", "detail", "debug", "baseline"})
TABLE = "[tool.ddpcheck]"
_MOST_SETTINGS = 1 << 24  # largest pyproject.toml, in bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a check, with their defaults."""

    world_size: int = 2  # number of ranks
    backend: str | None = None  # backend of the process group; `None` chooses by device
    device: str = "cpu"  # where the model runs: "cpu" or "cuda"
    steps: int = 3  # training steps to check
    timeout: float = 30.0  # seconds before a run counts as a hang
    seed: int = 0  # seed of every random number generator
    select: tuple[str, ...] = ()  # codes, prefixes or names of the rules to report; all if empty
    ignore: tuple[str, ...] = ()  # codes, prefixes or names of the rules to leave out
    fail_on: Severity | None = Severity.ERROR  # lowest severity of a finding that fails the command; `None` for never
    preload: tuple[str, ...] = ()  # modules imported once, before ranks are forked
    threads: int | None = None  # torch threads in each rank of a test; `None` divides the cores
    # ranks of a test: "test" for new ranks per test, "module" to share the ranks of a module
    reuse: str = "test"
    # use of ranks started by torchrun, mpirun or srun in tests, reports and pictures: "auto" if there are several and
    # some test needs ranks, "on" always, "off" never
    launcher: str = "auto"
    # output format if neither `--format` nor the file extension decides; text if `None`
    format: str | None = None
    # findings shown with a reason and not counted; only from pyproject.toml
    suppress: tuple[Suppression, ...] = ()
    rules: tuple[str, ...] = ()  # modules with third-party rules, importable from the folder of pyproject.toml
    rules_severity: Severity = Severity.WARNING  # highest severity of a finding by third-party rules
    rank_parameters: tuple[str, ...] = ()  # patterns for names of parameters that are each rank's own
    wrapper_functions: tuple[str, ...] = ()  # functions and files that only wrap calls of torch
    step_function: str = ""  # function that makes a training step


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    ini: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    start: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    prefix: str = "--",
) -> Settings:
    """Resolve every setting; the order is flags, ini, environment, `[tool.ddpcheck]`, default.

    Args:
        flags: Command-line values by field name; `None` and the empty list mean "not given".
        ini: Values of a host's ini file, such as pytest's, by field name; `None` and "" mean "not given".
        environ: Environment variables; default: `os.environ`.
        start: Folder from which the nearest pyproject.toml is searched upwards; default: the current folder.
        defaults: Overrides of the `Settings` defaults, by field name.
        prefix: Prefix of the options on the command line.

    Raises:
        UsageError: A flag has an invalid value.
        ConfigError: The environment or a file has an invalid value, or the file names an unknown setting.
    """
    environ = os.environ if environ is None else environ
    load_third_party_rules(environ=environ, start=start)
    chosen = _from_pyproject(start or Path.cwd())
    for variable, field in _fields_of(environ).items():
        if field in _PARSERS and environ[variable] != "":
            chosen[field] = _parse(field, environ[variable], f"environment variable {variable}", ConfigError)
    for field, value in _given_values(ini).items():
        chosen[field] = _parse(field, value, f"ini option ddp_{field}", ConfigError)
    for field, value in _given_values(flags).items():
        chosen[field] = _parse(field, value, prefix + field.replace("_", "-"), UsageError)
    settings = Settings(**{**(defaults or {}), **chosen})
    set_named_functions(settings.wrapper_functions, settings.step_function)
    return settings


def _given_values(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {field: value for field, value in (values or {}).items() if value not in (None, [], "")}


def _fields_of(environ: Mapping[str, str]) -> dict[str, str]:
    names = sorted(variable for variable in environ if variable.startswith(ENVIRONMENT_PREFIX))
    return {variable: variable.removeprefix(ENVIRONMENT_PREFIX).lower() for variable in names}


def misspelled_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Describe each environment variable that seems to be a misspelled setting.

    Args:
        environ: Environment variables; default: `os.environ`.
    """
    msgs = []
    for variable, field in _fields_of(os.environ if environ is None else environ).items():
        if field in _PARSERS:
            continue
        ignored = f"environment variable {variable} is ignored"
        if field in _OF_ONE_COMMAND:
            msgs.append(f"{ignored}: --{field} can only be given on the command line")
        elif near := _similar_setting(field):
            msgs.append(f"{ignored}: ddpcheck has no such setting; did you mean {ENVIRONMENT_PREFIX + near.upper()!r}?")
    return msgs


def _similar_setting(field: str) -> str:
    """Return a setting whose spelling or beginning is similar to `field`, else ""."""
    close = difflib.get_close_matches(field, _PARSERS, n=1, cutoff=0.7)
    parts = (name for name in _PARSERS if f"{field}_".startswith(f"{name}_") or f"{name}_".startswith(f"{field}_"))
    return close[0] if close else next(parts, "")


def load_third_party_rules(*, environ: Mapping[str, str] | None = None, start: Path | None = None) -> None:
    """Add the rules of installed packages, of `[tool.ddpcheck] rules` and of DDPCHECK_RULES to `RULES`.

    Raises:
        ConfigError: A module cannot be imported, or a rule is invalid.
    """
    for entry_point in _entry_points():
        _parse("rules", entry_point.value, f"entry point {entry_point.name!r} of ddpcheck.rules", ConfigError)
    path, table = _read_pyproject(start or Path.cwd())
    if "rules" in table:
        if (folder := str(path.absolute().parent)) not in sys.path:
            sys.path.append(folder)
        _parse("rules", table["rules"], f"'rules' in {TABLE} of {_relative(path)}", ConfigError)
    if modules := (os.environ if environ is None else environ).get("DDPCHECK_RULES"):
        _parse("rules", modules, "environment variable DDPCHECK_RULES", ConfigError)


@functools.cache
def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group="ddpcheck.rules")


def _read_pyproject(start: Path) -> tuple[Path, dict[str, Any]]:
    """Return the nearest pyproject.toml, and its table; Path() and {} if there is none."""
    path = next((f for folder in (start, *start.absolute().parents) if (f := folder / "pyproject.toml").exists()), None)
    if path is None:
        return Path(), {}
    try:
        table = tomllib.loads(read_file(path, _MOST_SETTINGS).decode()).get("tool", {}).get("ddpcheck", {})
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no TOML, or an integer of too many digits
        raise ConfigError(f"cannot read {_relative(path)}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{_relative(path)}: tool.ddpcheck must be a table")
    return path, table


def _from_pyproject(start: Path) -> dict[str, Any]:
    path, table = _read_pyproject(start)
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        field = key.replace("-", "_")
        if field not in _PARSERS:
            names = [name.replace("_", "-") for name in _PARSERS]
            hint = suggestion(field.replace("_", "-").lower(), names, "settings")
            raise ConfigError(f"{_relative(path)}: {TABLE} has no setting {key!r}; {hint}")
        if field in chosen:
            raise ConfigError(f"{_relative(path)}: {TABLE} sets {field.replace('_', '-')!r} twice, with - and with _")
        chosen[field] = _parse(field, value, f"{key!r} in {TABLE} of {_relative(path)}", ConfigError)
    return chosen


def _relative(path: Path) -> str:
    try:
        return path.absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


def _parse(field: str, value: Any, origin: str, error: type[UsageError | ConfigError]) -> Any:
    try:
        return _PARSERS[field](value)
    except UsageError as reason:  # from the rule table, a full sentence
        raise error(f"{origin}: {reason}") from None
    except ValueError as reason:
        raise error(f"{origin}: expected {reason}, got {value!r}") from None


def _number_parser(kind: type[int | float], expected: str, holds: Callable[[float], bool]) -> Callable[[Any], Any]:
    def parse(value: Any) -> int | float:
        if isinstance(value, kind | int | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                if holds(number := kind(value)):
                    return number
        raise ValueError(expected)

    return parse


def _integer_parser(least: int) -> Callable[[Any], Any]:
    return _number_parser(int, f"a whole number of at least {least}", lambda number: number >= least)


def _parse_word(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a word")
    return value.strip().lower()


def _parse_words(value: Any, expected: str) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError(expected)
    return tuple(word.strip() for part in parts for word in part.split(",") if word.strip())


def _parse_patterns(value: Any) -> tuple[str, ...]:
    patterns = _parse_words(value, "codes, prefixes or names of rules")
    for pattern in patterns:
        matching_rules(pattern)
    return patterns


def check_patterns(name: str, value: Any) -> tuple[str, ...]:
    """Return validated patterns that a caller passed as argument `name` (`select`, `ignore`, `rank_parameters`).

    Raises:
        UsageError: `value` has the wrong type, or matches no rule.
    """
    error = UsageError if isinstance(value, str | list | tuple) else WrongTypeError
    patterns: tuple[str, ...] = _parse(name, value, name, error)
    return patterns


def _parse_modules(value: Any) -> tuple[str, ...]:
    expected = "names of modules, such as transformers"
    names = _parse_words(value, expected)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(expected)
    return names


def _parse_functions(value: Any) -> tuple[str, ...]:
    expected = "functions with their modules, such as lab.comm.reduce_mean, or files, such as lab/comm.py"
    names = _parse_words(value, expected)
    if not all(_FUNCTION.fullmatch(name) or name.endswith(".py") for name in names):
        raise ValueError(expected)
    return names


def _parse_function(value: Any) -> str:
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value) or value.endswith(".py"):
        raise ValueError("a function with its module, such as lab.trainer.Trainer.train_step")
    return value


_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _parse_rules(value: Any) -> tuple[str, ...]:
    from ddpcheck.rules.others import load_rules

    names = _parse_modules(value)
    for name in names:
        load_rules(name)
    return names


def _parse_suppressions(value: Any) -> tuple[Suppression, ...]:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ValueError("tables [[tool.ddpcheck.suppress]] in pyproject.toml, each with a rule and a reason")
    keys = [field.name for field in fields(Suppression)]
    suppressions = []
    for number, entry in enumerate(value, 1):
        table = {"rule" if key == "code" else key: text for key, text in entry.items()}  # key of earlier versions
        if unknown := next((key for key in table if key not in keys), None):
            raise UsageError(f"table {number} has no key {unknown!r}; {suggestion(unknown, keys, 'keys')}")
        if missing := next((key for key in ("rule", "reason") if key not in table), None):
            raise UsageError(f"table {number} needs a {missing!r}")
        try:
            suppressions.append(Suppression(**table))
        except UsageError as error:
            raise UsageError(f"table {number}: {error}") from None
    return tuple(suppressions)


def _choice_parser(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"{', '.join(choices[:-1])} or {choices[-1]}")
        return value.strip().lower()

    return parse


def _parse_severity(value: Any) -> Severity | None:
    chosen = _choice_parser(*(severity.value for severity in Severity), "never")(value)
    return None if chosen == "never" else Severity(chosen)


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "world_size": _integer_parser(1),
    "backend": _parse_word,
    "device": _parse_word,
    "steps": _integer_parser(1),
    "timeout": _number_parser(float, "a number of seconds greater than 0", lambda number: 0 < number < math.inf),
    "seed": _integer_parser(0),
    "select": _parse_patterns,
    "ignore": _parse_patterns,
    "fail_on": _parse_severity,
    "preload": _parse_modules,
    "threads": _integer_parser(1),
    "reuse": _choice_parser("test", "module"),
    "launcher": _choice_parser("auto", "on", "off"),
    "format": _parse_word,
    "suppress": _parse_suppressions,
    "rules": _parse_rules,
    "rules_severity": lambda value: Severity(_choice_parser(*(severity.value for severity in Severity))(value)),
    "rank_parameters": lambda value: _parse_words(value, "names or patterns of parameters, such as adapters.*"),
    "wrapper_functions": _parse_functions,
    "step_function": _parse_function,
}
assert set(_PARSERS) == {field.name for field in fields(Settings)}
