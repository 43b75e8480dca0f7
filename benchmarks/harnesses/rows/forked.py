"""The floor: ranks forked from a process that has imported torch; of the ranks only their exit is looked at."""

import os
import tempfile

from work import RANKS, TESTS, join, work


def rank(number: int, path: str) -> None:
    code = 1
    try:
        join(number, RANKS, path)
        work()
        code = 0
    finally:
        os._exit(code)  # a forked interpreter that has torch can stick at its end


with tempfile.TemporaryDirectory() as directory:
    for number in range(TESTS):
        pids = []
        for each in range(RANKS):
            pid = os.fork()
            if pid == 0:
                rank(each, os.path.join(directory, str(number)))
            pids.append(pid)
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            assert status == 0
