"""The files of a second run: a program sees its own and those of before the first run, and changes no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Each runs in a folder of its own, in which there were before the first run: old.txt ("old"), old.pt (a tensor 1),
# folder/ with kept.txt and deep/leaf.txt, and bare/, which was empty. The first run has made new.txt, new.pt (a tensor
# 2), made/step.txt and bare/step.txt, and has appended to grown.txt.
PROGRAMS: dict[str, tuple[str, Any]] = {
    "files of the first run": (
        """
        seen = [os.path.exists(path) for path in ("new.txt", "made", "new.pt", "grown.txt")]
        seen += [refused(open, path) for path in ("new.txt", "none.txt", "made/step.txt")]
        """,
        [False] * 4 + ["ENOENT new.txt", "ENOENT none.txt", "ENOENT step.txt"],
    ),
    "files of before": (
        """
        seen = [open("old.txt").read(), os.path.getsize("old.txt"), os.path.isdir("folder"), os.listdir("bare")]
        seen += torch.load("old.pt").item(), torch.load("old.pt", mmap=True).item()
        """,
        ["old", 3, True, [], 1, 1],
    ),
    "save": (
        """
        torch.save(torch.tensor(5), "new.pt")
        torch.save(torch.tensor(6), Path("old.pt"))
        torch.save(torch.tensor(8), "legacy.pt", _use_new_zipfile_serialization=False)
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "m.ts")
        seen = [torch.load(name).item() for name in ("new.pt", "old.pt", "legacy.pt")]
        seen += torch.load("old.pt", mmap=True).item(), list(torch.jit.load("m.ts").state_dict())
        """,
        [5, 6, 8, 6, ["weight", "bias"]],
    ),
    "a shared mapping": (
        """
        torch.arange(4, dtype=torch.uint8).numpy().tofile("bytes")
        torch.from_file("old.txt", shared=True, size=3, dtype=torch.uint8).fill_(65)
        seen = open("old.txt").read(), torch.from_file("bytes", size=4, dtype=torch.uint8).tolist()
        """,
        ["AAA", [0, 1, 2, 3]],
    ),
    "save into a folder that is missing": (
        'seen = refused(torch.save, 1, "none/a.pt"), refused(open, "none/a", "w"), refused(os.mkdir, "none/a")',
        ["RuntimeError", "ENOENT a", "ENOENT a"],
    ),
    "safetensors": (
        """
        from safetensors.torch import load_file, save_file
        save_file({"a": torch.ones(1)}, "new.pt")
        seen = load_file("new.pt")["a"].item()
        """,
        1.0,
    ),
    "append": (
        """
        for path in ("old.txt", "new.txt"):
            with open(path, "a") as file:
                file.write(" and more")
        Path("made/own.txt").write_text("own")
        seen = [open("old.txt").read(), open("new.txt").read(), file.name, os.listdir("made")]
        with open("old.txt", "r+") as file:
            file.write("O")
        seen.append(open("old.txt").read())
        """,
        ["old and more", " and more", "new.txt", ["own.txt"], "Old and more"],
    ),
    "only if it is new": (
        """
        open("new.txt", "x").close()
        Path("made").mkdir()
        seen = refused(open, "old.txt", "x"), refused(os.mkdir, "folder"), refused(os.mkdir, "made")
        """,
        ["EEXIST old.txt", "EEXIST folder", "EEXIST made"],
    ),
    "rename": (
        """
        torch.save(torch.tensor(3), "tmp.pt")
        os.replace("tmp.pt", "old.pt")
        os.rename("old.txt", "older.txt")
        os.rename("folder", "moved")
        Path("folder").mkdir()
        seen = [torch.load("old.pt").item(), *map(os.path.exists, ("tmp.pt", "old.txt")), open("older.txt").read()]
        seen += walk("moved"), walk("folder")
        """,
        [3, False, False, "old", ["moved/deep/leaf.txt", "moved/kept.txt"], []],
    ),
    "rename onto a folder": ('os.mkdir("empty"); seen = refused(os.rename, "empty", "folder")', "ENOTEMPTY empty"),
    "remove": (
        """
        os.remove("old.txt")
        seen = [os.path.exists("old.txt"), "old.txt" in os.listdir()]
        seen += [refused(os.unlink, path) for path in ("old.txt", "new.txt", "folder")]
        Path("old.txt").write_text("again")
        seen.append(open("old.txt").read())
        """,
        [False, False, "ENOENT old.txt", "ENOENT new.txt", "EISDIR folder", "again"],
    ),
    "remove a folder": (
        """
        seen = [refused(os.rmdir, "folder")]
        Path("folder/own.txt").write_text("own")
        os.rmdir("bare")
        shutil.rmtree("folder")
        seen += os.path.exists("folder"), os.path.exists("bare")
        os.makedirs("folder/deep")
        seen += walk("folder"), os.listdir("folder")
        """,
        ["ENOTEMPTY folder", False, False, [], ["deep"]],
    ),
    "list": (
        """
        Path("own.txt").write_text("own")
        Path("folder/own.txt").write_text("own")
        os.makedirs("made/again", exist_ok=True)
        with os.scandir("folder") as entries:
            kinds = sorted((entry.name, entry.path, entry.is_dir()) for entry in entries)
        seen = sorted(os.listdir()), sorted(glob.glob("**/*.txt", recursive=True)), os.listdir(b"made"), kinds
        """,
        [
            ["bare", "folder", "made", "old.pt", "old.txt", "own.txt"],
            ["folder/deep/leaf.txt", "folder/kept.txt", "folder/own.txt", "old.txt", "own.txt"],
            ["b'again'"],
            [[name, f"folder/{name}", name == "deep"] for name in ("deep", "kept.txt", "own.txt")],
        ],
    ),
    "current folder": (
        """
        here = os.getcwd()
        os.makedirs("runs/a")
        os.chdir("runs/a")
        Path("log.txt").write_text("log")
        seen = [os.path.relpath(os.getcwd(), here), os.path.relpath(os.path.abspath("log.txt"), here)]
        os.chdir(f"{here}/folder")
        seen += [open("../runs/a/log.txt").read(), open("kept.txt").read(), os.path.relpath(Path.cwd(), here)]
        """,
        ["runs/a", "runs/a/log.txt", "log", "kept", "folder"],
    ),
    "links": (
        """
        os.symlink(os.path.abspath("folder"), "alias")
        os.symlink("old.txt", "hint")
        os.link("old.txt", "hard.txt")
        Path("alias/own.txt").write_text("own")
        Path("hint").write_text("changed")
        seen = [
            os.readlink("hint"), os.path.basename(os.path.realpath("hint")), open("old.txt").read(),
            open("hard.txt").read(), open("folder/own.txt").read(), sorted(os.listdir("alias")),
        ]
        os.remove("hint")
        os.symlink("alias/own.txt", "hint")
        seen.append(open("hint").read())
        """,
        ["old.txt", "old.txt", "changed", "changed", "own", ["deep", "kept.txt", "own.txt"], "own"],
    ),
    "status": (
        """
        os.chmod("old.txt", 0o600)
        os.utime("old.txt", (1, 1))
        os.truncate("folder/kept.txt", 2)
        shutil.copytree("folder", "twin")
        mode = os.stat("old.txt").st_mode
        seen = oct(mode), os.path.getmtime("old.txt"), os.path.getsize("twin/kept.txt"), walk("twin")
        """,
        ["0o100600", 1.0, 2, ["twin/deep/leaf.txt", "twin/kept.txt"]],
    ),
    "writers": (
        """
        np.memmap("a.map", dtype="uint8", mode="w+", shape=2)[:] = 7
        log = logging.getLogger("own")
        log.addHandler(logging.FileHandler("old.txt"))
        log.error("line")
        with sqlite3.connect("a.db") as database:
            database.execute("create table t (a)")
        with torch.profiler.profile() as profile:
            torch.ones(1)
        profile.export_chrome_trace("grown.txt")
        seen = [
            os.path.exists("a.db"), open("a.map", "rb").read().hex(), open("old.txt").read(),
            sqlite3.connect(":memory:").execute("select 1").fetchall(), "traceEvents" in json.load(open("grown.txt")),
        ]
        """,
        [True, "0707", "oldline\n", [[1]], True],
    ),
    "temporary files": (
        """
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a.txt").write_text("a")
            seen = [os.listdir(folder), subprocess.check_output(["cat", f"{folder}/a.txt"], text=True)]
        with tempfile.NamedTemporaryFile(dir="folder", delete=False) as file:
            file.write(b"whole")
        os.replace(file.name, "old.txt")
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"moved")
        os.replace(file.name, "moved.txt")
        seen += [os.path.exists(folder), open("old.txt").read(), sorted(os.listdir("folder")), open("moved.txt").read()]
        """,
        [["a.txt"], "a", False, "whole", ["deep", "kept.txt"], "moved"],
    ),
    "of another program": (
        """
        path = tempfile.mkdtemp()
        subprocess.check_call(["touch", f"{path}/a.txt", "b.txt", "c.txt"])
        seen = [os.listdir(path), sorted(glob.glob("[bc].txt"))]
        shutil.rmtree(path)
        os.remove("b.txt")
        os.rename("c.txt", "d.txt")
        seen += os.path.exists(path), glob.glob("[bcd].txt")
        """,
        [["a.txt"], ["b.txt", "c.txt"], False, ["d.txt"]],
    ),
    "workers": (
        """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                Path(f"row-{index}").write_text(str(index))
                return torch.load("old.pt") + index
        rows = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
        seen = [row.item() for row in rows], sorted(glob.glob("row-*")), os.path.exists("row-0")
        """,
        [[1, 2, 3, 4], ["row-0", "row-1", "row-2", "row-3"], True],
    ),
    "open folders": (
        """
        folder = os.open("folder", os.O_RDONLY)
        os.close(os.open("own.txt", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
        os.unlink("kept.txt", dir_fd=folder)
        os.rename("own.txt", "renamed.txt", src_dir_fd=folder, dst_dir_fd=folder)
        seen = sorted(os.listdir("folder"))
        """,
        ["deep", "renamed.txt"],
    ),
    "devices": (
        """
        with open(os.devnull, "w") as file:
            file.write("nothing")
        read, write = os.pipe()
        open(write, "w").close()
        seen = os.path.exists("/dev/null"), open(read).read(), pickle.loads(pickle.dumps(os.remove)) is os.remove
        """,
        [True, "", True],
    ),
    "a full disk": (
        """
        Path("large").write_bytes(b"0" * 5000)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, limit[1]))
        seen = refused(open, "old.txt", "a")
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        """,
        "EFBIG old.txt",
    ),
    "an error of ours": (
        """
        find, own_files._Overlay._find = own_files._Overlay._find, lambda *_: 1 / 0
        seen = [open("old.txt").read(), os.path.exists("new.txt"), "old.txt" in os.listdir()]
        seen += refused(open, "old.txt", "w"), refused(os.remove, "new.txt"), refused(torch.save, 1, "old.pt")
        own_files._Overlay._find = find
        """,
        ["old", True, True, "EIO old.txt, our bug", "EIO new.txt, our bug", "EIO old.pt, our bug"],
    ),
    "a signal": (
        """
        def handle(*_):
            raise LookupError
        def find(self, path, find=own_files._Overlay._find):
            signal.raise_signal(signal.SIGUSR1)
            return find(self, path)
        old, own_files._Overlay._find = own_files._Overlay._find, find
        signal.signal(signal.SIGUSR1, handle)
        try:
            os.path.exists("old.txt")
        except LookupError:
            seen = "raised"
        finally:
            own_files._Overlay._find = old
        """,
        "raised",
    ),
    "no times of birth": (
        """
        library, own_files.ctypes.CDLL = own_files.ctypes.CDLL, lambda _: None
        seen = [os.path.isdir(name) for name in ("made", "folder", ".")]
        own_files.ctypes.CDLL = library
        """,
        [False, True, True],
    ),
    "kept": ('Path("../shared.txt").write_text("both"); seen = Path("../shared.txt").read_text()', "both"),
}

HEAD = """
import errno, glob, json, logging, os, pickle, resource, shutil, signal, sqlite3, subprocess, sys, tempfile, traceback
import numpy as np
import torch
from pathlib import Path
from ddpcheck.findings.tracebacks import is_own_bug
from ddpcheck.record.parity import own_files

def walk(top):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)

def refused(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        name = f"{errno.errorcode[error.errno]} {os.path.basename(error.filename)}"
        return f"{name}, our bug" if is_own_bug(error) else name
    except RuntimeError:  # of torch, in C++
        return "RuntimeError"

base, folder, since, programs = json.loads(sys.stdin.read())
print = sys.stdout.write
own_files.redirect_files(Path(folder), since, keep=[f"{base}/shared.txt"])
for name, program in programs.items():
    os.chdir(f"{base}/{name}")
    names = dict(globals())
    try:
        exec(program, names)
        seen = names["seen"]
    except BaseException:
        seen = traceback.format_exc()
    print(json.dumps([name, seen], default=str) + "\\n")
"""
OURS = re.compile(r"second\b|temporary$|temporary/torchinductor_|tree/shared.txt")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes] | None]:
    """The times and contents of all files of a folder."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: (path.lstat().st_mtime_ns, path.read_bytes()) if path.is_file() else None
        for name, path in paths.items()
        if not OURS.match(name)
    }


def test_programs_see_their_own_files_and_change_no_others(tmp_path: Path) -> None:
    import torch

    (tmp_path / "temporary").mkdir()
    tree = tmp_path / "tree"
    before = {"old.txt": "old", "grown.txt": "a", "folder/kept.txt": "kept", "folder/deep/leaf.txt": "leaf"}
    for name in PROGRAMS:
        for folder in ("folder/deep", "bare"):
            (tree / name / folder).mkdir(parents=True)
        for path, text in before.items():
            (tree / name / path).write_text(text)
        torch.save(torch.tensor(1), tree / name / "old.pt")
    (tree / "shared.txt").touch()
    time.sleep(0.05)  # clocks of file systems are coarse
    since = time.time()
    time.sleep(0.05)
    for name in PROGRAMS:
        (tree / name / "made").mkdir()
        for path, text in {
            "new.txt": "first",
            "made/step.txt": "first",
            "bare/step.txt": "first",
            "grown.txt": "ab",
        }.items():
            (tree / name / path).write_text(text)
        torch.save(torch.tensor(2), tree / name / "new.pt")
    files = snapshot(tmp_path)
    time.sleep(0.05)
    programs = {name: textwrap.dedent(program) for name, (program, _) in PROGRAMS.items()}
    run = subprocess.run(
        [sys.executable, "-c", HEAD],
        input=json.dumps([str(tree), str(tmp_path / "second"), since, programs]),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")},
    )
    assert run.returncode == 0, run.stderr
    seen = dict(json.loads(line) for line in run.stdout.splitlines())
    assert seen == {name: expected for name, (_, expected) in PROGRAMS.items()}
    assert snapshot(tmp_path) == files
