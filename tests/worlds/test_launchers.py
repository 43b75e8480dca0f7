"""Means over ranks, against the mean computed in one place; and setting a process group up as launchers have it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import ddpcheck
from ddpcheck.findings.errors import ChoiceError, DDPCheckError, HangError, UsageError
from ddpcheck.gather.collectives import allreduce
from ddpcheck.gather.collectives.allreduce import allreduce_grads, allreduce_params, average_over_ranks
from ddpcheck.worlds.launchers import detection
from ddpcheck.worlds.launchers.init_dist import RankDevices, choose_backend, choose_gpus, get_dist_info, init_dist
from tests.launchers.commands import clean_environment
from tests.launchers.slurm import free_ports

torch = pytest.importorskip("torch")
nn = torch.nn


def local_tensors(rank: int) -> list[Any]:
    """What a rank brings: several dtypes and layouts, and not the same ones missing on each rank."""
    generator = torch.Generator().manual_seed(rank)

    def made(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], made(3, 2), (4, 2), check_invariants=True)
    return [
        *(made(3, 2, dtype=dtype) for dtype in dtypes),
        None if rank == 0 else made(5),
        made(5) if rank == 0 else None,
        None,
        sparse if rank == 1 else made(4, 2),
        made(2, 3, 4).transpose(0, 2),
        made(),
        None if rank != 1 else made(2, dtype=torch.bfloat16),
    ]


@pytest.mark.ddp(world_size=[2, 3], reuse="module")
def test_the_average_is_the_mean_over_ranks_with_zeros_for_what_is_missing(rank: int, world_size: int) -> None:
    parts = [local_tensors(each) for each in range(world_size)]
    by_index = list(zip(*parts, strict=True))
    templates = [
        next((torch.zeros(t.shape, dtype=t.dtype) for t in tensors if t is not None), torch.zeros(5))
        for tensors in by_index
    ]
    average = average_over_ranks(parts[rank], templates)
    for mean, tensors, like in zip(average, by_index, templates, strict=True):
        if all(tensor is None for tensor in tensors):
            assert mean is None
            continue
        wide = torch.complex128 if like.is_complex() else torch.float64
        dense = [like if t is None else (t.to_dense() if t.is_sparse else t) for t in tensors]
        expected = torch.stack([tensor.to(wide) for tensor in dense]).mean(0).to(like.dtype)
        assert mean.layout == torch.strided
        torch.testing.assert_close(mean, expected)  # shape and dtype as well
    ddpcheck.assert_same_on_all_ranks(average)  # bit by bit


@pytest.mark.ddp(reuse="module")
def test_half_precision_is_summed_in_single_precision(rank: int) -> None:
    value = torch.full((4,), 60_000.0, dtype=torch.float16)
    small = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    value, small = average_over_ranks([value, small], [value, small])
    assert value.tolist() == [60_000.0] * 4, "the sum is beyond float16"
    assert small.tolist() == torch.full((4,), 128.5, dtype=torch.bfloat16).tolist()


@pytest.mark.parametrize("torch_tells", [True, False])
@pytest.mark.ddp(reuse="module")
def test_only_memory_that_nothing_else_looks_at_becomes_that_of_the_mean(
    rank: int, torch_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_tells:
        monkeypatch.delattr(torch._C, "_storage_Use_Count", raising=False)
    alone = torch.full((4,), 2.0 * rank)
    watched = alone.double()
    view = watched[1:]
    means = dict(allreduce.averages_over_ranks([alone, watched], [alone * 0, watched * 0], consume=True))
    assert [mean.tolist() for mean in means.values()] == [[1.0] * 4] * 2
    assert view.tolist() == [2.0 * rank] * 3
    assert (means[0].data_ptr() == alone.data_ptr()) == (torch_tells and hasattr(torch._C, "_storage_Use_Count"))
    assert not allreduce.owns_storage(watched)


def test_nothing_happens_at_world_size_one_or_without_a_process_group() -> None:
    """Seed 4 (mmcv dist_utils): nothing at world size 1; get_dist_info gives (0, 1) without a process group."""
    assert get_dist_info() == (0, 1)
    weight, count = nn.Parameter(torch.ones(2)), torch.tensor(3)
    weight.grad = gradient = torch.full((2,), 3.0)
    version = weight._version
    allreduce_params([weight, count])
    allreduce_grads([weight], coalesce=False)
    assert weight._version == version and weight.grad is gradient
    (average, missing) = average_over_ranks([gradient, None], [weight, weight])
    assert average.tolist() == [3.0, 3.0] and missing is None
    assert average_over_ranks([], []) == []


# --- Averages by mmcv's names --------------------------------------------------------------------------------------


WAYS = [{}, {"coalesce": False}, {"bucket_size_mb": 1e-5}]


@pytest.mark.ddp(world_size=3, reuse="module")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_that_only_some_ranks_have_are_averaged_with_zeros(rank: int, way: dict[str, Any]) -> None:
    """Seed 4 (mmcv dist_utils): gradients that are None are left out, and ranks pair up the wrong ones."""
    params = [nn.Parameter(torch.zeros(2, 3), requires_grad=number < 4) for number in range(5)]
    params[rank].grad = torch.full((2, 3), 3.0 * (rank + 1))  # of one shape: nobody would notice
    allreduce_grads(params, **way)
    assert [p.grad if p.grad is None else p.grad[0, 0].item() for p in params] == [1.0, 2.0, 3.0, None, None]


@pytest.mark.ddp(reuse="module")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parameters_become_their_mean_in_place(rank: int, way: dict[str, Any]) -> None:
    """Seed 4 (mmcv dist_utils): allreduce_params averages over the world, coalesced, in buckets or one at a time."""
    base = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    params = [nn.Parameter(base.clone().t()), nn.Parameter(base[0].to(torch.bfloat16)), nn.Parameter(base[:, ::2])]
    before = [(p.data_ptr(), p.stride()) for p in params]
    allreduce_params(params, **way)
    mean = torch.arange(12.0).reshape(3, 4) * 1.5
    assert torch.equal(params[0], mean.t()) and torch.equal(params[2], mean[:, ::2])
    assert params[1].tolist() == mean[0].tolist()
    assert [(p.data_ptr(), p.stride()) for p in params] == before


@pytest.mark.ddp(reuse="module")
def test_tensors_travel_together_by_dtype_in_buckets_or_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 4 (mmcv dist_utils): coalesced by dtype or in buckets of a given size, or one tensor at a time."""
    sizes: list[int] = []
    reduce = torch.distributed.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    tensors = [torch.zeros(9), torch.zeros(8).double(), torch.zeros(7), torch.zeros(6).double()]
    for way, expected in [
        ({}, [32, 28]),
        ({"coalesce": False}, [9, 8, 7, 6] * 2),
        ({"bucket_size_mb": 64 / 2**20}, [9 + 7, 8, 6 + 8, 9 + 7, 6]),  # a bucket is full with 64 bytes
    ]:
        sizes.clear()
        allreduce_params([*tensors, *tensors], **way)
        assert sizes[2:] == expected, "what goes before says whether the ranks agree"


@pytest.mark.ddp(reuse="module")
def test_gradients_change_in_place_where_they_can(rank: int) -> None:
    flat = torch.full((6,), float(rank))
    viewed, expanded = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    viewed.grad = flat.view(2, 3)
    expanded.grad = torch.full((1, 1), float(rank)).expand(2, 3)
    allreduce_grads([viewed, expanded])
    assert flat.tolist() == [0.5] * 6, "a view into a bucket of DDP, for example"
    assert torch.equal(expanded.grad, torch.full((2, 3), 0.5))


@pytest.mark.ddp(world_size=3, reuse="module")
def test_sparse_gradients_stay_sparse_with_the_rows_of_all(rank: int) -> None:
    embeddings = [nn.Embedding(6, 2, sparse=True) for _ in range(3)]
    if rank:
        (embeddings[0](torch.tensor([rank, rank, 4])).sum() * 3).backward()
        (embeddings[1](torch.tensor([5])).sum() * 0).backward()  # a row of zeros is a row: momentum is applied to it
    dense = nn.Embedding(6, 2, sparse=rank == 0)
    (dense(torch.tensor([rank])).sum() * 3).backward()
    allreduce_grads([embedding.weight for embedding in (*embeddings, dense)])
    first, second = (embedding.weight.grad.coalesce() for embedding in embeddings[:2])
    assert first.indices().tolist() == [[1, 2, 4]] and first.values().tolist() == [[2.0, 2.0]] * 3
    assert second.indices().tolist() == [[5]] and embeddings[2].weight.grad is None
    assert not dense.weight.grad.is_sparse and dense.weight.grad[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.ddp(world_size=2, reuse="module")
def test_ranks_that_hand_over_different_tensors_are_told_so_on_all(rank: int) -> None:
    for average in (allreduce_grads, allreduce_params):
        with pytest.raises(UsageError, match="0 on one and 2 on another"):
            average([nn.Parameter(torch.ones(2)) for _ in range(2 * rank)])
    with pytest.raises(UsageError, match="1 tensors each, but with different shapes or dtypes"):
        allreduce_params([nn.Parameter(torch.ones(2 + rank))])


@pytest.mark.ddp(world_size=3, reuse="module")
def test_averages_of_a_group_leave_the_others_alone_and_integers_become_those_of_its_first_rank(rank: int) -> None:
    """Seed 4 (mmcv dist_utils): allreduce_params of `model.buffers()`, with BatchNorm's count of batches among them."""
    group = torch.distributed.new_group([1, 2])
    weight = nn.Parameter(torch.full((2,), float(rank)))
    weight.grad = weight.detach().clone()
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(float(rank))
    norm.num_batches_tracked.fill_(2**53 + rank)
    mask = torch.tensor([rank == 1, rank == 2])
    allreduce_params([weight, *norm.buffers(), mask], group=group)
    allreduce_grads([weight], group=group)
    mean = [1.5, 1.5] if rank else [0.0, 0.0]
    assert weight.tolist() == weight.grad.tolist() == norm.running_mean.tolist() == mean
    assert norm.num_batches_tracked.item() == 2**53 + bool(rank) and mask.tolist() == [rank > 0, False]
    assert get_dist_info(group) == ((rank - 1, 2) if rank else (-1, -1))


@pytest.mark.parametrize(
    ("tensors_of", "words"),
    [
        (lambda model: model, r"and not a module \(Linear\); pass its .parameters\(\)\."),
        (lambda model: model.state_dict(), r"not a mapping \(OrderedDict\), .*; pass its .values\(\)\."),
        (lambda model: model.named_parameters(), r"number 0 \(from 0\) is a tuple; pass .parameters\(\) instead of"),
        (lambda model: model.weight, r"and not a single one \(Parameter\); put it in a list\."),
        (lambda model: [model.weight, None], r"number 1 \(from 0\) is a NoneType\."),
        (lambda model: "weight", "number 0 .* is a str"),
        (lambda model: 3, r"for example model.parameters\(\); got 3\."),
    ],
)
def test_what_is_no_list_of_tensors_is_refused_in_a_sentence(tensors_of: Any, words: str) -> None:
    for average in (allreduce_grads, allreduce_params):
        with pytest.raises(UsageError, match=f"^{average.__name__} takes tensors in a list .*{words}"):
            average(tensors_of(nn.Linear(2, 2)))


@pytest.mark.parametrize("size", ["a", True, float("nan")])
def test_a_bucket_has_a_size(size: Any) -> None:
    for average in (allreduce_grads, allreduce_params):
        with pytest.raises(UsageError, match=f"bucket_size_mb must be a number of MiB, .*; got {size!r}"):
            average([torch.ones(1)], bucket_size_mb=size)


# --- Who am I ------------------------------------------------------------------------------------------------------


class Logger:
    @ddpcheck.master_only
    def log(self, line: str, *, times: int = 1) -> str:
        """Write a line."""
        return line * times

    @ddpcheck.master_only
    async def later(self) -> str:
        return "done"


@pytest.mark.ddp(reuse="module")
def test_the_master_alone_does_it(rank: int) -> None:
    """Seed 4 (mmcv dist_utils): master_only runs on rank 0 only; get_dist_info gives rank and world size."""
    logger = Logger()
    assert logger.log("a", times=2) == ("aa" if rank == 0 else None)
    assert asyncio.run(logger.later()) == ("done" if rank == 0 else None)
    assert get_dist_info() == (rank, 2)


def test_without_a_process_group_every_process_is_the_master() -> None:
    assert Logger().log("a") == "a"
    assert Logger.log.__name__ == "log" and Logger.log.__doc__ == "Write a line."
    with pytest.raises(KeyError, match="own"):
        ddpcheck.master_only({}.__getitem__)("own")
    with pytest.raises(UsageError, match="master_only decorates a function or method, got 3"):
        ddpcheck.master_only(3)
    with pytest.raises(UsageError, match="put it below @classmethod or @property"):
        ddpcheck.master_only(classmethod(print))


# --- init_dist -----------------------------------------------------------------------------------------------------


def leave_the_world(launcher: str, rank: int, job: int) -> None:
    """Be a process that a launcher has just started, as its variables say."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "_DDPCHECK_RANK_OF", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    mpi = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    slurm = {"JOB_ID": 5, "STEP_ID": job, "PROCID": rank, "LOCALID": rank, "STEP_NUM_TASKS": 2, "STEP_NUM_NODES": 1}
    variables: dict[str, dict[str, Any]] = {
        "pytorch": {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"},
        "mpi": {"PMIX_NAMESPACE": job, **{f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}},
        "slurm": {f"SLURM_{name}": value for name, value in slurm.items()},
    }
    os.environ.update({name: str(value) for name, value in variables[launcher].items()})


@pytest.fixture
def ddp_port() -> int:
    (port,) = free_ports(1)
    return port


@pytest.mark.ddp
@pytest.mark.parametrize("launcher", ["pytorch", "mpi", "slurm"])
def test_the_process_group_is_set_up_once_for_each_launcher(rank: int, launcher: str, ddp_port: int) -> None:
    """Seed 3 (mmengine DDPStrategy), seed 5 (Lightning DDPPlugin): initialised once, from what the launcher says."""
    leave_the_world(launcher, rank, ddp_port)
    port = ddp_port if launcher == "pytorch" else None
    device = init_dist(launcher, timeout=30, port=port)
    assert (*get_dist_info(), torch.distributed.get_backend(), device) == (rank, 2, "gloo", torch.device("cpu"))
    total = torch.ones(1) * rank
    torch.distributed.all_reduce(total)
    assert total.item() == 1.0
    group = torch.distributed.group.WORLD
    assert init_dist("slurm", backend="gloo") == device and torch.distributed.group.WORLD is group, "once is enough"
    said = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert said == [str(rank), "2", str(rank), "2"]
    assert os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1") and int(os.environ["MASTER_PORT"]) > 0


@pytest.mark.ddp
def test_what_ranks_are_asked_for_must_not_differ(rank: int, ddp_port: int) -> None:
    leave_the_world("mpi", rank, ddp_port)
    with pytest.raises(UsageError, match="asked for different backends: rank 1 for none, rank 0 for gloo; pass the"):
        init_dist(backend=None if rank else "gloo", timeout=30)
    assert not torch.distributed.is_initialized() and "MASTER_PORT" not in os.environ


@pytest.mark.slow
@pytest.mark.ddp
def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(rank: int, ddp_port: int) -> None:
    leave_the_world("mpi", rank, ddp_port)
    if rank == 0:
        with pytest.raises(HangError, match=r"Rank 1 of 2 did not call init_dist within 0.3 s; check that mpirun"):
            init_dist(timeout=0.3)


@pytest.mark.ddp
@pytest.mark.parametrize("has_port", [True, False])
def test_a_rank_that_cannot_set_the_group_up_says_so_to_the_others(
    rank: int, has_port: bool, ddp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None if rank else 1 / 0)
    leave_the_world("mpi", rank, ddp_port)
    port = ddp_port if has_port else None
    with pytest.raises(DDPCheckError, match=r"^Rank 0 could not set up gloo: division by zero$"):
        init_dist(timeout=30, port=port)
    monkeypatch.undo()
    init_dist(timeout=30, port=port)
    assert get_dist_info() == (rank, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (["torch"], {}, "launcher must be 'pytorch' or 'mpi' or 'slurm', got 'torch'"),
        (["pytorch", "ncl"], {}, "backend must be one that this torch has: gloo"),
        (["mpi"], {"timeout": 0}, "timeout must be a number of seconds above 0"),
        (["slurm"], {"port": 70000}, "port must be a whole number from 1 to 65535"),
        (["slurm"], {"rank": 1, "store": None}, "init_dist sees to store, rank itself; leave that out"),
        (["mpi"], {"fooo": 1}, "init_dist takes no argument fooo; .* arguments of .*init_process_group: .*device_id"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_waited_for(
    arguments: list[str], options: dict[str, Any], words: str
) -> None:
    """Seed 4 (mmcv dist_utils): an unknown launcher is a ValueError."""
    with pytest.raises(UsageError, match=words) as caught:
        init_dist(*arguments, **options)
    if "must be one" in words or "launcher" in words:
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, ChoiceError)


def test_an_incomplete_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ.keys() - clean_environment(tmp_path).keys():
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match=r"No launcher has started this process: .* See `ddpcheck explain DDP603`"):
        init_dist()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE is not set; export it"):
        init_dist("pytorch")
    with pytest.raises(UsageError, match="Launcher 'slurm' was asked for, but it is the environment that has started"):
        init_dist("slurm")


# --- Devices -------------------------------------------------------------------------------------------------------


def seats(*gpus: str, local: bool = True, backend: str = "") -> list[RankDevices]:
    """Ranks in order: each with its machine and the GPUs that it sees, as `a:01`."""
    made: list[RankDevices] = []
    for one in gpus:
        machine, _, seen = one.partition(":")
        number = [seat.machine for seat in made].count(machine)
        made.append(RankDevices(machine, number if local else None, tuple(machine + gpu for gpu in seen), backend))
    return made


@pytest.mark.parametrize(
    ("devices", "expected", "backend"),
    [
        (seats("a:012", "a:012", "a:012", "b:01"), [0, 1, 2, 0], "nccl"),  # rank 3 modulo 2 GPUs would be 1
        (seats("a:01", "a:01", "b:01", "b:01", local=False), [0, 1, 0, 1], "nccl"),
        (seats("a:0", "a:1", "b:0", "b:1"), [0, 0, 0, 0], "nccl"),  # SLURM has given each its own
        (seats("a:01", "a:01", "a:23", "a:23"), [0, 1, 0, 1], "nccl"),
        (seats("a:0", "a:0"), [0, 0], "gloo"),  # shared
        (seats("a:0", "b:"), [0, None], "gloo"),  # one machine has none
    ],
)
def test_a_rank_gets_the_gpu_of_its_local_rank_and_all_of_them_one_backend(
    devices: list[RankDevices], expected: list[int | None], backend: str
) -> None:
    """Seed 4 (mmcv dist_utils): `rank % num_gpus` instead of the local rank. Seed 5: nccl on GPUs, else gloo."""
    assert choose_gpus(devices) == expected and choose_backend(devices) == backend


def test_nccl_is_refused_where_ranks_have_no_gpu_of_their_own() -> None:
    """Seed 4 (mmcv dist_utils): zero GPUs divide by zero."""
    for gpus, words in ((["a:01"] * 3, "ranks 0 and 2 would share"), (["a:0", "b:", "b:"], "ranks 1 and 2 have none")):
        with pytest.raises(UsageError, match=f"needs a GPU for every rank, and {words}; pass backend='gloo'"):
            choose_backend(seats(*gpus, backend="nccl"))
    assert choose_backend(seats("a:0", "a:0", backend="gloo")) == "gloo"


# --- SLURM ---------------------------------------------------------------------------------------------------------


def test_the_first_host_is_read_from_the_list() -> None:
    """Seed 4 (mmcv dist_utils): slurm resolves the first host with scontrol; here it is read, without a process."""
    lists = {"rack[1-3,7]-gpu[01-16],login": "rack1-gpu01", "node[003,005-010]": "node003", "a.org,b": "a.org"}
    assert {nodes: detection.first_host(nodes) for nodes in lists} == lists
    for nodes in ("n[001-4", "n[]", "", "a b"):
        with pytest.raises(UsageError, match="cannot be determined; export MASTER_ADDR"):
            detection.first_host(nodes)


def test_each_step_has_a_port_of_its_own_below_those_of_clients() -> None:
    """Seed 4 (mmcv dist_utils): a fixed default port collides; here there is none."""
    steps = [detection.port_of_job(f"{job} {step}") for job in range(1000, 1090) for step in range(100)]
    assert len(set(steps)) == len(steps) and min(steps) >= 20_000 and max(steps) < 30_000


@pytest.mark.parametrize(
    ("layout", "node", "tasks"),
    [("2(x3),1", "3", 1), ("2(x3),1", "2", 2), ("4", "0", 4), ("4", "1", None), ("", "0", None), ("4", "", None)],
)
def test_the_tasks_of_a_node_are_read_from_slurms_layout(layout: str, node: str, tasks: int | None) -> None:
    assert detection.tasks_of_node(layout, node) == tasks
