"""Logs of ranks as bytes: read again as they were, after any cut, and by versions that know more or less."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.evaluation import ResultExchanged
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.script import FileUsed, Inputs
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.run.ending import Ending
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.codec import decoded, encoded, entry_from_fields, fields_of_entry
from ddpcheck.stream.entries import (
    KINDS,
    SCHEMA,
    GroupUsed,
    ProgramEnded,
    RankRaised,
    RankStarted,
    ReplicaCaptured,
    Sketch,
)
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import ReplicaState, is_sampled
from tests.faultsuite.recorded_scripts import Run, left_by, runs
from tests.tiers import first_of_each

NAN = float("nan")
STARTED = RankStarted(0, 2, "gloo")


def framed(kind: str, fields: dict[str, Any]) -> bytes:
    """An entry as another version may write it."""
    data = msgspec.msgpack.encode((kind, fields))
    return struct.pack("<I", len(data)) + data


def fields_of(entry: Entry) -> dict[str, Any]:
    """What is written of an entry."""
    return dict(msgspec.msgpack.decode(encoded(entry)[4:])[1])


def kinds_in(run: Run) -> list[str]:
    text = run.path.read_text(encoding="utf-8")
    return [kind for kind in KINDS if kind in text]


@pytest.fixture(scope="module")
def recorded() -> list[Entry]:
    """Different entries of ranks of scripts, of each kind that there is."""
    by_kind: dict[type, dict[str, Entry]] = {}
    for run in first_of_each(runs(), kinds_in):
        for rank in left_by(run)[1]:
            for entry in (rank.started, *rank.entries):
                known = by_kind.setdefault(type(entry), {})
                if len(known) == 20:
                    continue
                if isinstance(entry, ReplicaCaptured):  # a record has tuples, as JSON has
                    own, averaged = ({n: Sketch("f", s) for n, s in of.items()} for of in (entry.own, entry.averaged))
                    entry = replace(entry, own=own, averaged=averaged)
                known[repr(entry)] = entry
    return [entry for entries in by_kind.values() for entry in entries.values()]


def test_entries_are_read_as_they_were_written(recorded: list[Entry]) -> None:
    assert len({type(entry) for entry in recorded}) > 45
    assert decoded(b"".join(map(encoded, recorded))) == (recorded, 0)


def test_a_log_is_read_after_a_cut_at_each_byte() -> None:
    entries: list[Entry] = [STARTED, GroupUsed("0", (0, 1)), ProgramEnded()]
    data = [encoded(entry) for entry in entries]
    for cut in range(len(b"".join(data)) + 1):
        whole = sum(len(b"".join(data[: number + 1])) <= cut for number in range(3))
        assert decoded(b"".join(data)[:cut]) == (entries[:whole], 0)


def test_a_newer_version_may_have_more_fields_and_more_kinds(recorded: list[Entry]) -> None:
    more = {"since_schema_2": [1, {"a": 2.5}]}
    newer = [framed(type(entry).__name__, {**fields_of(entry), **more}) for entry in recorded]
    newer.insert(3, framed("KindOfSchema2", {"rank": 0}))
    assert decoded(b"".join(newer)) == (recorded, 1)


def test_an_older_version_may_have_fewer_fields(recorded: list[Entry]) -> None:
    older, now = [], []
    for entry in recorded:
        fields = fields_of(entry)
        if added := [one for one in structs.fields(entry) if not one.required]:
            last = added[-1]
            del fields[last.name]
            made = last.default if last.default_factory is msgspec.NODEFAULT else last.default_factory()
            entry = replace(entry, **{last.name: made})
        older.append(framed(type(entry).__name__, fields))
        now.append(entry)
    assert decoded(b"".join(older)) == (now, 0)


def test_an_entry_without_what_it_needs_is_counted_and_passed_over() -> None:
    unusable = framed("GroupUsed", {"members": [0]}) + framed("GroupUsed", {"name": 1}) + b"\4\0\0\0\xc1abc"
    assert decoded(encoded(STARTED) + unusable + encoded(ProgramEnded())) == ([STARTED, ProgramEnded()], 3)
    assert decoded(b"cos\nsystem\n(S'exit 1'\ntR." * 9) == ([], 0)  # nothing that is read is run


def test_the_report_says_that_there_was_more() -> None:
    for schema, status, detail in (
        (SCHEMA + 1, "skipped", "another version of ddpcheck wrote their logs: 2 parts of them were not judged"),
        (SCHEMA, "error", "2 parts of their logs could not be read; this is a bug in ddpcheck"),
    ):
        started = [replace(STARTED, rank=rank, schema=schema) for rank in (0, 1)]
        ranks = [RankTrace(each, [ProgramEnded()], [(0, 0)] * 256, unknown=2 - 2 * each.rank) for each in started]
        (check,) = (each for each in report_on_script("train.py", Ending(), ranks).checks if each.name == "ranks")
        assert (check.status, check.detail) == (status, detail)


def test_numbers_and_names_that_json_has_not() -> None:
    numbers = (math.inf, -math.inf, 5e-324, 1e308)
    (entry,), _ = decoded(encoded(ResultExchanged(0, "all_reduce", None, False, numbers=(*numbers, NAN))))
    assert isinstance(entry, ResultExchanged)
    assert entry.numbers[:4] == numbers and math.isnan(entry.numbers[4])
    names = [name.decode("utf-8", "surrogateescape") for name in (b"/data/\xe9.pt", b"/data/\xe8.pt")]
    read = [decoded(encoded(FileUsed(name, True, 0, 0, None)))[0][0] for name in names]
    assert [one.path for one in read if isinstance(one, FileUsed)] == ["/data/\\udce9.pt", "/data/\\udce8.pt"]
    (entry,), _ = decoded(encoded(RankRaised({"code": 1 << 80, "whole": True, "text": "\ud800"})))
    assert entry == RankRaised({"code": (1 << 64) - 1, "whole": True, "text": "\\ud800"})


@pytest.mark.parametrize("value", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_fingerprints_of_64_bits_are_what_they_were_when_they_are_written_for_others(value: int) -> None:
    entry = Inputs(0, 0, (value,), None)
    assert entry_from_fields(*fields_of_entry(entry)) == entry
    assert decoded(encoded(entry)) == ([entry], 0)


def test_sketches_are_kept_in_float32() -> None:
    numbers = [random.Random(0).gauss(0, 10**power) for power in range(-30, 30)]
    state = ReplicaState(ModuleDescription(), DdpStepEvidence(0, 0))
    entry = ReplicaCaptured(0, 0, state, own={"weight": Sketch("f", numbers)}, hook="\udce9")  # which is no text
    assert decoded(encoded(entry)) == ([replace(entry, hook="\\udce9")], 0)
    entry = replace(entry, hook="")
    (read,), _ = decoded(encoded(entry))
    assert isinstance(read, ReplicaCaptured)
    assert read == entry
    assert read.own["weight"] == pytest.approx(numbers, rel=1e-7)
    assert len(encoded(entry)) < 4 * len(numbers) + 420


@pytest.mark.parametrize("every", [0, 10])
def test_the_first_steps_are_sampled_whatever_the_option(every: int) -> None:
    assert [step for step in range(10) if is_sampled(step, every)] == [0, 1, 2, 4, 8]


def test_values_of_derived_classes_are_plain() -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise AssertionError

    class Whole(int):
        pass

    given: Any = (np.float64(0.5), np.float32(0.25), np.int64(2), Whole(3))
    during: Any = np.bool_(True)
    entry = ResultExchanged(Whole(1), Text("all_reduce"), None, during, numbers=given)
    assert decoded(encoded(entry)) == ([ResultExchanged(1, "all_reduce", None, True, numbers=(0.5, 0.25, 2, 3))], 0)
