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

import pytest

ROOT = Path(__file__).parents[2]

# Each runs in a folder of its own, in which there were before the first run: old.txt ("old"), old.pt (a tensor 1),
# folder/ with kept.txt and deep/leaf.txt, and bare/, which was empty. The first run has made new.txt, new.pt (a tensor
# 2), made/step.txt and bare/step.txt, and has appended to grown.txt.
PROGRAMS: dict[str, tuple[str, Any]] = {
    "a file of the first run": (
        'seen = os.path.exists("new.txt"), os.path.isdir("made"), Path("new.pt").is_file()',
        [False] * 3,
    ),
    "a file of before": ('seen = open("old.txt").read(), os.path.getsize("old.txt")', ["old", 3]),
    "a file that the first run has changed": ('seen = os.path.exists("grown.txt")', False),
    "a folder of before": (
        'seen = os.path.isdir("bare"), os.listdir("bare"), os.path.isdir("folder")',
        [True, [], True],
    ),
    "a missing file": (
        """
        seen = []
        for path in ("new.txt", "none.txt", "made/step.txt"):
            try:
                open(path)
            except FileNotFoundError as error:
                seen.append(os.path.basename(error.filename))
        """,
        ["new.txt", "none.txt", "step.txt"],
    ),
    "resume from the first run": (
        """
        seen = 0
        if os.path.exists("new.pt"):
            seen = torch.load("new.pt").item()
        """,
        0,
    ),
    "resume from before": ('seen = torch.load("old.pt").item() if os.path.exists("old.pt") else 0', 1),
    "resume from before, mapped": ('seen = torch.load("old.pt", mmap=True).item()', 1),
    "save": (
        """
        torch.save(torch.tensor(5), "new.pt")
        torch.save(torch.tensor(6), Path("old.pt"))
        with open("third.pt", "wb") as file:
            torch.save(torch.tensor(7), file)
        torch.save(torch.tensor(8), "legacy.pt", _use_new_zipfile_serialization=False)
        names = "new.pt", "old.pt", "third.pt", "legacy.pt"
        seen = [torch.load(name).item() for name in names] + [torch.load("old.pt", mmap=True).item()]
        """,
        [5, 6, 7, 8, 6],
    ),
    "save a script": (
        """
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "m.ts")
        seen = list(torch.jit.load("m.ts").state_dict())
        """,
        ["weight", "bias"],
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
        """
        seen = []
        for write in (lambda: torch.save(1, "none/a.pt"), lambda: open("none/a", "w"), lambda: os.mkdir("none/a")):
            try:
                write()
            except (RuntimeError, OSError) as error:
                seen.append(True)
        """,
        [True] * 3,
    ),
    "safetensors": (
        """
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
        save_file({"a": torch.ones(1)}, "new.pt")
        with safe_open("new.pt", framework="pt") as file:
            names = list(file.keys())
        seen = names, load_file("new.pt")["a"].item()
        """,
        [["a"], 1.0],
    ),
    "append to a log of before": (
        """
        with open("old.txt", "a") as file:
            file.write(" and more")
        seen = open("old.txt").read()
        """,
        "old and more",
    ),
    "append to a log of the first run": (
        """
        with open("new.txt", "a") as file:
            file.write("more")
        seen = open("new.txt").read(), file.name
        """,
        ["more", "new.txt"],
    ),
    "update": (
        """
        with open("old.txt", "r+") as file:
            file.write("O")
        os.truncate("old.txt", 2)
        seen = open("old.txt").read()
        """,
        "Ol",
    ),
    "only if it is new": (
        """
        open("new.txt", "x").close()
        Path("made").mkdir()
        seen = []
        for make in (lambda: open("old.txt", "x"), lambda: os.mkdir("folder"), lambda: os.mkdir("made")):
            try:
                make()
            except FileExistsError as error:
                seen.append(True)
        """,
        [True] * 3,
    ),
    "replace a checkpoint": (
        """
        torch.save(torch.tensor(3), "tmp.pt")
        os.replace("tmp.pt", "old.pt")
        seen = torch.load("old.pt").item(), os.path.exists("tmp.pt")
        """,
        [3, False],
    ),
    "rename originals": (
        """
        os.rename("old.txt", "older.txt")
        os.rename("folder", "moved")
        Path("folder").mkdir()
        seen = os.path.exists("old.txt"), open("older.txt").read(), walk("moved"), walk("folder")
        """,
        [False, "old", ["moved/deep/leaf.txt", "moved/kept.txt"], []],
    ),
    "rename onto a folder": (
        """
        os.mkdir("empty")
        try:
            os.rename("empty", "folder")
        except OSError as error:
            seen = errno.errorcode[error.errno]
        """,
        "ENOTEMPTY",
    ),
    "rotate": (
        """
        for step in range(4):
            Path(f"step-{step}.txt").write_text(str(step))
            for path in sorted(Path().glob("step-*.txt"))[:-2]:
                path.unlink()
        seen = sorted(glob.glob("*.txt"))
        """,
        ["old.txt", "step-2.txt", "step-3.txt"],
    ),
    "remove": (
        """
        os.remove("old.txt")
        seen = [os.path.exists("old.txt"), "old.txt" in os.listdir()]
        for path in ("old.txt", "new.txt", "folder"):
            try:
                os.unlink(path)
            except OSError as error:
                seen.append(errno.errorcode[error.errno])
        Path("old.txt").write_text("again")
        seen.append(open("old.txt").read())
        """,
        [False, False, "ENOENT", "ENOENT", "EISDIR", "again"],
    ),
    "remove a folder": (
        """
        seen = []
        try:
            os.rmdir("folder")
        except OSError as error:
            seen.append(errno.errorcode[error.errno])
        Path("folder/own.txt").write_text("own")
        os.rmdir("bare")
        shutil.rmtree("folder")
        seen += os.path.exists("folder"), os.path.exists("bare")
        os.makedirs("folder/deep")
        seen += walk("folder"), os.listdir("folder")
        """,
        ["ENOTEMPTY", False, False, [], ["deep"]],
    ),
    "list": (
        """
        Path("own.txt").write_text("own")
        Path("folder/own.txt").write_text("own")
        os.makedirs("made/again", exist_ok=True)
        with os.scandir("folder") as entries:
            kinds = sorted((entry.name, entry.path, entry.is_dir(), entry.stat().st_size) for entry in entries)
        seen = [
            sorted(os.listdir()), sorted(glob.glob("**/*.txt", recursive=True)), os.listdir(b"made"),
            sorted(str(path) for path in Path().iterdir() if path.is_dir()), walk("."), [kind[:3] for kind in kinds],
        ]
        """,
        [
            ["bare", "folder", "made", "old.pt", "old.txt", "own.txt"],
            ["folder/deep/leaf.txt", "folder/kept.txt", "folder/own.txt", "old.txt", "own.txt"],
            ["b'again'"],
            ["bare", "folder", "made"],
            ["./folder/deep/leaf.txt", "./folder/kept.txt", "./folder/own.txt", "./old.pt", "./old.txt", "./own.txt"],
            [
                ["deep", "folder/deep", True],
                ["kept.txt", "folder/kept.txt", False],
                ["own.txt", "folder/own.txt", False],
            ],
        ],
    ),
    "current folder": (
        """
        here = os.getcwd()
        os.makedirs("runs/a")
        os.chdir("runs/a")
        Path("log.txt").write_text("log")
        seen = [os.path.relpath(os.getcwd(), here), os.path.relpath(os.path.abspath("log.txt"), here)]
        os.chdir(here)
        os.chdir("folder")
        seen += [open("../runs/a/log.txt").read(), open("kept.txt").read(), os.path.relpath(Path.cwd(), here)]
        """,
        ["runs/a", "runs/a/log.txt", "log", "kept", "folder"],
    ),
    "links": (
        """
        Path("one.txt").write_text("one")
        os.symlink("one.txt", "last.txt")
        os.symlink(os.path.abspath("folder"), "alias")
        os.symlink("old.txt", "hint")
        os.link("old.txt", "hard.txt")
        Path("alias/own.txt").write_text("own")
        Path("hint").write_text("changed")
        seen = [
            open("last.txt").read(), os.readlink("last.txt"),
            open("folder/own.txt").read(), sorted(os.listdir("alias")),
            open("old.txt").read(), open("hard.txt").read(), os.path.islink("hint"),
            os.path.basename(os.path.realpath("hint")),
        ]
        os.remove("last.txt")
        os.symlink("old.txt", "last.txt")
        seen.append(open("last.txt").read())
        """,
        ["one", "one.txt", "own", ["deep", "kept.txt", "own.txt"], "changed", "changed", True, "old.txt", "changed"],
    ),
    "status": (
        """
        os.chmod("old.txt", 0o600)
        os.utime("old.txt", (1, 1))
        shutil.copyfile("old.txt", "copy.txt")
        shutil.copytree("folder", "twin")
        mode = os.stat("old.txt").st_mode
        seen = oct(mode), os.path.getmtime("old.txt"), os.access("copy.txt", os.R_OK), walk("twin")
        """,
        ["0o100600", 1.0, True, ["twin/deep/leaf.txt", "twin/kept.txt"]],
    ),
    "writers": (
        """
        with open("new.txt", "w", newline="") as file:
            csv.writer(file).writerow([1, 2])
        with open("a.json", "w") as file:
            json.dump({"a": 1}, file)
        np.save("a.npy", np.arange(3))
        np.memmap("a.map", dtype="uint8", mode="w+", shape=2)[:] = 7
        with tarfile.open("a.tar", "w") as archive:
            archive.add("old.txt")
        with zipfile.ZipFile("a.zip", "w") as archive:
            archive.write("old.txt")
        log = logging.getLogger("own")
        log.addHandler(logging.FileHandler("old.txt"))
        log.error("line")
        with sqlite3.connect("a.db") as database:
            database.execute("create table t (a)")
        seen = [
            open("new.txt").read(), json.load(open("a.json")), np.load("a.npy", mmap_mode="r").tolist(),
            sorted(os.listdir()),
            open("a.map", "rb").read().hex(), tarfile.open("a.tar").getnames(), zipfile.ZipFile("a.zip").namelist(),
            open("old.txt").read(), sqlite3.connect(":memory:").execute("select 1").fetchall(),
        ]
        """,
        [
            "1,2\n",
            {"a": 1},
            [0, 1, 2],
            ["a.db", "a.json", "a.map", "a.npy", "a.tar", "a.zip", "bare", "folder", "new.txt", "old.pt", "old.txt"],
            "0707",
            ["old.txt"],
            ["old.txt"],
            "oldline\n",
            [[1]],
        ],
    ),
    "temporary files": (
        """
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a.txt").write_text("a")
            seen = [os.listdir(folder), subprocess.check_output(["cat", f"{folder}/a.txt"], text=True)]
        with tempfile.NamedTemporaryFile(dir="folder", delete=False) as file:
            file.write(b"whole")
        os.replace(file.name, "old.txt")
        with tempfile.NamedTemporaryFile("w", dir="made" if os.path.isdir("made") else "folder") as file:
            file.write("part")
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
        subprocess.check_call(["touch", f"{path}/a.txt"])
        seen = [os.listdir(path)]
        shutil.rmtree(path)
        subprocess.check_call(["touch", "b.txt", "c.txt"])
        seen += [os.path.exists(path), sorted(glob.glob("[bc].txt"))]
        os.remove("b.txt")
        os.rename("c.txt", "d.txt")
        seen.append(sorted(glob.glob("[bcd].txt")))
        """,
        [["a.txt"], False, ["b.txt", "c.txt"], ["d.txt"]],
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
    "a folder of the first run": (
        """
        Path("made/own.txt").write_text("own")
        seen = os.listdir("made"), os.path.isdir("made")
        """,
        [["own.txt"], True],
    ),
    "a trace": (
        """
        with torch.profiler.profile() as profile:
            torch.ones(1)
        profile.export_chrome_trace("old.txt")
        seen = "traceEvents" in json.load(open("old.txt"))
        """,
        True,
    ),
    "a full disk": (
        """
        Path("large").write_bytes(b"0" * 5000)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, limit[1]))
        try:
            open("old.txt", "a")
        except OSError as error:
            seen = errno.errorcode[error.errno], os.path.basename(error.filename), is_own_bug(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        """,
        ["EFBIG", "old.txt", False],
    ),
    "an error of ours": (
        """
        find, own_files._Overlay._find = own_files._Overlay._find, lambda *_: 1 / 0
        try:
            seen = [open("old.txt").read(), os.path.exists("new.txt"), "old.txt" in os.listdir()]
            for write in (lambda: open("old.txt", "w"), lambda: os.remove("new.txt"), lambda: torch.save(1, "old.pt")):
                try:
                    write()
                except OSError as error:
                    seen.append((errno.errorcode[error.errno], is_own_bug(error)))
        finally:
            own_files._Overlay._find = find
        """,
        ["old", True, True, ["EIO", True], ["EIO", True], ["EIO", True]],
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
import csv, errno, glob, json, logging, os, pickle, resource, shutil, signal, sqlite3, subprocess, sys
import tarfile, tempfile, time, traceback, zipfile
import numpy as np
import torch
from pathlib import Path
from ddpcheck.findings.tracebacks import is_own_bug
from ddpcheck.record.parity import own_files

def walk(top):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)

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


Outcome = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """The times and contents of all files of a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
        if not re.search(
            r"^(second\b|temporary$|temporary/torchinductor_|tree$|tree/shared.txt)", str(path.relative_to(folder))
        )
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the programs have seen, and all files before and after them."""
    import torch

    base = tmp_path_factory.mktemp("files")
    (base / "temporary").mkdir()
    tree = base / "tree"
    for name in PROGRAMS:
        own = tree / name
        for folder in ("folder/deep", "bare"):
            (own / folder).mkdir(parents=True)
        for path, text in {
            "old.txt": "old",
            "grown.txt": "a",
            "folder/kept.txt": "kept",
            "folder/deep/leaf.txt": "leaf",
        }.items():
            (own / path).write_text(text)
        torch.save(torch.tensor(1), own / "old.pt")
    (tree / "shared.txt").touch()
    time.sleep(0.05)  # clocks of file systems are coarse
    since = time.time()
    time.sleep(0.05)
    for name in PROGRAMS:
        own = tree / name
        (own / "made").mkdir()
        for path in ("new.txt", "made/step.txt", "bare/step.txt"):
            (own / path).write_text("first")
        with open(own / "grown.txt", "a") as file:
            file.write("b")
        torch.save(torch.tensor(2), own / "new.pt")
    before = snapshot(base)
    time.sleep(0.05)
    programs = {name: textwrap.dedent(program) for name, (program, _) in PROGRAMS.items()}
    run = subprocess.run(
        [sys.executable, "-c", HEAD],
        input=json.dumps([str(tree), str(base / "second"), since, programs]),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(base / "temporary")},
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines()), before, snapshot(base)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_its_own_files_and_changes_no_others(outcome: Outcome, name: str) -> None:
    seen, before, after = outcome
    assert seen[name] == PROGRAMS[name][1]
    assert {path: file for path, file in after.items() if path.startswith(f"tree/{name}/")} == {
        path: file for path, file in before.items() if path.startswith(f"tree/{name}/")
    }


def test_nothing_else_is_left(outcome: Outcome) -> None:
    _, before, after = outcome
    assert after.keys() == before.keys()
