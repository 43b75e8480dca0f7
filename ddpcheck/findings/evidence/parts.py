"""Evidence on models of which each rank has a part of the parameters, and which ranks compute together.

That is tensor parallelism: `torch.distributed.tensor.parallel.parallelize_module`. Judged in
`judge.replicas.model_parts`; gathered in `record.optimizers.part_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.report import Location


class ModelSplit(Struct, frozen=True):
    """Parameters of a model have been split among ranks for the first time.

    Attributes:
        ranks: That compute the model together, in the order of their parts.
        location: The line of the script that splits it.
    """

    ranks: tuple[int, ...]
    location: Location | None


class PartStep(Struct, frozen=True):
    """An optimizer is about to step, in a process in which a model is split.

    Attributes:
        optimizer: Its number among those that have stepped.
        count: How often it has stepped before.
        location: The line of the script.
        made: The line that constructs it.
        split: The parameters that it holds of which this rank has a part of its own.
        unheld: The parameters that are split and that no optimizer holds.
        norms: The norm of the gradient of each parameter, or of this rank's part of it.
        values: Fingerprints of the parameters that are not split, which ranks have alike.
        gradients: Sketches of their gradients.
        sharded: The parameters of which this rank has a shard, among ranks that compute other models.
        random: A fingerprint of the state of torch's random numbers.
        seeded: The line that has last seeded them.
        norm_at: The line that takes a norm of gradients, in the functions that lead to the step.
        parts_given: Whether a module is said to be given a part of its input by each rank: of a sequence, say.
    """

    optimizer: int
    count: int
    location: Location | None
    made: Location | None = None
    split: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sharded: tuple[str, ...] = ()
    random: int = 0
    seeded: Location | None = None
    norm_at: Location | None = None
    parts_given: bool = False
