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

_root = os.path.abspath(os.path.join(_folder, *[os.pardir] * 4))  # of the ddpcheck that the ranks report to
sys.path.insert(0, _root)
try:
    from ddpcheck.record.rank import arming
except ImportError:  # a Python that is too old for ddpcheck: the report says that it was not watched
    pass
else:
    arming.wait_for_process_group()
finally:
    sys.path.remove(_root)

_hidden = PathFinder.find_spec("sitecustomize")
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
else:
    del sys.modules["sitecustomize"]
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")  # as Python expects it
