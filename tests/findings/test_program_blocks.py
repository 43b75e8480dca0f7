"""What in a program may leave out a line, by its source."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpcheck.findings.program_blocks import omission_of, skipping_blocks

BODY = """\
def train(loader, options, optimizer):
    skipped = 0
    for i, batch in enumerate(loader):
        loss = compute(batch)
        loss.backward()
"""


@pytest.mark.parametrize(
    ("rest", "line", "found"),
    [
        ("if loss.item() > 9:\n    continue\noptimizer.step()", 8, [7]),
        ("if loss.isfinite():\n    optimizer.step()", 7, [6]),
        ("if (i + 1) % 4 == 0:\n    if batch.min() > 0:\n        optimizer.step()", 8, [7]),
        ("if options.sharded:\n    skipped += 1\nelif loss < 9:\n    optimizer.step()", 9, [8]),
        ("skipped += 1\nif skipped % 2:\n    continue\nif loss > 9:\n    continue\noptimizer.step()", 11, [10]),
        ("bad = bool(loss > 9)\nif bad:\n    continue\nif loss > 8:\n    continue\noptimizer.step()", 11, [8, 10]),
        ("if (i + 1) % 4 == 0:\n    optimizer.step()", 7, [6]),
    ],
)
def test_what_decides_in_each_pass_anew_is_told_from_counts_and_options(
    rest: str, line: int, found: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(BODY + "".join(f"        {one}\n" for one in rest.splitlines()), encoding="utf-8")
    blocks = skipping_blocks([f"train.py:{line}"], ["train.py:5"], {"train.py": str(file)})
    assert [block.line for block in blocks] == found


MODULES = """
from torch import nn

class Base(nn.Module):
    def __init__(self):
        self.aside = self.late = nn.Linear(4, 4)

    def encode(self, x):
        return self.aside(x)

    def grow(self, depth):
        return self.bud(self.shrink(depth))

    def shrink(self, depth):
        return self.grow(depth - 1)

    def forward(self, x, wide=False, names=()):
        for number, block in enumerate(self.blocks):
            if number in self.skipped:
                continue
            x = block(x)
        if x.sum() > 0:
            x = self.gate(x)
        else:
            x = x + self.other
        if wide:
            x = self.wide(x)
        one = self.experts[int(x.sum())]
        x = one(x) + sum(head(x) for name, head in self.heads.items() if name in names)
        y = self.always(x) + self.first[0](x)
        x = self.narrow(x) if wide else y
        if not names:
            return x
        return self.late(self.encode(x))

class Net(Base):
    pass

def train(model, batches):
    for step, x in enumerate(batches):
        model(x, wide=step % 2 == 0)
"""


@pytest.mark.parametrize(
    ("attribute", "line"),
    [
        *(("blocks", "continue"), ("gate", "if x.sum() > 0:"), ("other", "if x.sum() > 0:")),
        *(("wide", "model(x, wide=step % 2 == 0)"), ("narrow", "model(x, wide=step % 2 == 0)")),
        *(("experts", "one = self.experts[int(x.sum())]"), ("heads", "x = one(x) + sum(")),
        *(("late", "return x"), ("aside", "return x"), ("always", ""), ("first", ""), ("unknown", "")),
        ("bud", ""),  # its methods call each other
    ],
)
def test_the_line_of_a_class_that_may_leave_out_a_module(attribute: str, line: str, tmp_path: Path) -> None:
    module = ModuleType("net_of_this_test")
    module.__file__ = str(tmp_path / "net.py")
    (tmp_path / "net.py").write_text(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(MODULES, module.__file__, "exec"), module.__dict__)
        found = omission_of(attribute, module.Net)
    lines = MODULES.splitlines()
    assert (lines[found.line - 1].strip() if found else "").startswith(line) and bool(found) == bool(line)
