"""An overlay below Python's file functions, for the second run of a script.

What the script writes is below `FOLDER/files`, under its absolute path. A path that the first run has made or changed
does not exist for the second one. An original that the second one removes or renames stays, and is hidden from then on.
As they are: system folders, installed packages, byte code, caches of libraries (~/.cache, compiled kernels), what
`tempfile` makes in its own folder, and what C code or other programs make during the second run.
Not covered: processes that are started and not forked, functions of open files (os.fchmod), and C code that opens
files, but for torch, safetensors and sqlite3. What the first run has overwritten is not restored.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import glob
import io
import operator
import os
import shutil
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from ddpcheck.findings.tracebacks import is_of_signal, passes_on
from ddpcheck.gather.patching import Patch
from ddpcheck.record.rank.module_finder import when_imported

_NEW, _MAKE, _UPDATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL, os.O_RDWR | os.O_CREAT
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_BY_CALL = -1  # flags that are an argument, or depend on whether a mapping is shared
_OF_LINK = ("lstat", "readlink", "lchown", "mkdir", "mkfifo", "mknod", "unlink", "remove", "rmdir")
_IN_C = {  # the function, its argument that is a path, with its name, and how it opens that
    "torch": (
        ("_C.PyTorchFileWriter.__init__", 1, "file_name", _NEW),
        ("_C.PyTorchFileReader.__init__", 1, "", os.O_RDONLY),
        ("_C.ScriptModule.save", 1, "filename", _NEW),
        ("_C.import_ir_module", 1, "", os.O_RDONLY),
        ("_C._autograd._ProfilerResult.save", 1, "", _NEW),
        ("_C._distributed_c10d.FileStore.__init__", 1, "file_name", _UPDATE),
        ("UntypedStorage.from_file", 0, "filename", _BY_CALL),
        ("from_file", 0, "filename", _BY_CALL),
    ),
    "safetensors": (("serialize_file", 1, "filename", _NEW), ("safe_open", 0, "filename", os.O_RDONLY)),
    "sqlite3": (("connect", 0, "database", _UPDATE), ("dbapi2.connect", 0, "database", _UPDATE)),
}
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def redirect_files(folder: str | Path, since: float, keep: Sequence[str | Path] = ()) -> None:
    """Keep what this process writes, and those forked from it, apart from all other files.

    Args:
        folder: The folder of the second run, whose processes may share it; what is in it is used as it is.
        since: When the first run began, in seconds since the epoch.
        keep: Other files and folders that are used as they are.
    """
    _Functions(_Overlay(folder, since, keep))


class _File(NamedTuple):
    path: str  # without links
    place: str  # of the content
    status: os.stat_result | None  # None if it does not exist for the script
    is_folder: bool


_Use = Callable[[_File], str | None]


class _Overlay:
    """Find files, and for each use of a file the place that the original function gets."""

    def __init__(self, folder: str | Path, since: float, keep: Sequence[str | Path]) -> None:
        self.real = SimpleNamespace(**vars(os))  # with the functions that are replaced
        self._folder = os.path.realpath(folder)
        self._files = f"{self._folder}/files"
        os.makedirs(self._files, exist_ok=True)
        if not (began := Path(self._folder, "began")).exists():
            began.touch()
        self._first_began, self._began = since, began.stat().st_mtime
        self._temporary = f"{os.path.realpath(tempfile.gettempdir())}/"
        self.random_names: set[str] = set()  # by `tempfile`
        packages = [sysconfig.get_path("stdlib"), *(path for path in sys.path if path.endswith("-packages"))]
        caches = [*filter(None, map(os.environ.get, _CACHES)), *map(os.path.expanduser, ("~/.cache", "~/.triton"))]
        exempt = ["/dev", "/proc", "/sys", "/run", self._folder, *map(os.path.realpath, (*packages, *caches, *keep))]
        self._exempt = (*(f"{path}/" for path in exempt), f"{self._temporary}torchinductor_")
        self._removals: dict[str, float] = {}  # paths of originals, with times
        self._parents: dict[str, str] = {}  # folders, without links

    def locate(self, path: Any, follow: bool = True, folder: int | None = None) -> _File | None:
        """Find a path, which may be relative to an open folder; None if it is used as it is."""
        if not path or not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.fsdecode(path)
        if text.startswith((":memory:", "file:")):  # of sqlite3
            return None
        if not text.startswith("/"):
            start = os.getcwd() if folder is None else self.script_path(os.readlink(f"/proc/self/fd/{folder}"))
            text = f"{start}/{text}"
        text = f"/{os.path.normpath(text).lstrip('/')}"
        if self._is_exempt(text):
            return None
        parent, _, name = text.rpartition("/")
        base = self._parents.get(parent) if parent else ""
        if base is None:
            base = self._parents[parent] = os.path.realpath(parent).rstrip("/")  # it asks for shorter paths
        file = self._find(f"{base}/{name}")
        if follow and file.status is not None and S_ISLNK(file.status.st_mode):
            file = self._find(os.path.realpath(file.path))
        return None if file.path != text and self._is_exempt(file.path) else file

    def script_path(self, place: str) -> str:
        """The path under which the script knows a file."""
        return (place.removeprefix(self._files) or "/") if f"{place}/".startswith(f"{self._files}/") else place

    def entries(self, path: str) -> dict[str, os.DirEntry[str]]:
        """The entries of a folder: those of the overlay, and originals that are not hidden."""
        found: dict[str, os.DirEntry[str]] = {}
        for folder in (self._files + path, path):
            with self.real.scandir(folder) if self._status(f"{folder}/.") else contextlib.nullcontext(()) as entries:
                for entry in entries:
                    if folder != path or not self._is_hidden(entry.path, entry.stat(follow_symlinks=False)):
                        found.setdefault(entry.name, entry)
        return found

    def read(self, file: _File) -> str:
        return file.place

    def open(self, flags: int, file: _File) -> str:
        if file.status is None:
            return self._room(file.path) if flags & os.O_CREAT else file.place
        if file.place != file.path or not S_ISREG(file.status.st_mode) or flags & _MAKE == _MAKE:
            return file.place  # at which `os.mkdir` and the like raise
        return self._room(file.path) if flags & _NEW == _NEW else self.copy(file)

    def change(self, file: _File) -> str:
        return os.path.dirname(self._room(f"{file.path}/.")) if file.is_folder else self.copy(file)

    def copy(self, file: _File) -> str:
        """Have the whole of a file or a folder in the overlay."""
        if file.is_folder:
            os.makedirs(self._files + file.path, exist_ok=True)
            for name in self.entries(file.path):
                self.copy(self._find(f"{file.path}/{name}"))
        elif file.status is not None and file.place == file.path:
            draft = f"{self._folder}/{os.getpid()}-{threading.get_ident()}"
            shutil.copy2(file.path, draft, follow_symlinks=False)
            os.replace(draft, self._room(file.path))
        return self._files + file.path

    def replace(self, file: _File) -> str:
        return self.copy(file) if file.is_folder else self._room(file.path)

    def take(self, file: _File) -> str:
        self.copy(file)
        self._hide(file)
        return self._files + file.path

    def remove(self, file: _File, of_folder: bool = False) -> str | None:
        if file.status is None or file.is_folder != of_folder:
            return file.place  # at which the function raises
        if of_folder and self.entries(file.path):
            raise OSError(errno.ENOTEMPTY, "")
        self._hide(file)
        return self._files + file.path if self._status(self._files + file.path) else None

    def _hide(self, file: _File) -> None:
        self._parents.clear()
        if file.place == file.path and not file.is_folder and self._birth(file.path) >= self._began:
            self.real.unlink(file.path)  # another program has made it for this run
        self._removals[file.path] = time.time()

    def _room(self, path: str) -> str:
        """The place of a new file, with its folder, if that exists, or did for the first run."""
        self._parents.clear()
        parent = os.path.dirname(path)
        original = self._status(f"{parent}/.")
        if self._find(parent).is_folder or (original and not self._is_removed(parent, original.st_ctime)):
            os.makedirs(self._files + parent, exist_ok=True)
        return self._files + path

    def _find(self, path: str) -> _File:
        place = self._files + path
        own = self._status(place) if self.real.access(place, os.F_OK, follow_symlinks=False) else None  # it is faster
        original = self._status(path)
        own_is_folder, is_folder = (status is not None and S_ISDIR(status.st_mode) for status in (own, original))
        is_covered = own is not None and not (own_is_folder and is_folder)
        if original is not None and not is_covered and not self._is_hidden(path, original):
            return _File(path, path, original, is_folder)
        return _File(path, place if own or original else path, own, own_is_folder)

    def _status(self, path: str) -> os.stat_result | None:
        with contextlib.suppress(OSError):
            return cast(os.stat_result, self.real.lstat(path))
        return None

    def _is_exempt(self, path: str) -> bool:
        if f"{path}/".startswith(self._exempt) or "/__pycache__" in path:
            return True
        if not self.random_names or not path.startswith(self._temporary):
            return False
        name = path.removeprefix(self._temporary).partition("/")[0]
        return any(name[index : index + 8] in self.random_names for index in range(len(name)))

    def _is_hidden(self, path: str, status: os.stat_result) -> bool:
        """Tell if an original is of the first run, or has been removed by this one."""
        if self._is_removed(path, status.st_ctime):
            return True
        if not self._first_began <= status.st_ctime < self._began or self._is_exempt(path):
            return False
        return not S_ISDIR(status.st_mode) or self._birth(path) >= self._first_began

    def _is_removed(self, path: str, changed: float) -> bool:
        while self._removals and path != "/":
            if self._removals.get(path, changed) > changed:
                return True
            path = os.path.dirname(path)
        return False

    def _birth(self, path: str) -> float:
        """When a path was made; if the file system does not say, the first change that can be seen in it."""
        found, statx = ctypes.create_string_buffer(256), getattr(ctypes.CDLL(None), "statx", None)
        if statx and not statx(-100, os.fsencode(path), 0x100, 0x800, found):  # of a link itself; STATX_BTIME
            if struct.unpack_from("I", found)[0] & 0x800:
                seconds, nanoseconds = struct.unpack_from("qI", found, 80)
                return float(seconds + nanoseconds / 1e9)
        if not self._status(f"{path}/."):
            return 0.0
        with self.real.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_ctime for entry in entries]
        return min(times, default=float(self.real.lstat(path).st_ctime))


class _Functions:
    """The functions that stand in the place of those of Python and of some in C."""

    def __init__(self, overlay: _Overlay) -> None:
        self._overlay = overlay
        make = functools.partial(overlay.open, _MAKE)
        for use, names in (
            (overlay.read, ("stat", "lstat", "access", "readlink", "statvfs", "chdir", "getxattr", "listxattr")),
            (overlay.change, ("chmod", "utime", "truncate", "chown", "lchown", "setxattr", "removexattr")),
            (make, ("mkdir", "mkfifo", "mknod")),
            (overlay.remove, ("unlink", "remove")),
            (functools.partial(overlay.remove, of_folder=True), ("rmdir",)),
            (_BY_CALL, ("open",)),
        ):
            for name in names:
                self._put(os, name, (0, "path", use), follow=name not in _OF_LINK)
        self._put(os, "symlink", (1, "dst", make), follow=False)
        self._put(os, "link", (0, "src", overlay.copy), (1, "dst", make), follow=False)
        for name in ("rename", "replace"):
            self._put(os, name, (0, "src", overlay.take), (1, "dst", overlay.replace), follow=False)
        Patch(
            os, "listdir", lambda original: self._list(original, lambda *all_: [entry.name for entry in _Scan(*all_)])
        )
        Patch(os, "scandir", lambda original: self._list(original, _Scan))
        Patch(os, "getcwd", lambda original: lambda: overlay.script_path(original()))
        Patch(os, "getcwdb", lambda _: lambda: os.fsencode(os.getcwd()))
        Patch(shutil, "_use_fd_functions", lambda _: False)  # an open folder is one of two places
        Patch(tempfile._RandomNameSequence, "__next__", self._note_name)  # type: ignore[attr-defined]
        Patch(io, "open", _open)
        self._rename({id(builtins.open): io.open})
        when_imported(_IN_C, self._follow)

    def _put(self, owner: Any, name: str, *paths: tuple[int, str, _Use | int], follow: bool = True) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def call(*arguments: Any, **named: Any) -> Any:
                return self._call(original, paths, follow, [*arguments], named)

            call.__module__ = owner.__name__  # by which it is pickled
            return call

        if hasattr(owner, name):
            Patch(owner, name, make)

    @passes_on
    def _call(self, original: Any, paths: Any, follow: bool, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call a function with the places of its arguments that are paths: of each, the index, the name and the use."""
        folder = None
        for index, keyword, use in paths:
            holder, key = (arguments, index) if len(arguments) > index else (named, keyword)
            if named:
                follow = named.get("follow_symlinks", follow)
                folder = named.get("dir_fd", named.get(f"{keyword}_dir_fd"))
            if isinstance(use, int):
                flags = use if use != _BY_CALL else named.get("flags", named.get("shared", [*arguments, 0, 0][1])) or 0
                flags = _UPDATE if flags is True else flags
                use = functools.partial(self._overlay.open, flags) if flags & _WRITES else self._overlay.read
            holder[key] = self._place(holder[key], use, follow, folder)
            if holder[key] is None:
                return None
        try:
            return original(*arguments, **named)
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = self._overlay.script_path(error.filename)
            raise

    @passes_on
    def _place(self, path: Any, use: _Use, follow: bool, folder: int | None) -> Any:
        try:
            if (file := self._overlay.locate(path, follow, folder)) is None:
                return path
            place = use(file)
            return os.fsencode(place) if place is not None and isinstance(path, bytes) else place
        except Exception as error:
            if is_of_signal(error):
                raise
            if use == self._overlay.read:
                return path
            code = error.errno if isinstance(error, OSError) else None
            text = os.strerror(code) if code else f"ddpcheck cannot keep this file apart: {error}"
            raise OSError(code or errno.EIO, text, path) from (None if code else error)

    def _list(self, original: Any, result: Callable[[dict[str, os.DirEntry[str]], Any], Any]) -> Any:
        def call(path: Any = ".") -> Any:
            file = None
            with contextlib.suppress(Exception):
                file = self._overlay.locate(path or ".")
            if file is not None and file.is_folder:
                return result(self._overlay.entries(file.path), os.fspath(path or "."))
            return self._call(original, ((0, "path", self._overlay.read),), True, [path], {})

        return functools.wraps(original)(call)

    def _note_name(self, original: Any) -> Any:
        def call(names: Iterator[str]) -> str:
            name = str(original(names))
            self._overlay.random_names.add(name)
            return name

        return call

    def _rename(self, new: dict[int, Any]) -> None:
        """Replace the functions under the names by which other modules have imported them."""
        real = vars(self._overlay.real)
        new |= {id(real[name]): value for name, value in vars(os).items() if value is not real[name]}
        for name, module in [*sys.modules.items()]:
            if isinstance(module, ModuleType) and name not in ("posix", "_io"):  # which the import system uses
                vars(module).update({key: new[id(value)] for key, value in [*vars(module).items()] if id(value) in new})
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            supported |= {new[id(function)] for function in supported if id(function) in new}
        for owner in filter(lambda value: isinstance(value, type), [*vars(glob).values(), *vars(tempfile).values()]):
            for name, value in [*vars(owner).items()]:
                if isinstance(value, staticmethod) and id(value.__func__) in new:
                    setattr(owner, name, staticmethod(new[id(value.__func__)]))
                elif isinstance(value, FunctionType) and value.__defaults__:
                    value.__defaults__ = tuple(new.get(id(default), default) for default in value.__defaults__)

    def _follow(self, module: ModuleType) -> None:
        for path, index, keyword, flags in _IN_C[module.__name__]:
            owner, _, name = path.rpartition(".")
            with contextlib.suppress(AttributeError):  # of a build of torch without it
                self._put(operator.attrgetter(owner)(module) if owner else module, name, (index, keyword, flags))


def _open(original: Any) -> Any:
    @passes_on
    def opener(path: Any, flags: int) -> int:
        return os.open(path, flags, 0o666)

    @functools.wraps(original)
    def call(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = opener,
    ) -> Any:  # fmt: skip
        return original(file, mode, buffering, encoding, errors, newline, closefd, opener)

    return call


class _Scan(contextlib.AbstractContextManager["_Scan"], Iterator["_Entry"]):
    """Iterator that `os.scandir` returns."""

    def __init__(self, entries: dict[str, os.DirEntry[str]], folder: Any) -> None:
        self._left = (_Entry(entry, folder) for entry in entries.values())
        self.close = self._left.close

    def __next__(self) -> _Entry:
        return next(self._left)

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Entry(os.PathLike[Any]):
    """An entry of a folder, under the path that the script knows."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        self.name: Any = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path = os.path.join(folder, self.name)
        self._entry, self.is_symlink, self.inode = entry, entry.is_symlink, entry.inode

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks and self.is_symlink() else self._entry.stat(follow_symlinks=False)

    def _is(self, kind: Callable[[int], bool], *, follow_symlinks: bool = True) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        return False

    is_dir = functools.partialmethod(_is, S_ISDIR)
    is_file = functools.partialmethod(_is, S_ISREG)
