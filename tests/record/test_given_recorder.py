"""What is averaged by hand in a step: all gradients of an optimizer, one by one or in buckets."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.record.optimizers.gradient_recorders import AllreduceInputRecorder
from ddpcheck.record.recording import Recording


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_gradients_of_a_few_elements_count_in_buckets_only() -> None:
    gradients = [torch.randn(8), torch.randn(1)]
    call = Call("all_reduce", "0", (0,))

    def given(*tensors: torch.Tensor) -> tuple[int, ...]:
        recorder = AllreduceInputRecorder(Recording(lambda _: None, 1))
        for tensor in tensors:
            recorder.note(call, {"tensor": tensor})
        return recorder.inputs_for(gradients)

    assert len(given(*gradients)) == 1
    assert len(given(torch.tensor(0.5), *gradients)) == 1  # a loss that is logged
    assert len(given(torch.cat(gradients))) == 1
    assert not given(torch.cat(gradients), torch.randn(8)) and not given(torch.randn(5))
