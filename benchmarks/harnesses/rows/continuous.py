"""torch's `MultiProcContinuousTest`: ranks and process group are those of the class, tests share them."""

from torch.testing._internal.common_distributed import MultiProcContinuousTest
from work import RANKS, TESTS, work


class TestWorld(MultiProcContinuousTest):
    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


for number in range(TESTS):
    setattr(TestWorld, f"test_{number}", lambda self: work())
