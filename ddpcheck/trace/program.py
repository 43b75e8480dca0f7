"""Files and states that a script reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.replicas import NothingLoaded, RunningStatistic
from ddpcheck.findings.evidence.script import FileSizes, FileUsed
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import plural
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View


@dataclass(frozen=True, slots=True)
class Program(View):
    """Files that ranks read and write, and `load_state_dict` calls without effect."""

    checks = ("files",)
    uses: Sequence[Sequence[FileUsed]] = ()  # by rank, in order of time
    empty: Collection[str] = ()  # paths of files without content
    loads: Sequence[Sequence[NothingLoaded]] = ()  # by rank: `load_state_dict` calls without a matching key
    ended: bool = True  # if the script has reached its end

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        sizes = [item for entries in facts.events(FileSizes) for entry in entries for item in entry.sizes.items()]
        empty = {path for path, _ in sizes} - {path for path, size in sizes if size}
        return cls(facts.events(FileUsed), empty, facts.events(NothingLoaded), facts.ended)

    def require_end(self, subject: str) -> None:
        """Raise `NotRecorded` about `subject` if the script has not reached its end."""
        if not self.ended:
            raise NotRecorded(f"{subject} are not compared: the script has not reached its end")

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        if paths := {use.path for rank_uses in self.uses for use in rank_uses}:
            yield f"no fault in the uses of {plural(len(paths), 'file')}"


@dataclass(frozen=True, slots=True)
class Statistics(View):
    """Running statistics that the program keeps in its own variables."""

    checks = ("replicas",)
    by_rank: Sequence[Sequence[RunningStatistic]]

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        return cls(facts.events(RunningStatistic))
