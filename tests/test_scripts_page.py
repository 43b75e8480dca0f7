"""The command that writes docs/scripts.md: what it does before it runs a script."""

from __future__ import annotations

import pytest

from tests.faultsuite import scripts_page


@pytest.mark.parametrize(("argument", "code", "said"), [("--help", 0, "NAME"), ("nothing", 2, "no such script")])
def test_nothing_runs_for_help_or_a_wrong_name(
    argument: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scripts_page, "run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(SystemExit) as ended:
        scripts_page.main([argument])
    out, err = capsys.readouterr()
    assert ended.value.code == code and said in out + err
