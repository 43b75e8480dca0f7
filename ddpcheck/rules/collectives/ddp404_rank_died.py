"""DDP404 rank-died: error

The process of a rank ended without a Python exception: by a signal, an abort, or for lack of memory.

Why: There is no traceback, because Python could not write one. Causes are a mismatch that aborts inside the backend,
    a segmentation fault in an extension, os._exit, and the kernel's out-of-memory killer (SIGKILL). The other ranks
    see a closed connection.
Fix: Read the signal and the last output: for SIGKILL use less memory or fewer ranks; for SIGABRT look for a mismatch
    (DDP2xx); raise an exception instead of exiting.
Detected: DDP404 is reported if the process of a rank ends by a signal or with an exit code, but without a Python
    exception.
Ignore: Never.
Example:
    os._exit(3)                              # right: raise an exception
"""
