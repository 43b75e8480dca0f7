"""Files that somebody else may have a hand in: within limits, and without a wait."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from ddpcheck.findings.files import belongs_to_user, decompress, limited_memory, read_file, read_source


def test_what_is_no_file_or_too_long_or_of_somebody_else_is_refused_at_once(tmp_path: Path) -> None:
    (path := tmp_path / "input").write_bytes(b"12345")
    assert read_file(path, 5) == b"12345" and read_file(path, 3, head=True) == b"123"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, limit in (("input", 4), ("pipe", 9), ("device", 9), ("", 9)):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory|more than "):
            read_file(tmp_path / name, limit)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(OSError, match="not a file of this user"):
            read_file(path, own=True)


def test_a_link_may_be_named_and_is_no_own_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    (link := tmp_path / "link").symlink_to("there")
    assert read_file(link) == b"x"
    assert read_file(tmp_path / "there", own=True) == b"x"
    with pytest.raises(OSError):
        read_file(link, own=True)


def test_what_unpacks_to_more_than_the_limit() -> None:
    assert decompress(gzip.compress(b"12") + gzip.compress(b"3")) == b"123" and decompress(b"plain") == b"plain"
    with pytest.raises(OSError, match="more than 256 MB"):
        decompress(gzip.compress(b" " * ((1 << 28) + 1), 1))
    for damaged in (gzip.compress(b"12345" * 99)[:-9], b"\x1f\x8b\x08\x00" + b"\xff" * 40):
        with pytest.raises(OSError):
            decompress(damaged)


def test_source_is_read_in_its_encoding(tmp_path: Path) -> None:
    (path := tmp_path / "old.py").write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    assert "é" in read_source(path)
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(OSError):
        read_source(tmp_path / "pipe.py")


def test_more_memory_than_a_reader_needs_is_refused() -> None:
    with pytest.raises(MemoryError), limited_memory():
        bytearray(1 << 36)
    assert len(bytearray(1 << 20)) == 1 << 20


def test_a_folder_that_others_may_write_into_is_not_own(tmp_path: Path) -> None:
    (folder := tmp_path / "made").mkdir(mode=0o700)
    (link := tmp_path / "link").symlink_to(folder)
    assert belongs_to_user(folder) and not belongs_to_user(link) and not belongs_to_user(tmp_path / "missing")
    folder.chmod(0o777)
    assert not belongs_to_user(folder)
    (tmp_path / "file").touch(mode=0o600)
    assert not belongs_to_user(tmp_path / "file")
