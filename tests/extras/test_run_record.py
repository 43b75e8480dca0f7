"""A run in a file: it is judged as the run was, and says nothing of the program."""

from __future__ import annotations

import gzip
import json
import os
import re
import string
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck import __main__ as cli
from ddpcheck.extras.run_record import Pseudonyms, here, judge_record, write_record
from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.files import decompress
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import ReplicaCaptured, Sketch
from tests.faultsuite.recorded_scripts import Run, left_by, report_on, runs
from tests.forked_run import run_forked
from tests.tiers import one_of, share

ROOT = Path(__file__).parents[2]
SENT = sorted((ROOT / "tests" / "sent_runs").glob("*.json.gz"))
RUNS = [run for run in runs() if not run.options]  # a file keeps no run in a single process
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
class Kestrel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.osprey = torch.nn.Linear(4, 1)
        self.buzzard = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.osprey(x)
dist.init_process_group("gloo")
falcon = DistributedDataParallel(Kestrel(), find_unused_parameters=True)
goshawk = torch.optim.SGD(falcon.parameters(), lr=0.012345)
for _ in range(3):
    goshawk.zero_grad()
    falcon(torch.randn(2, 4)).sum().backward()
    goshawk.step()
if dist.get_rank() == 1:
    raise ValueError("merlin weighs 0.1875 kg")
dist.destroy_process_group()
"""
WORDS = ("kestrel", "osprey", "buzzard", "falcon", "goshawk", "merlin", "0.1875", "0.012345", "harrier", "peregrine")


def in_short(report: Report) -> list[object]:
    """Return what must be the same: names, texts and the order of equal findings may differ."""
    findings = sorted((finding.code, finding.severity.value, finding.ranks) for finding in report.findings)
    lines = sorted(finding.location.line for finding in report.findings if finding.location is not None)
    return [findings, lines, [(check.name, check.status) for check in report.checks]]


def with_sketches(entry: Entry) -> Entry:
    if not isinstance(entry, ReplicaCaptured):
        return entry
    sketches = {
        field: {name: Sketch("f", numbers) for name, numbers in getattr(entry, field).items()}
        for field in ("own", "averaged")
    }
    return replace(entry, **sketches)


@pytest.mark.parametrize("run", share(list(dict.fromkeys([*RUNS[::8], *one_of(7, RUNS)])), RUNS[::24]), ids=str)
def test_a_run_that_was_written_is_judged_as_it_was(run: Run, tmp_path: Path) -> None:
    ending, ranks = left_by(run)
    ranks = [replace(rank, entries=[with_sketches(entry) for entry in rank.entries]) for rank in ranks]
    path = tmp_path / "run.json"
    source = ProgramSource()
    first = report_on_script(run.script, ending, ranks, source=source)
    report = write_record(path, run.script, ending, ranks, source)
    assert in_short(report) == in_short(first) == in_short(report_on(run))
    assert in_short(judge_record(path.read_text())) == in_short(report)


@pytest.mark.parametrize("path", SENT, ids=lambda path: path.name.partition(".")[0])
def test_runs_that_were_sent_are_judged_as_their_names_say(path: Path) -> None:
    codes = {finding.code for finding in judge_record(decompress(path.read_bytes()).decode()).findings}
    assert codes == set(re.findall(r"DDP\d{3}", path.name))


@pytest.mark.slow
def test_a_file_says_nothing_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "harrier"
    folder.mkdir()
    (folder / "peregrine.py").write_text(SCRIPT)
    done = run_forked("--check-record=run.json.gz", "--check-timeout=10", "peregrine.py", "--eyas=7", cwd=folder)
    assert "ddpcheck render run.json.gz" in done.stderr and "is not found in it" not in done.stderr, done.stderr
    codes = set(re.findall(r"^DDP\d{3}", done.stderr, re.MULTILINE))
    assert "DDP401" in codes
    text = decompress((folder / "run.json.gz").read_bytes()).decode()
    assert not [word for word in (*WORDS, "eyas", str(tmp_path)) if word in text.lower()]
    assert cli.main(["render", str(folder / "run.json.gz")]) == 0
    assert set(re.findall(r"^DDP\d{3}", capsys.readouterr().out, re.MULTILINE)) == codes


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b'{"kind": "run"}', mtime=0)[:-9],
        b'{"kind": "run"}',
        b'{"kind": "run", "ending": 1, "ranks": [], "script": "", "source": {}}',
        b'{"kind": "run", "ending": {}, "ranks": [[]], "script": "", "source": {}}',
        b'{"kind": "run", ',
    ],
    ids=["cut off", "empty", "no ending", "no rank", "no JSON"],
)
def test_a_damaged_file_is_refused(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes(data)
    assert cli.main(["render", str(tmp_path / "run.json")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "run.json" in message


def test_entries_of_other_versions_are_counted(tmp_path: Path) -> None:
    ending, ranks = left_by(RUNS[0])
    write_record(tmp_path / "run.json", "train.py", ending, ranks, ProgramSource())
    data = json.loads((tmp_path / "run.json").read_text())
    data["ranks"][0]["entries"].append(["OfTomorrow", {}])
    data["ranks"][0]["of_tomorrow"] = 1
    (check,) = (check for check in judge_record(json.dumps(data)).checks if check.name == "ranks")
    assert "part" in check.detail and "could not be read" in check.detail


@pytest.mark.slow
def test_a_file_that_cannot_be_written_does_not_take_the_report_away(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "import torch.distributed as d; d.init_process_group('gloo'); d.destroy_process_group()"
    )
    done = run_forked("--check-record", str(tmp_path / "no/r"), "plain.py", cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "cannot write" in done.stderr and "no findings" in done.stderr


WORD = st.text(string.ascii_letters + "_", min_size=1).filter(lambda word: word.strip("_"))


@settings(deadline=None, max_examples=40)  # the first call reads the words of torch
@given(st.lists(WORD, min_size=1))
def test_a_name_is_replaced_by_the_same_one_everywhere_and_by_no_other_ones(words: list[str]) -> None:
    names = Pseudonyms()
    replaced = [names.replaced(word) for word in words]
    again = names.replaced(".".join(words)).split(".")
    assert again == replaced
    assert len(set(replaced)) == len(set(words))


def test_words_of_torch_and_places_on_this_machine() -> None:
    names = Pseudonyms()
    assert names.replaced("DistributedDataParallel weight at train.py:12, 5 of 7") == (
        "DistributedDataParallel weight at train.py:12, 5 of 7"
    )
    text = names.replaced("kestrel = 0.25 or 0.5 or 0.25 or 0.0, at 127.0.0.1:80 and 3.")
    assert text == "name1 = 2.5 or 3.5 or 2.5 or 0.0, at 127.0.0.1:80 and 4.5"
    package = f"{sysconfig.get_path('purelib')}/torch/nn/modules/linear.py"
    assert names.replaced(package).startswith("{packages}/torch")
    assert here(names.replaced(package)) == package
    assert here(names.replaced(f"{os.getcwd()}/train.py")) == f"{os.getcwd()}/train.py"
    assert str(Path.home()) not in names.replaced(f"{Path.home()}/kestrel") or str(Path.home()) == "/"
