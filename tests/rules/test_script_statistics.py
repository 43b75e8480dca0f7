"""DDP217: running statistics of a rank's own samples, and by what they are told from all that only looks like them."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.findings.evidence.replicas import RunningStatistic
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.statistics_recorder import StatisticsRecorder
from ddpcheck.record.source import source_scope
from ddpcheck.record.source.source_scope import updating_line, writing_line
from ddpcheck.rules.program.ddp217_input_statistics import judge_statistics
from ddpcheck.trace.program import Statistics
from tests.reports import assert_says

LINE = Location("train.py", 8)
UNITS = torch.tensor([0.1, 1.0, 5.0, 40.0, 2.0, 0.5])


@pytest.fixture(autouse=True)
def program_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for lines in this file only, not in those of all tests that this process has imported."""
    monkeypatch.setattr(source_scope, "program_files", lambda: (__file__,))


def looks(*values: float, equations: int = 5, exchanged: int = 0) -> list[RunningStatistic]:
    return [
        RunningStatistic(0, forward, "norm.mean", (value, 1.0), (2.0, 1.0), equations, LINE, exchanged)
        for forward, value in enumerate(values, 1)
    ]


def test_a_statistic_that_differs_between_ranks_at_each_look() -> None:
    findings = judge_statistics(Statistics([looks(1.0, 2.0, 3.0), looks(1.5, 2.5, 3.5)]))
    assert_says(findings, f"DDP217 ... ('norm.mean',) ... at {LINE} ... by 0.25 times the divisor ... 3 calls")


def samples(start: float) -> list[RunningStatistic]:
    """A variable that fits by chance now and then."""
    held = looks(*(start + number**2 % 7 for number in range(8)), equations=0)
    return [replace(one, equations=int(one.forward in (1, 4, 8))) for one in held]


def moved(*values: float, unexplained: int) -> list[RunningStatistic]:
    return [replace(one, moves=4, unexplained_moves=unexplained) for one in looks(*values)]


@pytest.mark.parametrize(
    ("here", "there", "count"),
    [
        (looks(1.0, 2.0, 3.0), looks(1.5, 2.0, 3.5), 0),  # brought together in between
        (looks(1.0, 2.0, 3.0), looks(1.5, 2.5, 3.5, equations=0), 0),  # only held
        (looks(1.0, 2.0, 3.0), looks(1.5, 2.5, equations=1), 0),  # by chance
        (moved(1.0, 2.0, 3.0, unexplained=2), moved(1.5, 2.5, 3.5, unexplained=2), 1),
        (moved(1.0, 2.0, 3.0, unexplained=3), moved(1.5, 2.5, 3.5, unexplained=3), 0),  # it moves elsewhere as often
        (samples(1.0), samples(1.5), 0),
        (looks(1.0, 2.0, 3.0), looks(1.5, 2.5, 3.5, exchanged=1), 0),
        (looks(1.0, 2.0, 3.0), looks(1.5, equations=9), 0),  # seen once
    ],
)
def test_what_is_averaged_or_not_known_to_be_a_statistic(here: Any, there: Any, count: int) -> None:
    assert len(judge_statistics(Statistics([here, there]))) == count
    assert not judge_statistics(Statistics([here]))


def followed(module: nn.Module) -> tuple[list[RunningStatistic], StatisticsRecorder]:
    """Return the entries of a module, and the recorder, which must stay alive."""
    torch.manual_seed(1)
    found: list[RunningStatistic] = []
    recorder = StatisticsRecorder(Recording(found.append))
    recorder.follow(module, 0)
    return found, recorder


class Running:
    def __init__(self) -> None:
        self.mean, self.var, self.count = torch.zeros(6), torch.ones(6), 0
        self.log, self.faded = torch.zeros(6), torch.ones(6)

    def fade(self) -> None:
        self.faded.mul_(0.9)

    def update(self, x: Tensor) -> None:
        self.count += 1
        self.mean = self.mean + (x.mean(0) - self.mean) / (self.count + 1)
        self.var = self.var + (x.var(0) - self.var) / (self.count + 1)


def running_mean_and_variance() -> Callable[[Tensor], Tensor]:
    running = Running()

    def normalised(x: Tensor) -> Tensor:
        running.update(x)
        return (x - running.mean) / (running.var + 1e-5).sqrt()

    return normalised


def average_of_numpy() -> Callable[[Tensor], Tensor]:
    state: dict[str, Any] = {"m": np.zeros(6), "q": np.ones(6)}

    def normalised(x: Tensor) -> Tensor:
        rows = x.numpy().astype(np.float64)
        out = (rows - state["m"]) / np.sqrt(np.maximum(state["q"] - state["m"] ** 2, 1e-8))
        state["m"] = 0.9 * state["m"] + 0.1 * rows.mean(0)
        state["q"] = 0.9 * state["q"] + 0.1 * (rows**2).mean(0)
        return torch.from_numpy(out).float()

    return normalised


def constants_beside_a_log() -> Callable[[Tensor], Tensor]:
    running, total = Running(), [torch.zeros(6), torch.zeros(6)]

    def normalised(x: Tensor) -> Tensor:
        running.update(x)
        given = (x - UNITS) / UNITS
        total[0] += given.sum(0)
        total[1] += given.square().sum(0)
        running.log = 0.9 * running.log + 0.1 * given.mean(0)
        return given

    return normalised


def observed(count: int) -> Tensor:
    return UNITS * (torch.randn(count, 6) + 1)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (running_mean_and_variance, {"running.mean"}),
        (average_of_numpy, {"state['m']"}),
        (constants_beside_a_log, set()),
    ],
)
def test_it_is_known_by_the_inputs_alone(make: Callable[[], Callable[[Tensor], Tensor]], names: set[str]) -> None:
    module = nn.Linear(6, 1)
    statistics, _recorder = followed(module)
    normalised = make()
    for _ in range(10):
        module(normalised(observed(16)))
    assert {statistic.name.partition(".")[2] for statistic in statistics if statistic.equations} == names
    assert not names or sum(statistic.equations == 5 for statistic in statistics) >= 4


def test_variables_of_all_kinds_are_passed_over() -> None:
    module = nn.Identity()
    looks_of_module, _recorder = followed(module)
    kinds = [torch.zeros(6, dtype=torch.bool), np.zeros(6, ">f8"), np.arange(6.0)[::-1], torch.eye(6).to_sparse()]
    flags, swapped, reversed_, sparse = kinds
    for x in (torch.zeros(0, 6), torch.zeros(()), torch.zeros(6, dtype=torch.float8_e5m2), torch.randn(2, 6, 6, 6)):
        module(x)
        module(x)
    assert not looks_of_module
    del flags, swapped, reversed_, sparse


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_rollout_of_which_forward_is_given_parts(all_ranks: bool) -> None:
    module, running = nn.Linear(6, 1), Running()
    found, _recorder = followed(module)
    for _ in range(8):
        rows = observed(32)
        running.update(rows)
        if all_ranks:
            rows = (rows - running.mean) / running.var.sqrt()
        for part in torch.randperm(32).view(2, 16):
            x = rows[part]
            module(x if all_ranks else (x - running.mean) / running.var.sqrt())
    assert {one.name for one in found} == {"running.mean"} and sum(one.equations == 5 for one in found) > 1


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Welford:
    """As many write it: one row after the other, normalised to at most 5."""

    def __init__(self) -> None:
        self.n, self.centre, self.spread = 0, np.zeros(6), np.zeros(6)

    def see(self, rows: Any) -> None:
        for row in rows:
            self.n += 1
            way = row - self.centre
            self.centre = self.centre + way / self.n
            self.spread = self.spread + (way * (row - self.centre) - self.spread) / self.n

    def __call__(self, rows: Any) -> Tensor:
        scaled = (rows - self.centre) / np.sqrt(self.spread + 1e-8)
        return torch.from_numpy(np.clip(scaled, -5, 5)).float()


def acts_then_trains_on_raw_rows(ddp: DistributedDataParallel) -> None:
    norm, replay = Welford(), np.zeros((0, 6))
    for _ in range(30):
        row = observed(1).numpy()
        norm.see(row)
        with torch.no_grad():
            ddp.module(norm(row))
        replay = np.concatenate([replay, row])
        if len(replay) > 8:
            ddp(norm(replay[torch.randint(len(replay) - 2, (16,)).numpy()])).sum().backward()


def acts_by_the_wrapper_and_updates_later(ddp: DistributedDataParallel) -> None:
    seen, middle, power = 0, torch.zeros(6), torch.ones(6)
    for _ in range(4):
        rollout = []
        for _ in range(10):
            raw = observed(8)
            x = ((raw - middle) / (power - middle.square()).clamp_min(1e-8).sqrt()).clamp(-4, 4)
            with torch.no_grad():
                ddp(x)
            rollout.append(x)
            seen += 1
            middle = middle + (raw.mean(0) - middle) / seen
            power = power + (raw.square().mean(0) - power) / seen
        for part in torch.cat(rollout)[torch.randperm(80)].split(20):
            ddp(part).sum().backward()


def replaced_after_training(ddp: DistributedDataParallel) -> None:
    """By that of all ranks, of which only sums were given to a collective: here, some others."""
    norm, total = Welford(), torch.zeros(6)
    for number in range(4):
        rollout = []
        for _ in range(9):
            raw = observed(8)
            norm.see(raw.numpy())
            total += raw.sum(0) + observed(8).sum(0)
            x = norm(raw.numpy())
            with torch.no_grad():
                ddp.module(x)
            rollout.append(x)
        for part in torch.cat(rollout)[torch.randperm(72)].split(24):
            ddp(part).sum().backward()
        norm.centre = total.double().numpy() / (144 * (number + 1))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("trains", "name"),
    [
        (acts_then_trains_on_raw_rows, "norm.centre"),
        (acts_by_the_wrapper_and_updates_later, "middle"),
        (replaced_after_training, None),
    ],
)
def test_it_moves_in_each_step_of_a_rollout(trains: Callable[[DistributedDataParallel], None], name: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(6, 1))
    statistics, _recorder = followed(ddp)
    trains(ddp)
    on_rank_1 = [replace(item, values=tuple(2 * value + 1 for value in item.values)) for item in statistics]
    subjects = [finding.subjects for finding in judge_statistics(Statistics([statistics, on_rank_1]))]
    assert subjects == ([(name,)] if name else [])


def test_the_line_that_updates_is_in_the_class_and_makes_the_new_value_of_the_old_one() -> None:
    for path, holder, text in (
        ("self.norm.mean", Running, "self.mean = self.mean + (x"),
        ("self.norm.faded", Running, "self.faded.mul_(0.9)"),
        ("state['q']", dict, 'state["q"] = 0.9 *'),
    ):
        line = updating_line(path, holder)
        assert line is not None and linecache.getline(line.path, line.line).strip().startswith(text)
    assert updating_line("nowhere.set_to_anything", Running) is None


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))  # which another class of this file has, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return x - self.mean


def test_a_buffer_is_written_by_its_own_module_or_a_function() -> None:
    outer = nn.Sequential(Counted())
    line = writing_line(outer, "0.rows")
    assert line is not None and "self.rows += len(x)" in linecache.getline(line.path, line.line)
    assert writing_line(outer, "0.mean") is None and writing_line(outer, "0.inner.running_mean") is None


def test_a_statistic_that_a_collective_is_given() -> None:
    module, running, call = nn.Linear(6, 1), Running(), Call("all_reduce", "", (0, 1))
    found, recorder = followed(module)
    for number in range(6):
        x = observed(16)
        running.update(x)
        if number == 4:
            sums = torch.cat([torch.ones(1), 64 * running.mean])
            recorder.note_collective(Call("all_reduce", "", (0,)), {"tensor": torch.randn(9)})  # of no other rank
            recorder.note_collective(call, {"tensor": torch.randn(9)})
            recorder.note_collective(call, {"tensor": sums})
        module((x - running.mean) / running.var.sqrt())
    assert [one.collectives for one in found] == [0, 0, 0, 1, 1]
