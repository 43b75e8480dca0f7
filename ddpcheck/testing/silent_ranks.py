"""Launched ranks that do not report: their terminal stays silent, and pytest writes no files of theirs."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Terminal:
    """The terminal of a rank that may turn out to be one of several: what is written waits until that is known."""

    def __init__(self, config: pytest.Config) -> None:
        """Begin to keep what is written."""
        self._writer: Any = config.get_terminal_writer()
        self._file = self._writer._file
        self._kept = io.StringIO()
        self._writer._file = self._kept

    def show(self) -> None:
        """Write all that was kept, and keep nothing from now on."""
        if self._writer._file is self._kept:
            self._writer._file = self._file
            self._file.write(self._kept.getvalue())
            self._file.flush()


def silence_files(config: pytest.Config, rank: int) -> None:
    """Have this rank write no report, no cache, and its log to a file of its own."""
    with contextlib.suppress(ImportError):
        from _pytest.junitxml import xml_key

        if (xml := config.stash.get(xml_key, None)) is not None:
            del config.stash[xml_key]
            config.pluginmanager.unregister(xml)
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set = lambda *_: None
    logs: Any = config.pluginmanager.getplugin("logging-plugin")
    if logs is not None and (path := config.getoption("log_file", None) or config.getini("log_file")):
        logs.set_log_path(f"{path}.rank{rank}")


# --- Coverage --------------------------------------------------------------------------------------------------------


def measured_by_plugin(config: pytest.Config) -> Any:
    """The plugin of pytest-cov where it measures, else `None`."""
    plugin = config.pluginmanager.getplugin("_cov")
    return plugin if plugin is not None and getattr(plugin.cov_controller, "cov", None) is not None else None


def give_up_coverage(plugin: Any) -> bytes:
    """End what pytest-cov does in this process, and return what it has measured, for rank 0."""
    coverage = plugin.cov_controller.cov
    coverage.stop()
    found = coverage.get_data()
    data: bytes = found.dumps()
    found.close()
    Path(found.data_filename()).unlink(missing_ok=True)  # it travels; on another machine nobody would find the file
    plugin.cov_controller = None
    plugin.options.cov_report, plugin.options.cov_fail_under = {}, None
    return data


# --- Temporary folders -----------------------------------------------------------------------------------------------


def base_of_temporary_folders(config: pytest.Config) -> str:
    """The base of the temporary folders of this process; it is made if it does not exist."""
    factory: pytest.TempPathFactory | None = getattr(config, "_tmp_path_factory", None)
    return str(factory.getbasetemp()) if factory is not None else ""


def share_temporary_folders(config: pytest.Config, base: str) -> None:
    """Have this rank make the same temporary folders as the others do that make as many, and in the same place."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is None or not base:
        return
    numbers: Counter[tuple[str, bool]] = Counter()
    lock = threading.Lock()

    def mktemp(basename: str, numbered: bool = True) -> Path:
        """Create a new temporary directory, the same on every rank; as `pytest.TempPathFactory.mktemp`."""
        basename = os.path.normpath(basename)
        if os.path.dirname(basename) or basename in (".", ".."):
            raise ValueError(f"{basename} is not a normalized and relative path")
        with lock:
            numbers[basename.lower(), numbered] += 1
            number = numbers[basename.lower(), numbered] - 1
        path = Path(base, f"{basename}{number}" if numbered else basename)
        if number and not numbered:
            raise FileExistsError(f"{path} exists already")
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    factory._basetemp = Path(base)
    factory.mktemp = mktemp
