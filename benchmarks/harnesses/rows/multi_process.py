"""torch's `MultiProcessTestCase`: ranks are spawned for each test."""

from torch.testing._internal.common_distributed import MultiProcessTestCase
from work import RANKS, TESTS, join, work


class TestWorld(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _work(self) -> None:
        join(self.rank, RANKS, self.file_name)
        work()  # the class destroys the process group


for number in range(TESTS):
    setattr(TestWorld, f"test_{number}", lambda self: self._work())
