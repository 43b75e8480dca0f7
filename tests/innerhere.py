"""An inner pytest in this process, for a tenth of what one in a process of its own costs."""

from __future__ import annotations

import pytest

# What an inner pytest imports anew it does not share with us: torch does not stand that, and our fork server would not
# be its own. Nor may it be `pytester` that first sees these imported, for it forgets them again.
import torch.distributed  # noqa: F401

import ddpcheck.testing.session  # noqa: F401
from tests.innerpytest import PLUGINS


def run(pytester: pytest.Pytester, *arguments: str) -> str:
    """Run the tests of pytester's folder and return what is printed; ranks are forked from this process's server."""
    return str(pytester.runpytest_inprocess(*PLUGINS, *arguments).stdout)
