"""Source code of reproduction scripts: train a recipe and compare facts between ranks.

Read as text, never imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import os
import sys
import textwrap
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.gather.autograd.autograd_graph import LossGraph, unregistered_state
from ddpcheck.gather.ddp.ddp_wrapper import optimizer_options, wrapper_attributes
from ddpcheck.gather.state.randomness import seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.gradient_distance import dense, has_gradient, norm, scales
from ddpcheck.gather.steps.training_step import batch_seed, model_seed, step_seed
from ddpcheck.recipe.pytree import copied, shard_batch, to_device, tree_leaves, tree_tensors

TargetError = ValueError  # raised in copied code
RandomNumbers = str


class Recorder(TorchDispatchMode):
    """Dispatch mode that records drawn random numbers and the inputs of reductions."""

    numbers: dict[str, list[Any]]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in str(function) and "c10d" in function.namespace:
            self.numbers["reduced"] += [x.detach().flatten().tolist() for x in tree_tensors(args[0])]
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            drawn = next(tree_tensors([result])).detach().flatten().tolist()
            self.numbers["drawn"] += [drawn] if len(drawn) > 1 else []
        return result


class Rank:
    """Rank of a reproduction script, with bare model `net` and DDP wrapper `module`."""

    def __init__(self, recipe: Any, **settings: Any) -> None:
        self.recipe, self.set = recipe() if callable(recipe) else recipe, settings
        self.rank, self.size, self.steps = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), settings["steps"]
        self.device = torch.device("cpu")
        if settings["device"] != "cpu":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.timeout = timedelta(seconds=20)  # for a collective
        self.phase, self.tolerated, self.facts = "building the model", False, dict[str, list[Any]]()
        self.leaves, self.lost, self.start = tuple[Any, ...](), dict[str, str](), dict[str, str]()

    def show(self, measured: Any, at_fault: Any) -> None:
        """Gather the `measured` facts of all ranks; exit with 1 if `at_fault` flags any."""
        lines: list[str] = []
        try:
            dist.init_process_group(self.set["backend"], timeout=self.timeout)
            self.group = dist.new_group(timeout=self.timeout, backend="gloo")  # the default group is for DDP only
            for step, facts in measured:
                for name, value in facts.items():
                    self.facts.setdefault(name, []).append(
                        (f"step {step}:" if step >= 0 else "start:", self.in_short(value))
                    )
            self.reach("the end, where ranks meet")
            dist.barrier()
            dist.new_group(timeout=self.timeout)
            everyone = self.gathered(self.facts)
        except Exception as error:
            lines, everyone = [f"failed in {self.phase}: {type(error).__name__}: {error}"], [self.facts]
        faulthandler.cancel_dump_traceback_later()
        for name in dict.fromkeys(name for facts in everyone for name in facts):
            if at_fault([facts.get(name, []) for facts in everyone]):
                lines.append(f"{name}: {'; '.join(map(' '.join, self.facts.get(name, []))) or 'not on this rank'}")
        for line in lines[:8] or ["finished, and shows no fault"]:
            print(f"rank {self.rank}: {textwrap.shorten(line, 200)}", flush=True)
        time.sleep(4 if lines else 0)  # torchrun ends all ranks if one fails: let all print first
        if not lines:
            dist.destroy_process_group()  # else threads of the group may abort the exit
        sys.exit(bool(lines))

    def in_short(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return str(value)
        x = value.detach().cpu().to_dense().contiguous()
        bits = hashlib.sha256(ctypes.string_at(x.data_ptr(), x.nbytes)).hexdigest()
        return f"norm {norm(x):.6g}, {x.dtype}, bits {bits[:8]}"

    def gathered(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def reach(self, phase: str) -> None:
        self.phase = phase
        if self.set["may_hang"]:  # a hung rank prints its stack
            print(f"rank {self.rank}: {phase}", flush=True)
            faulthandler.dump_traceback_later(self.timeout.seconds + 2, exit=True)

    def build(self, bare: bool = False) -> None:
        seed_everything(model_seed(self.set["seed"]))
        self.net = self.module = self.recipe.model().to(self.device)
        self.known = {id(p) for p in self.net.parameters()}
        if not bare:
            self.reach("wrapping")
            kwargs = {**({} if self.device.type == "cpu" else {"device_ids": [self.device]}), **self.recipe.ddp_kwargs}
            wrap = self.recipe.wrap or (lambda net, _: DistributedDataParallel(net, **kwargs))
            self.module = wrap(self.net, self.device)
            if self.known.isdisjoint(map(id, self.module.parameters())):  # wrap copied the model
                self.net = getattr(self.module, "module", self.module)
        self.known = {id(p) for p in self.net.parameters()}
        optimizer = self.recipe.optimizer or (lambda trained: torch.optim.SGD(trained, lr=0.01))
        self.optim = optimizer(p for p in self.module.parameters() if p.requires_grad)

    def batch(self, step: int, whole: bool = False) -> Any:
        seed_everything(batch_seed(self.set["seed"], step))
        batch = self.recipe.batch(step)
        return batch if whole else (self.recipe.shard or shard_batch)(batch, self.rank, self.size)

    def loss(self, data: Any, seed: int) -> Any:
        seed_everything(seed)
        losses = self.recipe.loss(self.module, copied(to_device(data, self.device)))
        return sum(x.sum() for x in tree_tensors(losses))

    def train(self, whole: bool = False, numbers: Any = None) -> Any:
        """Train, and yield (part, step) after each part of a step, such as "backward".

        If `whole`, each rank takes the global batch. In context `numbers(module, data)`, forward draws fixed numbers.
        """
        into_training(self.net)
        for step in range(self.steps):
            self.optim.zero_grad()
            self.reach(f"batch of step {step}")
            self.data = self.batch(step, whole)
            yield "batch", step
            with numbers(self.module, self.data) if numbers else contextlib.nullcontext():
                self.reach(f"forward of step {step}")
                self.made = self.loss(self.data, step_seed(self.set["seed"], step, 0 if numbers else self.rank))
                yield "forward", step
                self.reach(f"backward of step {step}")
                self.made.backward()
            yield "backward", step
            self.optim.step()
            yield "step", step

    def look(self, parts: str, facts: Any) -> Any:
        """Train; after each part of a step that `parts` names, yield (step, `facts()`).

        If `parts` has "bare", train without DDP. If `parts` has "start", yield (-1, `facts()`) before training.
        """
        self.build("bare" in parts)
        if "start" in parts:
            yield -1, facts()
        for part, step in self.train():
            if part in parts:
                yield step, facts()

    def structure(self) -> dict[str, Any]:
        parts, buffers = self.net.named_modules(), enumerate(self.net.named_buffers())
        facts = {n or "the model": f"{type(m).__name__}({m.extra_repr()}) training={m.training}" for n, m in parts}
        facts |= {name: f"buffer number {number}, {tuple(b.shape)}, {b.dtype}" for number, (name, b) in buffers}
        numbers: dict[Any, int] = {}  # tied parameters share a number
        for name, p in self.net.named_parameters(remove_duplicate=False):
            facts[name] = f"number {numbers.setdefault(p, len(numbers))}, {tuple(p.shape)}, {p.dtype}, "
            facts[name] += f"strides {p.stride()}, on {p.device.type}, requires_grad={p.requires_grad}"
        return facts

    def options(self) -> dict[str, Any]:
        names = {id(p): name for name, p in self.net.named_parameters()}
        size = getattr(self.module, "bucket_bytes_cap", None)
        return {"bucket_bytes_cap": size, **wrapper_attributes(self.module), **optimizer_options(self.optim, names)}

    def state(self) -> dict[str, Any]:
        kept = {f"{key} of the optimizer, {n}": s[key] for n, s in enumerate(self.optim.state.values()) for key in s}
        return {**self.net.state_dict(), **kept}

    def attributes(self) -> dict[str, Any]:
        parts, plain = self.net.named_modules(), (int, float, str)
        values = {f"{path}.{key}".strip("."): x for path, part in parts for key, x in vars(part).items()}
        named = {name: x for name, x in values.items() if isinstance(x, plain) and name in self.set["subjects"]}
        return {**dict(unregistered_state(self.net)), **named}

    def gradients(self) -> dict[str, Any]:
        return {name: dense(p.grad) for name, p in self.net.named_parameters() if p.grad is not None}

    def kinds(self) -> dict[str, str]:
        trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        kinds = {n: "no" if p.grad is None else "a" if has_gradient(p) else "zero" for n, p in trained.items()}
        return {name: f"{kinds[name]} gradient, {self.in_short(p)}" for name, p in trained.items()}

    def missing(self) -> dict[str, str]:
        return {name: "no gradient" for name, kind in self.kinds().items() if kind.startswith("no")}

    def search(self) -> dict[str, str]:
        return {"find_unused_parameters": f"{self.module.find_unused_parameters}, unused: {len(self.missing())}"}

    def unused(self) -> Any:
        """Train without DDP, yielding parameters without gradient; then train with DDP (may hang)."""
        yield from self.look("bare backward", self.missing)
        yield from self.look("", None)
        self.tolerated = self.module.find_unused_parameters and not self.module.static_graph

    def discarded(self) -> Any:  # gradients zeroed before an optimizer step used them
        self.build()
        for holder in (*self.module.modules(), self.optim):
            holder.zero_grad = functools.partial(self.zero_grad, holder.zero_grad)
        for part, _ in self.train():
            self.start = self.kinds() if part == "batch" else self.start
            for p in self.net.parameters() if part == "step" else ():
                p.grad = None
        yield 0, self.lost

    def zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> None:
        before = self.kinds()
        original(*args, **kwargs)
        gone = [n for n, kind in self.kinds().items() if before[n][0] == "a" != kind[0]]
        self.lost |= {n: "zeroed before a step has used it" for n in gone if before[n][-8:] == self.start[n][-8:]}

    def stray(self) -> dict[str, str]:  # leaves with gradients in every step that DDP does not know
        known = {*self.known, *map(id, tree_leaves(self.data))}
        before, self.leaves = self.leaves, LossGraph([self.made]).leaves
        kept = [x for x in self.leaves if id(x) not in known and any(x is y for y in before)]
        return {f"number {n} of {tuple(x.shape)}": f"gradient {self.in_short(x.grad)}" for n, x in enumerate(kept)}

    def reductions(self) -> Any:
        """Yield DDP's gradients after each backward, and finally how often `no_sync` was used."""
        self.build()
        calls, passes = list[Any](), list[bool]()
        for ddp in [part for part in self.module.modules() if isinstance(part, DistributedDataParallel)]:
            vars(ddp)["no_sync"] = lambda no_sync=ddp.no_sync: calls.append(no_sync()) or calls[-1]  # type: ignore
            ddp.register_forward_pre_hook(lambda part, _: passes.append(part.require_backward_grad_sync))
        for part, step in self.train():
            if part == "backward":
                yield step, self.gradients()
        under = f"called {len(calls)} times, {passes.count(False)} of {len(passes)} forward passes under it"
        yield 0, {"no_sync": under} if calls else {}

    def last(self, bare: bool = False, average: bool = False, **how: Any) -> Any:
        """Return the last step's gradients; if `average`, average gradients by all_reduce instead of DDP."""
        self.build(bare)
        for part, step in self.train(**how):
            for p in self.net.parameters() if average and part == "backward" else ():
                own = torch.zeros_like(p) if p.grad is None else dense(p.grad)
                total = own.to(torch.complex128 if own.is_complex() else torch.float64)
                dist.all_reduce(total, group=self.group)
                p.grad = (total / self.size).to(own.dtype) if p.requires_grad else None
            if part == "backward" and step + 1 == self.steps:
                return self.gradients()

    def single_process(self, numbers: Any) -> Any:
        """Train in one process on global batches; return a function that returns the gradients."""
        if self.set["in_group"]:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        gradients = self.last(bare=True, whole=True, numbers=numbers)
        if self.set["in_group"]:
            dist.destroy_process_group()
        return lambda: gradients

    def compare(self, want: Any, **how: Any) -> Any:
        """Train; yield gradients whose error against `want()` exceeds the tolerance, largest error first."""
        got, right, allowed = self.last(**how), want(), self.set["tolerance"]
        got, sizes = {name: got.get(name, 0 * x).to(x) for name, x in right.items()}, scales(right)
        errors = {name: norm(got[name] - x) / max(sizes[name], 1e-30) for name, x in right.items()}
        far = [name for name in errors if not errors[name] <= allowed]
        far.sort(key=lambda name: (errors[name] == errors[name], -errors[name]))  # NaN first
        facts = {f"gradient of {n}": f"relative error {errors[n]:.2g}, allowed {allowed:g}" for n in far[:4]}
        ours, whole = (torch.cat([x.double().flatten() for x in some.values()]) for some in (got, right))
        factor = f"{float(ours @ whole / (whole @ whole)):.4g} times what they should be"
        yield self.steps - 1, {**facts, "all gradients together": factor} if far else {}

    def empty(self) -> dict[str, Any]:
        full = all(len(x) for x in tree_leaves(self.data) if getattr(x, "ndim", False))
        return {} if full else {"batch": "no samples"}

    def words(self, part: Any) -> bool:
        return isinstance(part, (list, tuple)) and bool(part) and all(isinstance(x, str) for x in part)

    def samples(self, step: int, whole: bool = False) -> Counter[Any]:  # rows along dim 0, with counts
        columns = [*tree_leaves(self.batch(step, whole), is_leaf=self.words)]
        columns = [x for x in columns if self.words(x) or getattr(x, "ndim", False)]
        columns = [x.tolist() if hasattr(x, "tolist") else x for x in columns if len(x) == len(columns[0])]
        return Counter(tuple(map(str, row)) for row in zip(*columns, strict=True))

    def shards(self) -> Any:
        for step in range(self.steps):
            whole, own = self.samples(step, whole=True), self.samples(step)
            total = sum(self.gathered(own), Counter[Any]())
            again = sum(total[row] > whole[row] for row in own)
            missing = 0 if total - whole and not again else sum((whole - total).values())
            text = f"{again} of {sum(own.values())} are on another rank too, {missing} of {sum(whole.values())} on none"
            yield step, {"samples": text} if again or missing else {}

    def recorded(self, which: str) -> Any:
        """Run forward on rank 0's samples; yield numbers that were `which`: "drawn" or "reduced"."""
        self.build(bare=True)
        into_training(self.net)
        data = self.gathered(self.batch(0))[0]
        with Recorder() as recorder:  # type: ignore[no-untyped-call]
            recorder.numbers = {"drawn": [], "reduced": []}
            self.loss(data, 1000 + self.rank if which == "drawn" else step_seed(self.set["seed"], 0, 0))
        yield 0, {f"{which} {n}": x for n, x in enumerate(recorder.numbers[which])}
