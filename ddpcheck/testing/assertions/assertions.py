"""Assertions for distributed training: gradient parity, equal values, anomalous parameters.

This module is light: it imports torch only when an assertion is called.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ddpcheck.findings.errors import BugError, DDPCheckError, FindingsError, HangError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import matching_rules
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.tracebacks import BUG, as_bug, is_own_bug
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
    """Assert that DDP gradients of a recipe equal single-process gradients on every rank.

    Called in an ordinary test or script; runs `ddpcheck.check` on its own ranks. Fails on

    - gradients that differ between ranks, or from the average of local gradients, or from single-process gradients of
      the global batch: every DDP3xx finding, of any severity;
    - every other finding of severity error, which means wrong gradients or stopped training, and every finding that
      explains a DDP3xx finding;
    - an incomplete check or a skipped comparison: the reducer did not run because of an unused parameter, there is no
      single-process reference, every gradient was zero (DDP307), or repeating a step gave different gradients
      (DDP308). Ignoring the finding does not make the assertion pass in these cases.

    Args:
        recipe: A `ddpcheck.Recipe` or a TARGET ("path/to/file.py:attr").
        world_size: Number of ranks.
        steps: Training steps to compare.
        rtol: Relative tolerance; with `atol`, replaces the measured tolerances of `ddpcheck.check`. A gradient g
            matches its reference r if norm(g - r) <= atol * sqrt(number of elements) + rtol * norm(r), with Frobenius
            norms, per parameter. By the triangle inequality, gradients that pass `torch.testing.assert_close`
            (`|g - r| <= atol + rtol * |r|` for every element) also pass here. Gradients must still be bit-identical
            between ranks.
        atol: Absolute tolerance; pass `rtol` and `atol` together.
        select: Codes, prefixes or names of the rules to fail on; default: all. A comparison without a selected rule
            may be skipped (reducer: DDP301, DDP302; single process: DDP303 to DDP305, DDP309, DDP310, DDP312).
        ignore: Rules not to fail on, for example `ignore=["batch-coupled"]` if per-rank BatchNorm is intended.
        backend: "gloo" or "nccl"; default: nccl if every rank has its own GPU, else gloo.
        device: "cpu" or "cuda".
        timeout: Timeout of one phase of the check in seconds.
        seed: Seed of all random number generators.
        preload: Modules imported once before ranks are forked; see `ddpcheck.World`.
        msg: Replacement of the message, or a function of the message, as in `torch.testing.assert_close`.

    Returns:
        The report of the check if the assertion holds.

    Raises:
        FindingsError: The gradients differ or could not be compared; an `AssertionError` with the full report as
            `detail`.
        UsageError: An argument is invalid, or this process is a rank of a ddpcheck world.
    """
    __tracebackhide__ = True
    from ddpcheck.render import as_text
    from ddpcheck.report.checking.check import check

    _refuse_on_a_rank()
    _raise_if_error(_tolerance_error(rtol, atol), "assert_parity")
    select, ignore = _as_tuple(select), _as_tuple(ignore)
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
        raise FindingsError(_with_msg(message, msg), detail=as_text(report))
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
    """Assert that `value` is equal on all ranks of `group`; called on each.

    Every rank raises the same error, so that no rank continues and waits for the others. If all values are equal, only
    one 32-byte digest per rank goes over the rendezvous store, which cannot hang on mismatched values; shapes, names
    and then values are exchanged only if digests differ. Without a process group or with one rank, only invalid and
    empty values raise.

    Args:
        value: A tensor of any dtype, layout and device, a number, a string, None, a numpy array, a module (its
            parameters and buffers, by name), or any nesting of these in lists, tuples, dicts, dataclasses and
            iterators. Compare gradients with `[p.grad for p in model.parameters()]`; None must be None on all ranks.
        group: Process group; default: all ranks.
        name: Name of the value in the message.
        rtol: Relative tolerance; default: 0, since DDP keeps values bit-identical on all ranks. With a tolerance, each
            differing tensor is broadcast from one rank.
        atol: Absolute tolerance; pass `rtol` and `atol` together. A value v matches the reference r if
            `|v - r| <= atol + rtol * |r|` for every element; r is the most common value (in a tie, the value of the
            lowest rank).
        equal_nan: If True, NaNs compare equal.
        check_device: If True, device types must be equal; the device index is never compared.
        check_stride: If True, strides of dense tensors must be equal.
        timeout: Seconds to wait for the other ranks; default: the timeout of the group.
        msg: Replacement of the message, or a function of the message, as in `torch.testing.assert_close`.

    Raises:
        AssertionError: The values differ; the message names the first mismatch with ranks, number of elements and
            largest differences, and the other mismatches. Also if there is nothing to compare: no tensor, number or
            text on any rank.
        UsageError: A part of the value cannot be compared (an object, a DTensor, a tensor without data), the options
            differ between ranks, or this rank is not in `group`.
        BugError: ddpcheck itself failed.
        HangError: A rank did not call this function in time; names the ranks.
    """
    __tracebackhide__ = True
    options = messages.CompareOptions(rtol or 0.0, atol or 0.0, equal_nan, check_device, check_stride)
    message = _difference_between_ranks(value, options, _tolerance_error(rtol, atol), group, name, timeout)
    if message:
        raise AssertionError(_with_msg(message, msg))


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
    """Assert that `loss` reaches every parameter of `model` and no unregistered tensor.

    Called between the forward pass and `loss.backward()`; does not modify the graph. With a process group, every rank
    must call this function, and every rank raises the same error, including for parameters that contribute only on
    some ranks, which hang DDP. The ranks exchange only their anomalies, over the rendezvous store.

    Args:
        loss: A scalar tensor, or any nesting of tensors.
        model: The module, with or without the DDP wrapper.
        ignore: Names or patterns ("head.*") of parameters that need not contribute.
        replay: Recomputes the loss to find why and at which line a parameter is lost; called only on ranks with a
            missing parameter.
        group: Process group; default: the group of the DDP wrapper, or all ranks.
        timeout: Seconds to wait for the other ranks; default: the timeout of the group.
        msg: Replacement of the message, or a function of the message, as in `torch.testing.assert_close`.

    Raises:
        AssertionError: Lists the anomalies by kind: parameters not reached by the backward pass (DDP101, DDP102,
            DDP103), parameters reached only on some ranks (DDP104), and tensors that are no parameters of the model
            (DDP106). Parameters in modules passed to re-entrant checkpoints count as contributing, since they are in
            no graph before backward.
        UsageError: `loss` requires no grad, no parameter requires grad, or `ignore` matches no parameter.
        BugError: ddpcheck itself failed.
        HangError: A rank did not call this function in time; names the ranks.
    """
    __tracebackhide__ = True
    from ddpcheck.testing.assertions.on_rank import anomalies_of

    label = "assert_no_anomalous_params"
    if group is None:
        group = getattr(model, "process_group", None) if hasattr(model, "reducer") else None
    ranks = _ranks_of(group, label)
    result = _try_call("the graph of the loss", anomalies_of, loss, model, _as_tuple(ignore), replay)
    by_rank = {ranks[0]: result}
    if len(ranks) > 1:
        with _exchange(label, group, "anomalous", timeout) as exchange:
            by_rank = dict(zip(ranks, exchange.all_gather("detail", result), strict=True))
    _raise_if_error(messages.first_error({rank: error for rank, (_, error) in by_rank.items()}), label)
    message = messages.anomalies_message({rank: anomalies or [] for rank, (anomalies, _) in by_rank.items()})
    if message:
        raise AssertionError(_with_msg(message, msg))


def _with_msg(message: str, msg: Message) -> str:
    if callable(msg):
        return msg(message)
    return message if msg is None else msg


def _as_tuple(names: Sequence[str]) -> Sequence[str]:
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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            return f"{name} must be a number that is not negative, not {value!r}"
    return ""


def _try_call(what: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> tuple[Result | None, str]:
    """Call `function`; return (result, ''), or (None, error) to send to the waiting ranks."""
    try:
        return function(*args, **kwargs), ""
    except UsageError as error:
        return None, str(error).removeprefix("detect_anomalous_params: ")
    except Exception as error:
        reason = as_bug(error) if is_own_bug(error) else f"{type(error).__name__}: {error}"
        return None, f"{what} cannot be read ({reason})"


def _raise_if_error(error: str, what: str) -> None:
    __tracebackhide__ = True
    if error:
        raise (BugError if BUG in error else UsageError)(f"{what}: {error}")


def _ranks_of(group: dist.ProcessGroup | None, what: str) -> list[int]:
    """Return the ranks of `group`, or [0] without a process group."""
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
    """Open a `StoreExchange`; raise `HangError` if ranks do not call the assertion `what`."""
    exchange = StoreExchange.next_exchange(group, purpose, timeout)
    before = this_rank.current_slots().collective
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
    """Compare `value` across ranks; return a message, the same on all ranks, or ''."""
    __tracebackhide__ = True
    from ddpcheck.gather.state.fingerprints import digest_of
    from ddpcheck.testing.assertions.on_rank import compared_items, items_of, with_distances

    label = f"assert_same_on_all_ranks({name!r})" if name else "assert_same_on_all_ranks"
    ranks = _ranks_of(group, label)
    items, failure = _try_call("what was given", items_of, value)
    location = str(user_location() or "")

    def values(canonical: bool = False) -> messages.RankValues:
        entries, unread = _try_call("what was given", compared_items, items or (), options, canonical=canonical)
        return messages.RankValues(options, entries or (), location, error or failure or unread)

    local_values = values()
    mismatches: list[messages.Mismatch] = []
    by_rank, equal = {ranks[0]: local_values}, True
    if len(ranks) == 1:
        _raise_if_error(local_values.error, label)
    else:
        with _exchange(label, group, "same", timeout) as exchange:
            equal = len(set(exchange.all_gather("digest", digest_of(replace(local_values, location=""))))) == 1
            gathered = [local_values] * len(ranks) if equal else exchange.all_gather("detail", values(canonical=True))
            by_rank = dict(zip(ranks, gathered, strict=True))
            _raise_if_error(messages.usage_error(by_rank), label)
            mismatches = with_distances(messages.differences(by_rank), items or (), options, group, exchange)
    if equal and messages.has_nothing_to_compare(local_values):
        return (
            f"{label} compared nothing: it was given no tensor, number or text, on any rank. Gradients are None before "
            "backward, and after zero_grad()."
        )
    return messages.mismatch_message(mismatches, by_rank, name)
