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


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch:
        for shell in ("bash", "zsh", "fish"):
            told: list[str] = []
            patch.setattr("ddpcheck.cli.arguments.print_out", told.append)
            assert cli.main(["completion", shell]) == 0
            (folder / shell).write_text(told[0] + "\n", encoding="utf-8")
    return folder


def asked(shell: str, script: str) -> list[set[str]]:
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_and_values(scripts: Path) -> None:
    needs("bash")
    ask = 'ask() { COMP_WORDS=(ddpcheck "$@"); COMP_CWORD=$#; COMPREPLY=(); _shtab_ddpcheck; echo ${COMPREPLY[*]}; }\n'
    typed = ["ask " + line + (" ''" if line.endswith(" ") else "") for line in ASKED]
    assert asked("bash", f"source {scripts / 'bash'}\n{ask}" + "\n".join(typed)) == list(ASKED.values())


@pytest.mark.slow
def test_fish_completes_commands_options_and_values(scripts: Path) -> None:
    needs("fish")
    typed = [f"echo (complete -C 'ddpcheck {line}' | string split -f1 \\t)" for line in ASKED]
    assert asked("fish", f"source {scripts / 'fish'}\n" + "\n".join(typed)) == list(ASKED.values())


@pytest.mark.slow
def test_zsh_reads_its_script(scripts: Path) -> None:
    needs("zsh")
    subprocess.run(["zsh", "-n", scripts / "zsh"], check=True, timeout=60)


def test_another_shell_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "fsh"])
    assert "there is no shell 'fsh'; did you mean 'fish'?" in capsys.readouterr().err
