"""torch's `MultiThreadedTestCase`: ranks are threads of one process, collectives are simulated."""

from torch.testing._internal.common_distributed import MultiThreadedTestCase
from work import RANKS, TESTS, work


class TestWorld(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


for number in range(TESTS):
    setattr(TestWorld, f"test_{number}", lambda self: work())
