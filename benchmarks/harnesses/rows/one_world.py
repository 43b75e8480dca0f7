"""One `ddpcheck.World` that runs every test: the same ranks, the same process group."""

import os

from ddpcheck import World


def on_rank() -> None:
    from work import work

    work()


with World(int(os.environ["HARNESS_RANKS"])) as world:
    for _ in range(int(os.environ["HARNESS_TESTS"])):
        world.run(on_rank)
