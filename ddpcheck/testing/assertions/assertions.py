"""Assertions for tests of distributed training: gradients, values on all ranks, and parameters that take no part.

`assert_parity` is called in an ordinary test and starts ranks of its own; `assert_same_on_all_ranks` is called on every
rank of whatever started them; `assert_no_anomalous_params` in any process. What is said is decided elsewhere, by pure
functions: in `ddpcheck.testing.assertions.replica_values` and `ddpcheck.testing.assertions.messages`.

This module is light: it imports torch only once an assertion is made.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import BugError, DdpcheckError, FindingsError, HangError, UsageError
from ddpcheck.findings.exception_origin import BUG, as_bug, is_ours
from ddpcheck.findings.rules import matching_rules
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange
from ddpcheck.testing.assertions.messages import PartAccount, parity_failure_message, tell_anomalies
from ddpcheck.testing.assertions.replica_values import (
    CompareOptions,
    Mismatch,
    RankValues,
    ValueDiff,
    differences,
    holds_nothing,
    tell,
    trouble_of,
)
from ddpcheck.worlds import rank as this_rank

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from ddpcheck.findings.report import Report
    from ddpcheck.recipe.recipe import Recipe
    from ddpcheck.testing.assertions.replica_values_on_rank import Item

Message = str | Callable[[str], str] | None


def assert_parity(
    recipe: Recipe | str,
    *,
    world_size: int = 2,
    steps: int = 3,
    rtol: float | None = None,
    atol: float | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    backend: str | None = None,
    device: str = "cpu",
    timeout: float = 30.0,
    seed: int = 0,
    preload: Sequence[str] = (),
    msg: Message = None,
) -> Report:
    """Assert that DDP gives a recipe the gradients that a single process would compute, on every rank.

    Called in an ordinary test or script; it runs `ddpcheck.check` on ranks of its own. It fails on

    - gradients that differ between ranks, from the average of the ranks' own, or from those of the global batch in a
      single process: every finding of the family DDP3xx, whatever its severity;
    - every other finding that is an error, since it makes the gradients wrong or stops training, and every finding that
      has one of the family DDP3xx as its consequence;
    - a check that could not be finished, and a comparison that was not made: the reducer was not run because of an
      unused parameter, there is no single process to compare with, every gradient was zero (DDP307), or the same
      step run twice differs from itself (DDP308). To ignore the finding does not make such an assertion pass.

    Args:
        recipe: A `ddpcheck.Recipe` or a TARGET ("path/to/file.py:attr").
        world_size: Number of ranks.
        steps: Training steps to compare.
        rtol: Relative tolerance; together with `atol` it takes the place of the measured tolerances of
            `ddpcheck.check`. A gradient g is near enough to its reference r where
            norm(g - r) <= atol * sqrt(number of elements) + rtol * norm(r), with Frobenius norms, one parameter at a
            time. Whatever passes `torch.testing.assert_close`, which asks |g - r| <= atol + rtol * |r| of every
            element, passes this (by the triangle inequality). Gradients are bit-identical between ranks all the same.
        atol: Absolute tolerance; `rtol` and `atol` are given together or not at all.
        select: Codes, prefixes or names of the rules to fail on; default: all. A comparison of which no rule is
            selected need not have been made ("DDP301" and "DDP302" are of the reducer, "DDP303" to "DDP305", "DDP309"
            and "DDP310" of the single process).
        ignore: Those not to fail on: `ignore=["batch-coupled"]` where BatchNorm per rank is meant.
        backend: "gloo" or "nccl"; default: nccl where every rank has a GPU of its own, else gloo.
        device: "cpu" or "cuda".
        timeout: Seconds that one phase of the check may take.
        seed: Of all random numbers.
        preload: Modules that are imported once, before ranks are forked; see `ddpcheck.World`.
        msg: Instead of the message, or a function from the message to another one, as in `torch.testing.assert_close`.

    Returns:
        The report of the check, where the assertion holds.

    Raises:
        FindingsError: The gradients are not the same, or that could not be told; an `AssertionError`, with the whole
            report as its `detail`.
        UsageError: An argument is wrong, or this process is a rank of a ddpcheck world.
    """
    __tracebackhide__ = True
    from ddpcheck.report.checking.check import check

    _refuse_on_a_rank("assert_parity")
    if trouble := _trouble_of_tolerances("assert_parity", rtol, atol):
        raise UsageError(trouble)
    select, ignore = _several(select), _several(ignore)
    for pattern in (*select, *ignore):
        matching_rules(pattern)
    report = check(
        recipe,
        world_size=world_size,
        backend=backend,
        device=device,
        steps=steps,
        timeout=timeout,
        seed=seed,
        preload=preload,
    )
    tolerance = None if rtol is None or atol is None else (rtol, atol)
    message = parity_failure_message(report, select=select, ignore=ignore, tolerance=tolerance)
    if message:
        raise FindingsError(_final(message, msg), detail=_as_text(report))
    return report


def assert_same_on_all_ranks(
    value: Any,
    *,
    group: dist.ProcessGroup | None = None,
    name: str = "",
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_device: bool = True,
    check_stride: bool = False,
    timeout: float | None = None,
    msg: Message = None,
) -> None:
    """Assert that `value` is the same on every rank; every rank of `group` calls this.

    Every rank raises the same error, so that none of them runs ahead and waits for the others. Where all is equal, one
    digest of 32 bytes a rank goes over the rendezvous store, which cannot hang on ranks that hold different things;
    shapes, names and then values move only where digests differ. Without a process group, or with one rank, there is
    nothing to compare with, and it passes.

    Args:
        value: A tensor of any dtype, layout and device, a number, a string, None, a numpy array, a module (its
            parameters and buffers, by name), or any nest of these in lists, tuples, dicts, dataclasses and iterators.
            Gradients are compared by `[p.grad for p in model.parameters()]`; what is None on one rank has to be None
            on all.
        group: The ranks; default: all.
        name: What to call it in the message.
        rtol: Relative tolerance; default: 0, since DDP leaves bit-identical values on all ranks. With a tolerance, the
            values that differ travel from one rank to all.
        atol: Absolute tolerance; `rtol` and `atol` are given together or not at all. A value v is near enough to the
            value r of the rank that most ranks agree with (of equally many: with the lowest) where
            |v - r| <= atol + rtol * |r|, element by element.
        equal_nan: Whether a NaN equals a NaN.
        check_device: Whether the kind of device has to be the same; its index never has to.
        check_stride: Whether the strides of dense tensors have to be the same.
        timeout: Seconds to wait for the other ranks; default: those of the group.
        msg: Instead of the message, or a function from the message to another one, as in `torch.testing.assert_close`.

    Raises:
        AssertionError: The ranks do not hold the same; the message names the first item that differs, the ranks, how
            many elements, the greatest differences and the other items. Also where there is nothing to compare: no
            tensor, number or text on any rank.
        UsageError: There is something that cannot be compared (an object, a DTensor, a tensor without values), the
            options differ between ranks, or this rank is not in `group`.
        BugError: ddpcheck itself failed.
        HangError: A rank did not call this in time; names the ranks.
    """
    __tracebackhide__ = True
    options = CompareOptions(rtol or 0.0, atol or 0.0, equal_nan, check_device, check_stride)
    trouble = _trouble_of_tolerances("assert_same_on_all_ranks", rtol, atol)
    message = _difference_between_ranks(value, options, trouble, group, name, timeout)
    if message:
        raise AssertionError(_final(message, msg))


def assert_no_anomalous_params(
    loss: Any,
    model: nn.Module,
    *,
    ignore: Sequence[str] = (),
    replay: Callable[[], Any] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    msg: Message = None,
) -> None:
    """Assert that every parameter of `model` will receive a gradient from `loss`, and nothing else will.

    Called between the forward pass and `loss.backward()`; the graph is left as it is. With a process group every rank
    of it calls this, and every rank raises the same error: also on parameters that contribute on some ranks only, on
    which DDP hangs. Where all is well, one digest a rank goes over the rendezvous store.

    Args:
        loss: A scalar tensor, or any nest of them.
        model: The module, wrapped or not.
        ignore: Names of parameters that need not contribute; "head.*" stands for all that match.
        replay: Computes the loss again, to tell why a parameter is missing and at which line; called only when one is,
            on every rank that misses one.
        group: The ranks; default: those of the wrapper, or all.
        timeout: Seconds to wait for the other ranks; default: those of the group.
        msg: Instead of the message, or a function from the message to another one, as in `torch.testing.assert_close`.

    Raises:
        AssertionError: Lists the parameters by what is wrong with them: none of the backward pass will reach them
            (DDP101, 102, 103), it reaches them on some ranks only (DDP104), or it reaches a tensor that is no
            parameter of the model (DDP106). A parameter that is used in a re-entrant checkpoint is in no graph before
            backward runs; those of the modules that such checkpoints were given are taken to contribute.
        UsageError: `loss` needs no gradient, no parameter requires one, or `ignore` names no parameter.
        BugError: ddpcheck itself failed.
        HangError: A rank did not call this in time; names the ranks.
    """
    __tracebackhide__ = True
    if group is None:
        group = getattr(model, "process_group", None) if hasattr(model, "reducer") else None
    message = _anomalies_on_ranks(loss, model, _several(ignore), replay, group, timeout)
    if message:
        raise AssertionError(_final(message, msg))


# Usage and messages


def _final(message: str, msg: Message) -> str:
    if callable(msg):
        return msg(message)
    return message if msg is None else msg


def _several(names: Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def _refuse_on_a_rank(what: str) -> None:
    try:
        rank = this_rank.current().rank
    except DdpcheckError:
        return
    raise UsageError(
        f"{what} was called on rank {rank} of a ddpcheck world, and starts a world of its own: call it in a plain "
        "test, without the ddp marker and outside of ddp_world.run; on ranks, use assert_same_on_all_ranks"
    )


def _trouble_of_tolerances(what: str, rtol: float | None, atol: float | None) -> str:
    if (rtol is None) != (atol is None):
        missing = "rtol" if rtol is None else "atol"
        return f"{what}: give both rtol and atol, or neither; {missing} is missing"
    for name, value in (("rtol", rtol), ("atol", atol)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            return f"{what}: {name} must be a number that is not negative, not {value!r}"
    return ""


def _as_text(report: Report) -> str:
    from ddpcheck.render import renderer_for

    try:
        return renderer_for("text").render(report)
    except ImportError:  # rich is not there
        return report.to_json()


# Ranks


def _ranks_of(group: dist.ProcessGroup | None, what: str) -> list[int]:
    """The ranks of `group`; one without a process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{what}: this rank is not in the group; call it only on the ranks that are")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise UsageError(f"{what}: rank {dist.get_rank()} is not in the group of {format_ranks(ranks)}")
    return ranks


@contextlib.contextmanager
def _waiting(what: str, timeout: float) -> Iterator[None]:
    """A block in which the other ranks are waited for."""
    before = this_rank.own_slots()[1]
    this_rank.set_collective(what)
    try:
        yield
    except RanksTimedOutError as error:
        raise HangError(
            f"{format_ranks(error.ranks)} did not call {what} within {timeout:g} s; every rank of the "
            "group must call it, "
            "the same number of times"
        ) from None
    finally:
        this_rank.set_collective(before)


def _difference_between_ranks(
    value: Any, options: CompareOptions, trouble: str, group: dist.ProcessGroup | None, name: str, timeout: float | None
) -> str:
    """The message, the same on every rank; empty where all is the same."""
    __tracebackhide__ = True
    what = f"assert_same_on_all_ranks({name!r})" if name else "assert_same_on_all_ranks"
    ranks = _ranks_of(group, what)
    place = str(user_location() or "")
    items, mine = _take_stock(value, options, trouble, place)
    everyone = [mine] * len(ranks)
    measured: dict[str, list[ValueDiff | None]] = {}
    if len(ranks) == 1:
        _refuse(everyone, ranks, what)
        return _NOTHING_COMPARED.format(what=what) if holds_nothing(mine) else ""
    from ddpcheck.gather.state.module_description import digest_of

    exchange = StoreExchange.over(group, "same", timeout)
    with _waiting(what, exchange.timeout):
        own = [(leaf.path, leaf.key(options), leaf.nans) for leaf in mine.leaves]
        equal = len(set(exchange.gather("digest", digest_of((options, mine.trouble, own)).encode()))) == 1
        if not equal:
            mine = mine if mine.trouble else _take_stock(items, options, "", place, canonical=True)[1]
            everyone = [pickle.loads(data) for data in exchange.gather("detail", pickle.dumps(mine))]
        _refuse(everyone, ranks, what)
        if equal and holds_nothing(mine):
            return _NOTHING_COMPARED.format(what=what)
        found = differences(everyone)
        if not equal and found:
            measured = _measure(found, items, options, group, exchange)
    return tell(found, measured, everyone, ranks, name)


_NOTHING_COMPARED = (
    "{what} compared nothing: it was given no tensor, number or text, on any rank. Gradients are None before backward, "
    "and after zero_grad()."
)


def _take_stock(
    value: Any, options: CompareOptions, trouble: str, place: str, *, canonical: bool = False
) -> tuple[list[Item], RankValues]:
    """What this rank holds; whatever goes wrong is told to all ranks, which would wait for this one."""
    from ddpcheck.testing.assertions.replica_values_on_rank import IncomparableError, account, items_of

    items: list[Item] = []
    try:
        items = value if canonical else items_of(value)
        if not trouble:
            return items, account(items, options, place, canonical=canonical)
    except IncomparableError as error:
        trouble = trouble or str(error)
    except Exception as error:
        trouble = trouble or _unreadable("what was given", error)
    return items, RankValues(options, (), place, trouble)


def _refuse(everyone: Sequence[RankValues], ranks: Sequence[int], what: str) -> None:
    __tracebackhide__ = True
    if trouble := trouble_of(everyone, ranks):
        raise _refusal(trouble if trouble.startswith("assert_") else f"{what}: {trouble}")


def _unreadable(what: str, error: Exception) -> str:
    """Why an assertion cannot be made, in a sentence that other ranks can repeat."""
    said = as_bug(error) if is_ours(error) else f"{type(error).__name__}: {error}"
    return f"{what} cannot be read ({said})"


def _refusal(message: str) -> DdpcheckError:
    return BugError(message) if BUG in message else UsageError(message)


def _measure(
    found: Sequence[Mismatch],
    items: Sequence[Item],
    options: CompareOptions,
    group: dist.ProcessGroup | None,
    exchange: StoreExchange,
) -> dict[str, list[ValueDiff | None]]:
    """How far values are from each other: of the first item where none may differ, of all where they may a little."""
    from ddpcheck.testing.assertions.replica_values_on_rank import measure

    wanted = [item for item in (found[:1] if options.exact else found) if item.measurable]
    if not wanted:
        return {}
    here = list(exchange.ranks).index(exchange.rank)
    tensors = {path: value for path, kind, value in items if kind == "tensor"}
    own: list[ValueDiff | None] = []
    for item in wanted:
        source = exchange.ranks[item.against]
        own.append(measure(tensors[item.path], source, options, odd=here in item.odd, group=group))
    by_rank = [pickle.loads(data) for data in exchange.gather("measured", pickle.dumps(own))]
    return {item.path: [of_rank[index] for of_rank in by_rank] for index, item in enumerate(wanted)}


# Parameters


def _anomalies_on_ranks(
    loss: Any,
    model: nn.Module,
    ignore: Sequence[str],
    replay: Callable[[], Any] | None,
    group: dist.ProcessGroup | None,
    timeout: float | None,
) -> str:
    """The message, the same on every rank; empty where every parameter contributes."""
    __tracebackhide__ = True
    what = "assert_no_anomalous_params"
    ranks = _ranks_of(group, what)
    mine = _take_part(loss, model, ignore, replay)
    everyone = [mine]
    if len(ranks) > 1:
        exchange = StoreExchange.over(group, "anomalous", timeout)
        with _waiting(what, exchange.timeout):
            everyone = [pickle.loads(data) for data in exchange.gather("detail", pickle.dumps(mine))]
    troubles = {rank: one.trouble for rank, one in zip(ranks, everyone, strict=True) if one.trouble}
    if troubles:
        where = "" if len(troubles) == len(ranks) else f" ({format_ranks(list(troubles))})"
        raise _refusal(f"{what}: {next(iter(troubles.values()))}{where}")
    return tell_anomalies(everyone, ranks)


def _take_part(loss: Any, model: nn.Module, ignore: Sequence[str], replay: Callable[[], Any] | None) -> PartAccount:
    """What this rank sees; whatever goes wrong is told to all ranks, which would wait for this one."""
    from ddpcheck.testing.assertions.anomalies_on_rank import anomalies_of

    try:
        return PartAccount(tuple(anomalies_of(loss, model, ignore, replay)))
    except UsageError as error:
        return PartAccount(trouble=str(error).removeprefix("detect_anomalous_params: "))
    except Exception as error:
        return PartAccount(trouble=_unreadable("the graph of the loss", error))
