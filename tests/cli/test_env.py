"""`ddpcheck env`: what it shows, and what it never does."""

from __future__ import annotations

import json

import pytest

from ddpcheck import cli
from ddpcheck.cli.env import HIDDEN, shown_variables


def test_only_variables_that_matter_are_shown_and_no_secret() -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node1",
        "NCCL_DEBUG": "INFO",
        "DDPCHECK_STEPS": "5",
        "TORCH_API_TOKEN": "abc1",
        "PYTORCH_SECRET": "abc2",
        "NCCL_AUTH": "abc3",
        "DDPCHECK_KEY": "abc4",
        "TORCH_HUB_URL": "https://me:abc5@example.org/x",
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "abc6",
        "MY_RANK": "3",
        "RANKING": "3",
    }
    shown = shown_variables(environ)
    assert "abc" not in str(shown)
    assert shown["TORCH_API_TOKEN"] == HIDDEN and shown["TORCH_HUB_URL"] == f"https://{HIDDEN}@example.org/x"
    assert set(environ) - set(shown) == {"HOME", "AWS_SECRET_ACCESS_KEY", "MY_RANK", "RANKING"}
    assert shown["RANK"] == "1" and shown["NCCL_DEBUG"] == "INFO"


def test_env_as_text_and_as_json(capsys, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO\x1b[2J")
    assert cli.main(["env", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["version"] and found["variables"]["NCCL_DEBUG"].startswith("INFO")
    assert found["start method"] in ("fork", "spawn") and found["packages"]["rich"]
    assert any("ddpcheck.pytest_plugin" in plugin for plugin in found["pytest plugins"])
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert r"  NCCL_DEBUG: INFO\x1b[2J" in out and f"  version: {found['torch']['version']}" in out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["env", "--format", "jsn"])
    assert "did you mean 'json'?" in capsys.readouterr().err
