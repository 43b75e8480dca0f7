"""Start `arming` in each Python process of a watched script, then the hidden `sitecustomize`.

Python imports the first `sitecustomize` of `sys.path` before a script. The folder of this file is removed from
`sys.path`, so that the script sees its usual path; child processes inherit PYTHONPATH.
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
except ImportError:  # Python is too old for ddpcheck: reported as not watched
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
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")  # the error that Python expects
