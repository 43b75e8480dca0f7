"""Tests whose body runs on every rank: what they are given, what comes back, and the messages on mistakes.

One inner session runs all of them.
"""

from __future__ import annotations

import re

import pytest

from tests import innerhere, innerpytest

pytest_plugins = ["pytester"]

CONFTEST = """
import os, random
import pytest

@pytest.fixture
def base():
    return {"pid": os.getpid(), "sizes": [3, 4]}

@pytest.fixture
def layer(rank, base):  # each rank sets it up, with a value that this process has made
    import torch
    yield torch.nn.Linear(base["sizes"][0], rank + 1)
    print(f"torn down on rank {rank}, set up in {base['pid'] == os.getpid()}")

@pytest.fixture
def on_top(layer, base):
    return layer, base

@pytest.fixture(autouse=True)
def told(request):
    if "process_group" in request.fixturenames:
        os.environ["TOLD_BY_A_FIXTURE"] = request.node.name
    yield
    os.environ.pop("TOLD_BY_A_FIXTURE", None)

@pytest.fixture(params=[5, 7])
def each_on_rank(request, rank):
    request.addfinalizer(lambda: print("finalizer on", rank))
    return request.param + rank

@pytest.fixture
def seeded():
    import torch
    random.seed(11)
    torch.manual_seed(11)

@pytest.fixture
def model_and_optimizer():
    import torch
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    return model, {"param_groups": list(model.parameters())}  # a real optimizer imports the compiler, for seconds
"""

SOURCE = """
import logging, os, random, sys, threading, unittest, warnings
import pytest

@pytest.mark.ddp(world_size=[1, 2, 3])
def test_all_reduce(rank, world_size, device, process_group):
    import torch, torch.distributed as dist
    total = torch.tensor([float(rank)], device=device)
    dist.all_reduce(total, group=process_group)
    assert total.item() == sum(range(world_size)) and dist.get_world_size() == world_size
    assert device == torch.device("cpu")

@pytest.mark.ddp
@pytest.mark.parametrize("world_size, a", [(1, 5), (3, 6)])
def test_parametrized(a, world_size):
    import torch.distributed as dist
    assert dist.get_world_size() == world_size == a * 2 - 9

@pytest.mark.ddp
def test_fixtures_by_value_and_on_ranks(base, layer, on_top, rank):
    assert base["pid"] != os.getpid()
    assert layer.weight.shape == (rank + 1, 3)
    assert on_top[0] is layer and on_top[1] is base

@pytest.mark.ddp
def test_values_keep_gradients_and_what_they_share(model_and_optimizer):
    model, optimizer = model_and_optimizer
    assert optimizer["param_groups"][0] is model.weight and model.weight.grad.tolist() == [[1.0, 1.0]]

@pytest.mark.ddp
def test_parametrized_fixtures(each_on_rank, rank):
    assert each_on_rank - rank in (5, 7)

@pytest.mark.ddp
def test_environment_of_fixtures(process_group, request):
    assert os.environ["TOLD_BY_A_FIXTURE"] == request.node.name == "test_environment_of_fixtures"
    assert os.environ["PYTEST_CURRENT_TEST"].endswith("test_environment_of_fixtures (call)")

@pytest.mark.ddp
def test_seeds_of_fixtures(seeded, rank):
    import torch
    drawn = random.random(), torch.rand(1).item()
    random.seed(11); torch.manual_seed(11)
    assert drawn == (random.random(), torch.rand(1).item())

@pytest.mark.ddp
def test_without_a_seed_ranks_draw_for_themselves(rank):
    import torch, torch.distributed as dist
    drawn = [None, None]
    dist.all_gather_object(drawn, (random.random(), torch.rand(1).item()))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]

@pytest.mark.ddp
def test_built_in_fixtures(tmp_path, monkeypatch, capsys, caplog, recwarn, rank):
    (tmp_path / f"{rank}.txt").write_text("written")
    monkeypatch.setenv("SET_ON_RANK", str(rank))
    monkeypatch.chdir(tmp_path)
    assert os.environ["SET_ON_RANK"] == str(rank) and os.path.exists(f"{rank}.txt")
    print("heard")
    assert capsys.readouterr().out == "heard\\n"
    logging.getLogger("here").warning("logged on %d", rank)
    assert [record.getMessage() for record in caplog.records] == [f"logged on {rank}"]
    warnings.warn("warned")
    assert len(recwarn) == 1

@pytest.mark.ddp
def test_printed_and_logged(rank):
    print("printed by", rank)
    logging.error("logged by %d", rank)

@pytest.mark.ddp
def test_records_a_property(record_property, rank):
    record_property("world", "two")

class TestClass:
    shared = [1]

    def setup_method(self):
        self.number = 41

    @pytest.fixture(autouse=True)
    def prepared(self, rank):
        self.on_rank = rank

    @pytest.mark.ddp
    def test_method(self, rank, layer):
        assert self.number == 41 and self.on_rank == rank and self.shared == [1]

@pytest.mark.ddp(3)
class TestMarkedClass:
    def test_inherits(self, world_size):
        assert world_size == 3

    def test_the_fixture_inherits(self, ddp_world):
        assert ddp_world.run(int) == [0] * ddp_world.world_size == [0] * 3

    @pytest.mark.ddp(world_size=1)
    def test_the_closest_mark_wins(self, world_size):
        assert world_size == 1

@pytest.mark.ddp
def test_skips(rank):
    pytest.skip("not today")

def test_skips_by_the_fixture(ddp_world):
    ddp_world.run(lambda: pytest.skip("not on this day"))

@pytest.mark.ddp
def test_disagrees(rank):
    if rank == 1:
        pytest.skip("no camera")

@pytest.mark.ddp
def test_xfails(rank):
    pytest.xfail("known")

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
@pytest.mark.ddp
def test_marked_xfail():
    1 / 0

@pytest.mark.skipif(True, reason="never")
@pytest.mark.ddp
def test_skipif():
    1 / 0

@pytest.mark.ddp
def test_compares(rank):
    expected = {"loss": 1.0, "steps": [1, 2, 4]}
    assert {"loss": 1.0, "steps": [1, 2, 3]} == expected

@pytest.mark.ddp
@pytest.mark.filterwarnings("error:.*grave")
def test_a_warning_that_is_an_error():
    warnings.warn("something grave")

@pytest.mark.ddp
def test_returns():
    return 3

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.ddp
def test_unsendable(lock): pass

@pytest.mark.ddp
async def test_async(rank): pass

def test_not_marked(rank): pass

@pytest.mark.ddp
def test_both(ddp_world, rank): pass

@pytest.mark.ddp(world_size=[1, 3])
def test_the_mark_configures_the_fixture(ddp_world):
    pids = ddp_world.run(os.getppid)
    assert len(pids) == ddp_world.world_size in (1, 3) and os.getpid() not in pids

@pytest.fixture
def too_early(request):
    return request.getfixturevalue("rank") + 1

@pytest.mark.ddp
def test_rank_by_the_back_door(too_early): pass

@pytest.mark.ddp(world_size=0)
class TestNoRank:
    def test_none(self): pass

class TestUnit(unittest.TestCase):
    @pytest.mark.ddp
    def test_unit(self): pass

@pytest.fixture
def fails_on_rank(rank):
    yield
    assert rank == 0, "teardown"

@pytest.mark.ddp
def test_teardown_fails(fails_on_rank): pass

@pytest.mark.ddp
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_raises_is_an_error(rank):
    thread = threading.Thread(target=lambda: [][0])
    thread.start(); thread.join()

@pytest.mark.ddp
def test_a_forked_child_does_not_speak_for_its_rank(rank):
    if os.fork() == 0:
        return
    import time
    time.sleep(0.2)
    assert rank < 0, "the rank itself"

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
@pytest.mark.ddp
def test_another_rank_raises_something_else(rank):
    1 / 0 if rank == 0 else [][0]

@pytest.mark.ddp
def test_of_pytests_process(pytestconfig): pass

@pytest.fixture
def without_a_value(rank):
    if rank < 0:
        yield

@pytest.mark.ddp
def test_no_value(without_a_value): pass

@pytest.mark.ddp
def test_interrupted(rank):
    raise KeyboardInterrupt

def test_wrong_option(ddp_world):
    ddp_world(worldsize=3)

@pytest.mark.ddp(threads=1, env={"FOR_RANKS": "yes"})
def test_threads_and_environment():
    import torch
    assert torch.get_num_threads() == 1 and os.environ["FOR_RANKS"] == "yes"
"""

PASSED = """
test_all_reduce[1_rank] test_all_reduce[2_ranks] test_all_reduce[3_ranks] test_parametrized[1-5] test_parametrized[3-6]
test_fixtures_by_value_and_on_ranks test_values_keep_gradients_and_what_they_share test_environment_of_fixtures
test_parametrized_fixtures[5] test_parametrized_fixtures[7] test_seeds_of_fixtures test_built_in_fixtures
test_without_a_seed_ranks_draw_for_themselves test_printed_and_logged test_records_a_property test_method test_inherits
test_the_fixture_inherits test_the_closest_mark_wins test_returns test_threads_and_environment
test_the_mark_configures_the_fixture[1_rank] test_the_mark_configures_the_fixture[3_ranks]
""".split()
SKIPPED = {
    "test_skips": "not today",
    "test_skips_by_the_fixture": "not on this day",
    "test_xfails": "known",
    "test_marked_xfail": "",
    "test_skipif": "never",
}
FAILED = {
    "test_disagrees": "ranks disagree: rank 1 skipped (no camera), rank 0 passed",
    "test_compares": "{'steps': [1, 2, 3]} != {'steps': [1, 2, 4]}",
    "test_a_warning_that_is_an_error": "something grave",
    "test_unsendable": "The fixture 'lock' of test_unsendable has a value of type lock that cannot be sent",
    "test_async": "test_async is async, and @pytest.mark.ddp runs plain functions",
    "test_teardown_fails": "teardown",
    "test_a_thread_that_raises_is_an_error": "IndexError: list index out of range",
    "test_a_forked_child_does_not_speak_for_its_rank": "the rank itself",
    "test_another_rank_raises_something_else": "IndexError",
    "test_of_pytests_process": "it belongs to pytest's process",
    "test_no_value": "The fixture 'without_a_value' did not yield a value.",
    "test_interrupted": "KeyboardInterrupt",
    "test_wrong_option": "ddp_world has no option 'worldsize'; did you mean 'world_size'?",
    "test_none": "world_size of @pytest.mark.ddp must be a whole number from 1 to 1024, got 0",
}
REFUSED = {  # before it runs
    "test_not_marked": "The fixture 'rank' has a value on ranks only; mark test_not_marked with @pytest.mark.ddp",
    "test_both": "The body of a test that uses ddp_world runs in the parent, which has no 'rank'",
    "test_rank_by_the_back_door": "a fixture that uses it must name it as an argument",
    "test_unit": "not on test_inner.py::TestUnit::test_unit",
}


def test_marked_tests_run_on_ranks_and_their_outcomes_say_what_is_wrong(pytester: pytest.Pytester) -> None:
    innerpytest.write(pytester.path, conftest=CONFTEST, test_inner=SOURCE)
    printed = innerhere.run(pytester, "-rA", "--log-level=INFO", "--junitxml=report.xml", "-o", "junit_logging=all")
    tests = innerpytest.read(pytester.path / "report.xml")

    assert {name: tests[name].text for name in PASSED if tests[name].outcome != "passed"} == {}
    for outcomes, sentences in (({"skipped"}, SKIPPED), ({"failed"}, FAILED), ({"error", "failed"}, REFUSED)):
        for name, words in sentences.items():
            assert tests[name].outcome in outcomes and words in tests[name].text, (name, tests[name])
            assert "failed" not in outcomes or name in REFUSED or "ddpcheck/testing" not in tests[name].text, name
    assert tests.keys() == {*PASSED, *SKIPPED, *FAILED, *REFUSED}

    output = tests["test_printed_and_logged"].output
    for rank in (0, 1):
        assert f"printed by {rank}\n" in output
        assert f"Captured log of rank {rank} of 2 call" in printed and f"logged by {rank}" in printed
    assert "torn down on rank 1, set up in False" in tests["test_fixtures_by_value_and_on_ranks"].output
    assert "finalizer on 1" in tests["test_parametrized_fixtures[5]"].output
    assert printed.count("test_returns returned <class 'int'> on its ranks") == 1
    assert re.search(r"SKIPPED \[1\] test_inner.py:\d+: not today", printed), "the line of the test"
    assert (pytester.path / "report.xml").read_text().count('<property name="world" value="two"') == 1
    lines = tests["test_compares"].text.splitlines()
    assert lines[0].startswith(("rank 0: AssertionError: assert {", "rank 1: AssertionError: assert {"))
    assert "ranks 0 and 1 raised AssertionError" in tests["test_compares"].text
