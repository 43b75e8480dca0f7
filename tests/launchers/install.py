"""Install what is missing of launchers, shells and the browser for HTML pages, from Debian, where this is root.

`python -m tests.launchers.install` says what cannot be had, and why; the tests that need it are skipped with the same
words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.launchers import nodes, slurm

PATIENCE = 150.0
PACKAGES = {"mpirun": ("openmpi-bin",), "ip": ("iproute2",), "nsenter": ("util-linux",)}


def missing_packages() -> list[str]:
    """Debian's names of what is missing."""
    wanted = [name for program, names in PACKAGES.items() if shutil.which(program) is None for name in names]
    if any(shutil.which(program, path=slurm.PATH) is None for program in slurm.PROGRAMS):
        wanted += slurm.PACKAGES
    return wanted


def install(packages: list[str]) -> None:
    """Install packages; where Debian starts services of theirs, those are none of ours."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"not root on a Debian: {' '.join(packages)} cannot be installed", file=sys.stderr)
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        try:
            subprocess.run(
                ["apt-get", "--quiet", *command], env=environment, stdout=sys.stderr, timeout=PATIENCE, check=True
            )
        except subprocess.SubprocessError as error:
            print(error, file=sys.stderr)
            return


if __name__ == "__main__":
    if packages := missing_packages():
        install(packages)
    for program in ("chromium", "fish", "zsh"):  # each by itself: where one cannot be had, others still can
        if shutil.which(program) is None:
            install([program])
    for what, reason in (("SLURM", slurm.why_not()), ("two nodes", nodes.why_not())):
        if reason:
            print(f"no {what}: {reason}", file=sys.stderr)
