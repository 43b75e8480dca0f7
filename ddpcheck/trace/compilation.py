"""Functions compiled by torch.compile, by rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import FunctionCompiled

CompilationsByRank = Sequence[Sequence[FunctionCompiled]]  # compilations of one function, by rank


RESUME_FUNCTION = re.compile(r".*torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
