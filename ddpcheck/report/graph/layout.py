"""From dot source to SVG or PNG, through the `dot` executable of Graphviz.

This module is light: it never imports torch.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import PurePath

from ddpcheck.findings.errors import UsageError

FORMATS = ("dot", "svg", "png")
"""The formats of a picture; each is the extension of a file too."""


def picture_format(path: str | None) -> str:
    """The format that the extension of `path` stands for; dot source where there is no path.

    Raises:
        UsageError: The extension stands for none, or the `dot` executable that the format needs is not installed.
    """
    form = "dot" if path is None else PurePath(path).suffix.lower().lstrip(".")
    form = "dot" if form == "gv" else form
    if form not in FORMATS:
        raise UsageError(f"cannot tell a picture's format from the name {path!r}: use .dot, .svg or .png")
    if form != "dot" and shutil.which("dot") is None:
        raise UsageError(
            f"{form.upper()} needs the `dot` executable of Graphviz, which is not on the PATH; install it "
            "(apt-get install graphviz, brew install graphviz), or write the source with -o graph.dot, which needs none"
        )
    return form


def lay_out(source: str, form: str, *, timeout: float) -> bytes:
    """The picture in the format `form`.

    Args:
        source: In the dot language.
        form: One of `FORMATS`.
        timeout: Seconds that `dot` may take.

    Raises:
        UsageError: `dot` failed or took too long.
    """
    text = source.encode("utf-8", "backslashreplace")
    if form == "dot":
        return text
    try:
        done = subprocess.run(["dot", f"-T{form}"], input=text, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"dot did not lay out the picture within {timeout:g} s; pass a larger --timeout, or write the source with "
            "-o graph.dot"
        ) from error
    except OSError as error:
        raise UsageError(f"dot could not be run: {error.strerror or error}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"dot failed with exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout
