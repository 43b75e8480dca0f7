"""Begins in each Python process of a watched script: runs the `sitecustomize` that it stands before, then `arming`.

Python imports the first `sitecustomize` of `sys.path` before it runs a script. The folder of this one is taken from
`sys.path` again, so that the script sees the path that it would have had; processes that it starts inherit PYTHONPATH.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _folder]

try:
    from ddpcheck.monitor.script import arming
except ImportError:  # another Python, in which ddpcheck is not installed: the report says that it was not watched
    pass
else:
    arming.wait_for_process_group()

_hidden = PathFinder.find_spec("sitecustomize")
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
else:
    del sys.modules["sitecustomize"]
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")  # as Python expects it
