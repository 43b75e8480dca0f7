"""Parse `faulthandler` stacks of ranks, and detect ranks that wait for other ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.files import read_source
from ddpcheck.findings.named_functions import is_wrapper
from ddpcheck.findings.source_lines import OWN_FOLDER, is_of_program, is_user_file, relative_path

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}|\?\?\?),? in (?P<name>.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame of a Python stack."""

    file: str
    line: int
    name: str


def main_stack(dump: str) -> tuple[Frame, ...]:
    """Return the stack of the program in a `faulthandler` dump, most recent call first.

    The stack is from the thread in which a rank of ddpcheck runs tasks (the loop of `worlds.rank`), else from the
    thread that wrote the dump. Frames of torch are kept, frames of ddpcheck are not.
    """
    stack: tuple[Frame, ...] = ()
    for is_current, frames in _thread_stacks(dump):
        if (index := _index_of_loop(frames)) is not None:
            stack = frames[:index]
            break
        if is_current:
            stack = frames
    return _without_ddpcheck(stack)


def main_thread_dump(dump: str) -> str:
    """Reduce a dump to the main thread, relabelled as the dump's writer."""
    blocks = [block for block in _BLANK_LINE.split(dump) if block.lstrip().startswith(("Thread 0x", "Current thread"))]
    return re.sub(r"^\s*(Current thread|Thread)", "Current thread", blocks[-1]) if blocks else ""


def has_no_python_frames(dump: str) -> bool:
    """Check if the thread that wrote a dump has no Python frames (interpreter shutdown)."""
    return any(is_current and not frames for is_current, frames in _thread_stacks(dump))


def has_other_threads(dump: str) -> bool:
    """Check if a dump has Python threads (e.g. timers) besides the rank's loop."""
    return any(frames and _index_of_loop(frames) is None for _, frames in _thread_stacks(dump))


def program_threads(dump: str) -> list[tuple[Frame, ...]]:
    """Return stacks (without ddpcheck frames) of program threads that did not write the dump."""
    stacks = (frames for is_current, frames in _thread_stacks(dump) if not is_current)
    return [_without_ddpcheck(stack) for stack in stacks if any(is_of_program(frame.file) for frame in stack)]


_BLANK_LINE = re.compile(r"\n\s*\n")


def _thread_stacks(dump: str) -> list[tuple[bool, tuple[Frame, ...]]]:
    """Return (True if the thread wrote the dump, stack) for each thread."""
    return [(block.lstrip().startswith("Current thread"), frames_of(block)) for block in _BLANK_LINE.split(dump)]


def _without_ddpcheck(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in stack if not frame.file.startswith(OWN_FOLDER))


def frames_of(block: str) -> tuple[Frame, ...]:
    """Parse the frames of a `faulthandler` or `traceback` stack, in the same order."""
    return tuple(
        Frame(match["file"], int(match["line"]) if match["line"] != "???" else 0, match["name"])
        for match in map(_FRAME.match, block.splitlines())
        if match
    )


def _index_of_loop(frames: Sequence[Frame]) -> int | None:
    is_rank_file = [frame.file.startswith(OWN_FOLDER) and Path(frame.file).name == "rank.py" for frame in frames]
    return next((index for index, frame in enumerate(frames) if is_rank_file[index] and frame.name in _LOOP), None)


_LOOP = ("_run_task", "_answer", "_serve", "_set_up")  # functions of `worlds.rank`


def format_stack(frames: Sequence[Frame]) -> str:
    """Return a stack as text, most recent call first."""
    return "\n".join(f'  File "{relative_path(frame.file)}", line {frame.line}, in {frame.name}' for frame in frames)


def collective_of(frames: Sequence[Frame]) -> str:
    """Return the collective that a stack is in, e.g. "all_reduce at train.py:9", else `""`."""
    name = ""
    for frame in frames:
        if frame.file.endswith("distributed_c10d.py") and not frame.name.startswith("_") and frame.name != "wrapper":
            name = frame.name
        elif name and _is_user_frame(frame):
            return f"{name} at {_line_of(frame)}"
    return name


def traceback_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the last traceback in a text, most recent call first."""
    return frames_of(text.rpartition("(most recent call last)")[2])[::-1]


def collectives_of_threads(dump: str) -> list[str]:
    """Return the collectives of all threads except the writer of the dump.

    Includes threads of torch: the thread of `async_save` runs no line of the program.
    """
    return [call for is_current, frames in _thread_stacks(dump) if not is_current and (call := collective_of(frames))]


def program_lines(text: str) -> tuple[str, ...]:
    """Return the program's lines in a `faulthandler` dump or traceback, innermost first."""
    is_traceback = "(most recent call last)" in text
    frames = traceback_stack(text) if is_traceback else main_stack(text)
    return tuple(_line_of(frame) for frame in frames if is_of_program(frame.file) and _is_user_frame(frame))


CONSTRUCTOR = "the constructor of DistributedDataParallel"
FORWARD = "the forward of DistributedDataParallel"
BACKWARD = "backward"
WORKERS = "the wait for a worker of its data loader"
_REGIONS = (  # torch functions where a rank may wait for other ranks without calling a collective
    ("nn/parallel/distributed.py", "__init__", CONSTRUCTOR),
    ("nn/parallel/distributed.py", "forward", FORWARD),
    ("autograd/graph.py", "_engine_run_backward", BACKWARD),
    ("utils/data/dataloader.py", "_get_data", WORKERS),
)


def region_of(frames: Sequence[Frame]) -> str:
    """Describe the DDP, autograd or DataLoader function that a stack is in, else `""`."""
    for frame in frames:
        for file, name, words in _REGIONS:
            if frame.name == name and frame.file.replace("\\", "/").endswith(f"torch/{file}"):
                return words
    return ""


_WAITING = (  # innermost Python frames of ranks that wait in C++; `None`: any function of the file
    ("torch/distributed/distributed_c10d.py", None),
    ("torch/distributed/_functional_collectives.py", None),
    ("torch/distributed/utils.py", None),
    ("torch/nn/parallel/distributed.py", None),
    ("torch/autograd/graph.py", "_engine_run_backward"),
)


def waits_for_ranks(frames: Sequence[Frame]) -> bool:
    """Check if the innermost frame is torch code that may wait for other ranks."""
    return bool(frames) and any(
        f"/{frames[0].file}".replace("\\", "/").endswith(f"/{file}") and name in (None, frames[0].name)
        for file, name in _WAITING
    )


_LOCKS = ("threading.py", "queue.py")


def lock_waited_for(frames: Sequence[Frame]) -> str:
    """Return the blocking `threading` or `queue` call of a stack; "" if none.

    The wait ends when another thread of the same process releases the lock or fills the queue.
    """
    user_index = next((index for index, frame in enumerate(frames) if is_user_file(frame.file)), 0)
    if not user_index or any(os.path.basename(frame.file) not in _LOCKS for frame in frames[:user_index]):
        return ""
    return f"{frames[user_index - 1].name}() at {_line_of(frames[user_index])}"


_PICKLING = ("_object_to_tensor", "_tensor_to_object")


def is_pickling(frames: Sequence[Frame]) -> bool:
    """Check if a stack pickles objects for a collective (which may run user code)."""
    return any(frame.name in _PICKLING and frame.file.endswith("distributed_c10d.py") for frame in frames)


def work_waited_for(dump: str) -> str:
    """Return "wait() at train.py:9" if a rank waits for an asynchronous collective, else "".

    C++ adds no frame, so the innermost Python frame of such a rank is ddpcheck's wrapper of `Work.wait`.
    """
    innermost = (frames[0] for is_current, frames in _thread_stacks(dump) if is_current and frames)
    if any(frame.name == "wait" and frame.file == _WAIT_FILE for frame in innermost):
        return f"wait(){f' at {location}' if (location := innermost_line(main_stack(dump))) else ''}"
    return ""


_WAIT_FILE = os.path.join(OWN_FOLDER, "gather", "collectives", "collective_log.py")


_BLOCKING = re.compile(r"\.(wait|item|cpu|tolist|numpy|synchronize)\(")


def waits_for_result(frames: Sequence[Frame]) -> bool:
    """Check if the innermost line waits for a result, as `work.wait()` or `loss.item()` do.

    C++ adds no Python frame for these calls, so the source line is searched; False if the file is missing.
    """
    try:
        line = ["", *read_source(frames[0].file).splitlines()][frames[0].line]
    except (OSError, SyntaxError, ValueError, IndexError):
        return False
    return bool(_BLOCKING.search(line))


def is_waiting(failure: RankFailure) -> bool:
    """Check if a stuck rank is in a collective or waits for other ranks."""
    return bool(failure.collective) or waits_for_ranks(frames_of(failure.stack))


def innermost_frame(frames: Sequence[Frame]) -> str:
    """Return function and line of the innermost user frame, else of the innermost frame."""
    user_frames = [frame for frame in frames if _is_user_frame(frame)]
    return next((f"{frame.name} at {_line_of(frame)}" for frame in (*user_frames, *frames)), "")


def innermost_line(frames: Sequence[Frame]) -> str:
    """Return the innermost line of user code as "path:line", `""` if none."""
    return next((_line_of(frame) for frame in frames if _is_user_frame(frame)), "")


def _is_user_frame(frame: Frame) -> bool:
    """Return True for a user frame, except functions that merely wrap torch calls."""
    return is_user_file(frame.file) and not is_wrapper(frame.file, frame.name)


def _line_of(frame: Frame) -> str:
    return f"{relative_path(frame.file)}:{frame.line}"
