"""A `ddpcheck.World` for each test, without pytest, in a program that does not import torch itself."""

import os

from ddpcheck import World


def on_rank() -> None:
    from work import work

    work()


for _ in range(int(os.environ["HARNESS_TESTS"])):
    with World(int(os.environ["HARNESS_RANKS"])) as world:
        world.run(on_rank)
