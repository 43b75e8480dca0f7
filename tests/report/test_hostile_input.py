"""Input that somebody has made to take all memory, to wait for ever, or to write to the terminal: one sentence, 2."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.report.hang import flight_recorder

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """What a command says of input that it refuses, in one line that can be printed."""
    monkeypatch.chdir(tmp_path)

    def said(*words: str | Path) -> str:
        code = cli.main([*map(str, words)])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        assert "bug in ddpcheck" not in err and err.rstrip("\n").isprintable()
        return err

    return said


def entry(**more: Any) -> dict[str, Any]:
    call = {"profiling_name": "nccl:broadcast", "process_group": ["0", ""]}
    return {**call, "collective_seq_id": 3, "state": "scheduled", **more}


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(60):  # a few hundred bytes of a pickle, and 2 ** 60 values
        value = [value, value]
    return value


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("loaded",)


MEMO = b"\x80\x02]r\xff\xff\xff\x6f."  # puts a list into place 1,879,048,191 of a memo


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        ({"entries": [], "rank": 1 << 40}, "its rank is '1099511627776'"),
        ({"entries": [entry()], "pg_config": {"0": {"ranks": "[1, 7777777777]"}}}, "its rank is '7777777777'"),
        (
            {"entries": [entry(profiling_name="gloo:all_gather", input_sizes=[[]], output_sizes=[[1 << 50]])]},
            "its rank is ",
        ),
        ({"entries": [entry(time_created_ns=float("inf"))]}, "a number that is infinite"),
        (pickle.dumps({"entries": [entry(collective_seq_id=7**6000)]}), "more than 64 bits"),
        (pickle.dumps({"entries": [entry(profiling_name=nested())]}), "holds more than"),
        (b'{"entries": [], "version": ' + b"7" * 6000 + b"}", "neither JSON nor a whole pickle"),
        (b'{"entries": ' + b"[" * 100_000, "neither JSON nor a whole pickle"),
        (MEMO, "neither JSON nor a whole pickle"),
        (pickle.dumps([1]), "it has no list of entries"),
        (pickle.dumps({"entries": [{"a": 1}]}), "can read (KeyError: 'profiling_name')"),
        (pickle.dumps({"entries": [], "rank": Foreign()}), "it holds builtins.print, and not plain data"),
    ],
)
def test_dumps(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: Any, words: str) -> None:
    monkeypatch.setattr(flight_recorder, "_MOST_VALUES", 1 << 16)
    (folder := tmp_path / "dumps").mkdir()
    (folder / "rank_4").write_bytes(dump if isinstance(dump, bytes) else json.dumps(dump).encode())
    assert words in refused("hang", folder)


def test_a_folder_without_a_dump(refused: Refused, tmp_path: Path) -> None:
    (folder := tmp_path / "dumps").mkdir()
    assert "it is empty" in refused("hang", folder)
    (folder / "notes.txt").touch()
    assert "no Flight Recorder dumps in" in refused("hang", folder)


def test_many_groups_of_many_ranks(refused: Refused, tmp_path: Path) -> None:
    (folder := tmp_path / "dumps").mkdir()
    dump = {"entries": [entry(process_group=[str(group), ""]) for group in range(200)]}
    (folder / "rank_100000").write_text(json.dumps(dump))
    assert "200 process groups of 100001 ranks: too many" in refused("hang", folder)


def test_a_far_rank_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_2000").write_text(json.dumps({"entries": [entry()]}))
    assert cli.main(["hang", str(tmp_path)]) == 4
    assert "1 of 2001: no dump of ranks 0 to 1999" in capsys.readouterr().out


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, make_device])
def test_what_is_no_file(refused: Refused, tmp_path: Path, make: Callable[[Path], None]) -> None:
    (folder := tmp_path / "dumps").mkdir()
    (folder / "rank_0").write_text('{"entries": []}')
    make(folder / "rank_1")
    make(saved := tmp_path / "report.json")
    for words in (("hang", folder), ("render", saved), ("diff", saved, saved), ("report", "x.py", "--baseline", saved)):
        assert "it is not a regular file" in refused(*words)
    make(tmp_path / "pyproject.toml")
    assert "cannot read pyproject.toml: " in refused("hang", folder)


@pytest.mark.parametrize("make", [os.mkfifo, make_device])
def test_a_dump_without_source(
    tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "train.py")
    (folder := tmp_path / "dumps").mkdir()
    frames = [{"name": "main", "filename": str(tmp_path / "train.py"), "line": 5}]
    for rank, name in enumerate(("gloo:all_reduce", "gloo:\x1b[31mbarrier")):
        dump = {"entries": [entry(profiling_name=name, frames=frames)]}
        (folder / f"rank_{rank}").write_text(json.dumps(dump))
    assert cli.main(["hang", str(folder)]) == 4
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["timeout = 1e999", f"steps = {'9' * 6000}", "steps = " + "[" * 9999])
def test_settings(refused: Refused, tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.ddpcheck]\n{text}\n")
    assert "pyproject.toml" in refused("hang", tmp_path)


@pytest.mark.parametrize(
    "started", [{"rank": 0, "world_size": 1 << 40}, {"rank": 9, "world_size": 2}, {"rank": -1, "world_size": 2}, {}]
)
def test_a_record_of_ranks_that_cannot_be(refused: Refused, tmp_path: Path, started: dict[str, Any]) -> None:
    rank = {"started": {"backend": "gloo", **started}, "entries": [], "counts": []}
    record = {"kind": "run", "script": "x.py", "ending": {}, "source": {}, "ranks": [rank]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert "is incomplete" in refused("render", tmp_path / "run.json")
