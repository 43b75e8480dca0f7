"""Completion scripts, asked in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ddpcheck import cli

ASKED = {
    "re": {"report", "render"},
    "report --wor": {"--world-size"},
    "report net.py --fail-on w": {"warning"},
    "report --select DDP40": {"DDP401", "DDP402", "DDP403", "DDP404", "DDP405", "DDP406", "DDP407", "DDP408"},
    "explain unused-p": {"unused-parameter"},
    "run --check-sel": {"--check-select"},
    "run --nproc-per": {"--nproc-per-node"},
    "rules --format ": {"text", "json"},
}
"""What is typed after `ddpcheck`, and what completes it."""
ASK = 'ask() { COMP_WORDS=(ddpcheck "$@"); COMP_CWORD=$#; COMPREPLY=(); _shtab_ddpcheck; echo ${COMPREPLY[*]}; }'
TYPED = {
    "bash": [ASK, *("ask " + line + (" ''" if line.endswith(" ") else "") for line in ASKED)],
    "fish": [f"echo (complete -C 'ddpcheck {line}' | string split -f1 \\t)" for line in ASKED],
    "zsh": [],  # which completes only where somebody types
}


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("fish", "zsh"))])
def test_a_shell_completes_commands_options_and_values(shell: str, tmp_path: Path, monkeypatch) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    printed: list[str] = []
    monkeypatch.setattr("ddpcheck.cli.arguments.print_out", printed.append)
    assert cli.main(["completion", shell]) == 0
    (tmp_path / "script").write_text(printed[0] + "\n", encoding="utf-8")
    options = (
        ["-n", tmp_path / "script"]
        if shell == "zsh"
        else ["-c", "\n".join([f"source {tmp_path}/script", *TYPED[shell]])]
    )
    done = subprocess.run([shell, *options], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [set(line.split()) for line in done.stdout.splitlines()] == (list(ASKED.values()) if TYPED[shell] else [])


def test_another_shell_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "fsh"])
    assert "there is no shell 'fsh'; did you mean 'fish'?" in capsys.readouterr().err
