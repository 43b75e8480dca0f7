"""Assertions for tests of distributed training: gradients, values on all ranks, and parameters that take no part.

`assert_parity` is called in an ordinary test and starts ranks of its own; `assert_same_on_all_ranks` is called on every
rank of whatever started them; `assert_no_anomalous_params` in any process. The pure functions of
`ddpcheck.testing.assertions.messages` make the messages.

This module is light: it imports torch only once an assertion is made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ddpcheck.findings.errors import BugError, DDPCheckError, FindingsError, HangError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import matching_rules
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.tracebacks import BUG, as_bug, is_ours
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange
from ddpcheck.testing.assertions import messages
from ddpcheck.worlds import rank as this_rank

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from ddpcheck.findings.report import Report
    from ddpcheck.recipe.recipe import Recipe

Message = str | Callable[[str], str] | None
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
            time. Whatever passes `torch.testing.assert_close`, which asks `|g - r| <= atol + rtol * |r|` of every
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
    from ddpcheck.render import as_text
    from ddpcheck.report.checking.check import check

    _refuse_on_a_rank()
    _refuse(_tolerance_error(rtol, atol), "assert_parity")
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
    if message := messages.parity_failure_message(report, select=select, ignore=ignore, tolerance=tolerance):
        raise FindingsError(_final(message, msg), detail=as_text(report))
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
            `|v - r| <= atol + rtol * |r|`, element by element.
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
    options = messages.CompareOptions(rtol or 0.0, atol or 0.0, equal_nan, check_device, check_stride)
    message = _difference_between_ranks(value, options, _tolerance_error(rtol, atol), group, name, timeout)
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
    from ddpcheck.testing.assertions.on_rank import anomalies_of

    what = "assert_no_anomalous_params"
    if group is None:
        group = getattr(model, "process_group", None) if hasattr(model, "reducer") else None
    ranks = _ranks_of(group, what)
    found = _attempt("the graph of the loss", anomalies_of, loss, model, _several(ignore), replay)
    by_rank = {ranks[0]: found}
    if len(ranks) > 1:
        with _exchange(what, group, "anomalous", timeout) as exchange:
            by_rank = dict(zip(ranks, exchange.all_gather("detail", found), strict=True))
    _refuse(messages.first_error({rank: error for rank, (_, error) in by_rank.items()}), what)
    message = messages.anomalies_message({rank: anomalies or [] for rank, (anomalies, _) in by_rank.items()})
    if message:
        raise AssertionError(_final(message, msg))


# Usage and messages


def _final(message: str, msg: Message) -> str:
    if callable(msg):
        return msg(message)
    return message if msg is None else msg


def _several(names: Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def _refuse_on_a_rank() -> None:
    try:
        rank = this_rank.current().rank
    except DDPCheckError:
        return
    raise UsageError(
        f"assert_parity was called on rank {rank} of a ddpcheck world, and starts another world: call it in a "
        "plain test, without the ddp marker and outside of ddp_world.run; on ranks, use assert_same_on_all_ranks"
    )


def _tolerance_error(rtol: float | None, atol: float | None) -> str:
    if (rtol is None) != (atol is None):
        return f"give both rtol and atol, or neither; {'rtol' if rtol is None else 'atol'} is missing"
    for name, value in (("rtol", rtol), ("atol", atol)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            return f"{name} must be a number that is not negative, not {value!r}"
    return ""


# Ranks


def _attempt(
    what: str, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> tuple[Result | None, str]:
    """The result, or an error in a sentence that is sent to the other ranks, which wait for this one."""
    try:
        return function(*args, **kwargs), ""
    except UsageError as error:
        return None, str(error).removeprefix("detect_anomalous_params: ")
    except Exception as error:
        reason = as_bug(error) if is_ours(error) else f"{type(error).__name__}: {error}"
        return None, f"{what} cannot be read ({reason})"


def _refuse(error: str, what: str) -> None:
    __tracebackhide__ = True
    if error:
        raise (BugError if BUG in error else UsageError)(f"{what}: {error}")


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
def _exchange(what: str, group: Any, purpose: str, timeout: float | None) -> Iterator[StoreExchange]:
    """An exchange, in a block in which the other ranks are waited for."""
    exchange = StoreExchange.over(group, purpose, timeout)
    before = this_rank.own_slots().collective
    this_rank.set_collective(what)
    try:
        yield exchange
    except RanksTimedOutError as error:
        raise HangError(
            f"{format_ranks(error.ranks)} did not call {what} within {exchange.timeout:g} s; every rank of the group "
            "must call it, the same number of times"
        ) from None
    finally:
        this_rank.set_collective(before)


def _difference_between_ranks(
    value: Any,
    options: messages.CompareOptions,
    error: str,
    group: dist.ProcessGroup | None,
    name: str,
    timeout: float | None,
) -> str:
    """The message, the same on every rank; empty where all is the same."""
    __tracebackhide__ = True
    from ddpcheck.gather.state.fingerprints import digest_of
    from ddpcheck.testing.assertions.on_rank import entries_of, items_of, measured

    what = f"assert_same_on_all_ranks({name!r})" if name else "assert_same_on_all_ranks"
    ranks = _ranks_of(group, what)
    items, failure = _attempt("what was given", items_of, value)
    location = str(user_location() or "")

    def values(canonical: bool = False) -> messages.RankValues:
        entries, unread = _attempt("what was given", entries_of, items or (), options, canonical=canonical)
        return messages.RankValues(options, entries or (), location, error or failure or unread)

    mine = values()
    found: list[messages.Mismatch] = []
    by_rank, equal = {ranks[0]: mine}, True
    if len(ranks) == 1:
        _refuse(mine.error, what)
    else:
        with _exchange(what, group, "same", timeout) as exchange:
            equal = len(set(exchange.all_gather("digest", digest_of(replace(mine, location=""))))) == 1
            everyone = [mine] * len(ranks) if equal else exchange.all_gather("detail", values(canonical=True))
            by_rank = dict(zip(ranks, everyone, strict=True))
            _refuse(messages.usage_error(by_rank), what)
            found = measured(messages.differences(by_rank), items or (), options, group, exchange)
    if equal and messages.holds_nothing(mine):
        return (
            f"{what} compared nothing: it was given no tensor, number or text, on any rank. Gradients are None before "
            "backward, and after zero_grad()."
        )
    return messages.mismatch_message(found, by_rank, name)
