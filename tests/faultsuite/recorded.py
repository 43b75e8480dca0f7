"""Recorded worlds: the answers of a check's ranks, kept while it runs, and given again without ranks and torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.report import Report
from ddpcheck.gather.collectives.collective_log import log_path, read_log
from ddpcheck.harness import World, start_world
from ddpcheck.report import calls
from ddpcheck.report.checking.check import resolve_options
from ddpcheck.report.checking.check_report import report_of
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.worlds.run_future import RunFuture
from ddpcheck.worlds.validation import WorldOptions
from tests.faultsuite.cases import ROOT, Case
from tests.faultsuite.evidence import Encoder, EvidenceError, decode, dumped, fields_of, fields_that_differ, with_fields

FOLDER = ROOT / "tests" / "evidence"
COMMAND = "python -m tests.faultsuite.record"
TWINS = ("broken", "fixed")


def run_check(case: Case, twin: str, *, make_world: Callable[..., Any] = start_world) -> Report:
    """`ddpcheck.check` of one of the two recipes of a case, in such worlds."""
    asked = resolve_options(CheckOptions(**case.options), case.target(twin))
    return report_of(CheckRun(asked.target, asked, progress=lambda _text: None, make_world=make_world).run())


def spelled(call: Callable[[], Any]) -> str:
    """A phase with its arguments, as a check asks a world for it; of a path its last part, and no module."""
    said = list(_arguments(call))
    module = next(index for index, item in enumerate(said) if isinstance(item, str) and item in calls.MODULES)
    function, *given = said[module + 1 :]
    return f"{function}({', '.join(item.name if isinstance(item, Path) else repr(item) for item in given)})"


def _arguments(call: Any) -> Iterator[Any]:
    for item in call.args:
        yield from _arguments(item) if isinstance(item, partial) else (item,)


@dataclasses.dataclass
class Phase:
    """One phase of a check in one world, as `spelled`: its answers or its error, and what each rank has logged."""

    asked: str
    answers: Sequence[Any] | None = None
    error: RankError | None = None
    logs: Sequence[Sequence[Any]] = ()


class RecordingWorld(World):
    """A world that keeps what its ranks answer."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.phases: list[Phase] = []
        self._start_ranks(WorldOptions(world_size, **options))

    def start(self, call: Callable[[], Any], /, **options: Any) -> Any:
        self.phases.append(Phase(spelled(call)))
        return _RecordingFuture(super().start(call, **options), self, self.phases[-1])

    def read_logs(self) -> list[list[Any]]:
        """What each rank has logged since this was last called."""
        logged = [[call for phase in self.phases for call in phase.logs[rank : rank + 1]] for rank in self._ranks]
        known = [sum(map(len, calls)) for calls in logged]
        return [read_log(self.directory, rank)[known[rank] :] for rank in self._ranks]

    @property
    def _ranks(self) -> range:
        return range(self.world_size)


class _RecordingFuture:
    def __init__(self, future: RunFuture[Any], world: RecordingWorld, phase: Phase) -> None:
        self._future = future
        self._world = world
        self._phase = phase

    def result(self) -> list[Any]:
        try:
            self._phase.answers = self._future.result()
            return self._phase.answers
        except RankError as error:
            self._phase.error = error
            raise
        finally:
            self._phase.logs = self._world.read_logs()


def record(case: Case, twin: str) -> tuple[Report, list[list[Phase]]]:
    """Check one of the two recipes of a case on ranks; what its worlds have answered comes with the report."""
    worlds: list[RecordingWorld] = []

    def make_world(world_size: int, **options: Any) -> RecordingWorld:
        worlds.append(RecordingWorld(world_size, **options))
        return worlds[-1]

    return run_check(case, twin, make_world=make_world), [world.phases for world in worlds]


def evidence_text(case: Case, recorded: Mapping[str, list[list[Phase]]]) -> str:
    """The evidence of a case as JSON, with the digest of its file and the fields of each class of evidence."""
    encoder = Encoder()
    twins = {twin: [[_phase_data(encoder, p) for p in world] for world in worlds] for twin, worlds in recorded.items()}
    classes = {name: " ".join(fields_of(name)) for name in sorted(encoder.used)}
    return dumped({"source": _digest(case), "classes": classes, **twins}) + "\n"


def _digest(case: Case) -> str:
    return hashlib.blake2b(case.path.read_bytes(), digest_size=8).hexdigest()


def _phase_data(encoder: Encoder, phase: Phase) -> dict[str, Any]:
    data: dict[str, Any] = {"asked": phase.asked}
    if phase.error is not None:
        data["error"] = encoder.encode(phase.error)
    if phase.answers is not None:
        answers = [encoder.encode(answer) for answer in phase.answers]
        if all(json.dumps(answer) == json.dumps(answers[0]) for answer in answers):
            data |= {"each": answers[0]} if answers[0] is not None else {}
        else:
            data["answers"] = [answers[0], *(fields_that_differ(answers[0], answer) for answer in answers[1:])]
    if any(phase.logs):
        data["logs"] = [[encoder.encode(call) for call in log] for log in phase.logs]
    return data


def evidence_path(case: Case, folder: Path = FOLDER) -> Path:
    return folder / case.family / f"{case.path.stem}.json"


def write_evidence(case: Case, text: str, folder: Path = FOLDER) -> None:
    path = evidence_path(case, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Frames of torch are told in the same way wherever it is installed.
    path.write_text(re.sub(r"[^\\\"\s]*/site-packages/torch/", "torch/", text), encoding="utf-8")


def forget_others(cases: Iterable[Case]) -> None:
    """Remove what was recorded of faults that are none of `cases`."""
    for path in set(FOLDER.glob("*/*.json")) - set(map(evidence_path, cases)):
        path.unlink()


def read_evidence(case: Case, folder: Path = FOLDER) -> dict[str, Any]:
    """The recorded evidence of a case, by recipe; not decoded."""
    try:
        data: dict[str, Any] = json.loads(evidence_path(case, folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvidenceError(f"no evidence of {case} is recorded; run {COMMAND} {case}") from None
    if data["source"] != _digest(case):
        raise EvidenceError(f"{case}: the file has changed since its evidence was recorded; run {COMMAND} {case}")
    for name, fields in data["classes"].items():
        if fields.split() != [field for field in fields_of(name) if field in fields.split()]:  # others have a default
            differing = " ".join(set(fields.split()) ^ set(fields_of(name))) or "their order"
            raise EvidenceError(f"{case}: the fields of {name} have changed ({differing}); run {COMMAND}")
    return data


def replay(case: Case, twin: str, evidence: dict[str, Any]) -> Report:
    """Check one of the two recipes of a case in worlds that answer as recorded."""
    recorded = iter(evidence[twin])
    worlds: list[RecordedWorld] = []

    def make_world(world_size: int, **_options: Any) -> RecordedWorld:
        phases = next(recorded, None)
        if phases is None:
            raise EvidenceError(f"{case}, {twin}: the check makes another world than it did; run {COMMAND} {case}")
        worlds.append(RecordedWorld(f"{case}, {twin}", world_size, phases))
        return worlds[-1]

    report = run_check(case, twin, make_world=make_world)
    for world in worlds:
        if left := world.left():
            raise EvidenceError(f"{case}, {twin}: the check does not ask for {left}, as it did; run {COMMAND} {case}")
    return report


class RecordedWorld:
    """A world without ranks, whose answers were recorded."""

    def __init__(self, of: str, world_size: int, phases: Sequence[dict[str, Any]]) -> None:
        self.world_size = world_size
        self.failed = self.closed = False
        self._of = of
        self._phases = iter(phases)
        logged = any("logs" in phase for phase in phases)
        self._files = tempfile.TemporaryDirectory(prefix="ddpcheck-") if logged else None
        self.directory = Path(self._files.name) if self._files else FOLDER / "nothing logged"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        if self._files is not None:
            self._files.cleanup()

    def left(self) -> str:
        """The next phase that was asked for then, empty where there is none."""
        return str(next(self._phases, {"asked": ""})["asked"])

    def run(self, call: Callable[[], Any], /, *, timeout: float | None = None) -> list[Any]:
        return self.start(call).result()

    def start(self, call: Callable[[], Any], /) -> _RecordedFuture:
        asked, phase = spelled(call), next(self._phases, None)
        if phase is None or phase["asked"] != asked:
            was = phase["asked"] if phase is not None else "nothing more"
            raise EvidenceError(
                f"{self._of}: the check asks for {asked}, where it asked for {was} when its evidence was recorded; "
                f"where that is meant, run {COMMAND} {self._of.partition(',')[0]}"
            )
        return _RecordedFuture(self, phase)


class _RecordedFuture:
    def __init__(self, world: RecordedWorld, phase: dict[str, Any]) -> None:
        self._world = world
        self._phase = phase

    def result(self) -> list[Any]:
        for rank, log in enumerate(self._phase.get("logs", ())):
            with log_path(self._world.directory, rank).open("a") as file:
                file.writelines(f"{msgspec.json.encode(decode(call)).decode()}\n" for call in log)
        if "error" in self._phase:
            self._world.failed = True
            raise decode(self._phase["error"])
        if "answers" in self._phase:
            first, *others = self._phase["answers"]
            return [decode(first), *(decode(with_fields(first, other)) for other in others)]
        return [decode(self._phase.get("each")) for _ in range(self._world.world_size)]
