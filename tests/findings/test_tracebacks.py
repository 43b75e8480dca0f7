"""Tracebacks: the user's frames are shown, and what lies between them is one line."""

from __future__ import annotations

import pytest

from ddpcheck.findings import stacks
from ddpcheck.findings.tracebacks import fold_traceback
from ddpcheck.worlds import rank

WHOLE = """\
Traceback (most recent call last):
  File "ddpcheck/recipe/recipe.py", line 138, in call
    return function(*args)
  File "train.py", line 43, in loss
    return (model(x) - x).square().mean()
            ^^^^^^^^
  File "torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  [Previous line repeated 3 more times]
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1884, in _call_impl
    return inner()
  File "/usr/lib/python3.11/contextlib.py", line 81, in inner
    return func(*args, **kwds)
  File "/env/lib/python3.11/site-packages/timm/models.py", line 7, in forward
    return self.fc(x)
  File "torch/nn/functional.py", line 3, in linear
    ...
RuntimeError: shapes

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "net.py", line 3, in <module>
    raise ValueError
ValueError"""

FOLDED = """\
Traceback (most recent call last):
  ... 1 frame of ddpcheck
  File "train.py", line 43, in loss
    return (model(x) - x).square().mean()
            ^^^^^^^^
  ... 3 frames of torch and Python
  File "/env/lib/python3.11/site-packages/timm/models.py", line 7, in forward
    return self.fc(x)
  ... 1 frame of torch
RuntimeError: shapes

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "net.py", line 3, in <module>
    raise ValueError
ValueError"""


def test_runs_of_frames_of_libraries_are_one_line_each() -> None:
    assert fold_traceback(WHOLE) == FOLDED
    own = 'Traceback (most recent call last):\n  File "torch/a.py", line 1, in f\n    x\nValueError: x'
    for text in (FOLDED, own, "", "no traceback", "  File without a line", "rank 1:\n  indented"):
        assert fold_traceback(text) == text
    assert "of torch" in fold_traceback(own + "\n\n" + WHOLE) and fold_traceback(own + "\n\n" + WHOLE).startswith(own)


@pytest.mark.parametrize("file", ["torch.py", "src/torch/x.py", "threading2.py"])
def test_files_of_the_user_with_similar_names_are_shown(file: str) -> None:
    text = f'  File "{file}", line 3, in f\n    x\n  File "torch/a.py", line 1 in g'
    assert fold_traceback(text) == f'  File "{file}", line 3, in f\n    x\n  ... 1 frame of torch'


def test_the_functions_by_which_the_loop_of_a_rank_is_known_exist() -> None:
    assert [name for name in stacks._LOOP if not callable(getattr(rank, name, None))] == []
