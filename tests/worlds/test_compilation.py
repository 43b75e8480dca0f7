"""`torch.compile` on ranks: its time is no hang, and what a check runs is the code as it is written."""

import time

import pytest
import torch

from ddpcheck.findings.errors import HangError
from ddpcheck.testing.fixture import DDPWorld


@pytest.mark.slow
def test_time_that_compilation_takes_does_not_count_against_the_timeout(ddp_world: DDPWorld) -> None:
    def sleep_in_a_compiler(seconds: float) -> float:
        def slow(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
            time.sleep(seconds)
            return graph.forward

        return float(torch.compile(lambda x: x + 1, backend=slow)(torch.ones(())))

    world = ddp_world(timeout=5)
    world.run(sleep_in_a_compiler, 0.0, timeout=100)  # which imports what it needs
    assert world.run(sleep_in_a_compiler, 6.0) == [2.0, 2.0]
    with pytest.raises(HangError, match="did not finish within 5 s"):
        world.run(time.sleep, 6.0)


def run_compiled_code() -> list[bool]:
    """Whether compiled code is compiled: in a check, in its block for that, and in the control flow that needs it."""
    from ddpcheck.worlds.compilation import run_eagerly, stance, uses_compile

    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return graph.forward

    run_eagerly()
    x = torch.ones(3, requires_grad=True)
    torch.cond(x.sum() > 2, torch.sin, torch.cos, (x,)).sum().backward()
    control_flow = x.grad is not None and not uses_compile()
    increased = torch.compile(lambda x: x + 1, backend=backend)
    increased(x)
    as_written = not compiled and uses_compile()
    with stance("default"):
        increased(x)
    as_compiled = len(compiled) == 1
    torch._dynamo.reset()
    increased(x)
    return [control_flow, as_written, as_compiled, len(compiled) == 1]


@pytest.mark.slow
def test_in_a_check_compiled_code_runs_as_it_is_written_but_where_it_is_to_run_compiled(ddp_world: DDPWorld) -> None:
    assert ddp_world.run(run_compiled_code) == [[True] * 4] * 2


def test_inductor_starts_no_processes_of_its_own_on_a_rank(
    ddp_world: DDPWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_inductor() -> int:
        import torch._inductor.config as config

        return int(config.compile_threads)

    assert ddp_world.run(start_inductor) == [1, 1]
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    assert ddp_world(world_size=1).run(start_inductor) == [2]
