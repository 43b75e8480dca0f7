"""`ddpcheck run` on several nodes: the first one has the report on the ranks of all.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ddpcheck.cli.output import complain, say
from ddpcheck.findings.replace import replace
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import Hang, Unended
from ddpcheck.run.node_link import NodeLink


def hand_over(link: NodeLink, ending: Ending) -> int | None:
    """On another node than the first: give it what is here; the exit code here, `None` where it has not taken that."""
    if not link.is_joined or link.number == 0:
        return None
    exit_code = link.hand_over(msgspec.msgpack.encode(ending))
    if exit_code is None:
        complain("the first node has not taken the logs of this one, which has a report of its own", kind="note")
        return None
    say(f"node {link.number} of {link.size}: the report on all ranks is that of node 0, on {link.host}")
    return ending.exit_code or exit_code


def collected(link: NodeLink, ending: Ending) -> Ending:
    """On the first node: wait for the logs of the others; how the script has ended on all of them."""
    if not link.is_joined:
        return ending
    endings = [ending]
    for number, sent in link.collect(interrupted=ending.interrupted).items():
        try:
            endings.append(msgspec.msgpack.decode(sent, type=Ending))
        except msgspec.MsgspecError as error:
            complain(f"how node {number} has ended is not known: {error}", kind="note")
    for number, why in link.refused.items():
        complain(f"the logs of node {number} were not taken: {why}", kind="note")
    return together(endings)


def together(endings: list[Ending]) -> Ending:
    """How the script has ended on several nodes; the first one's exit code counts most."""
    hangs = [one.hang for one in endings if one.hang is not None]
    unended = [one.unended for one in endings if one.unended is not None]
    exit_codes: Mapping[int, int] = {rank: code for one in endings for rank, code in one.exit_codes.items()}
    stacks = {rank: stack for hang in hangs for rank, stack in hang.stacks.items()}
    ranks = sorted({rank for one in unended for rank in one.ranks})
    return replace(
        endings[0],
        exit_code=next((one.exit_code for one in endings if one.exit_code), 0),
        exit_codes=exit_codes,
        hang=Hang(max(hang.seconds for hang in hangs), stacks) if hangs else None,
        interrupted=any(one.interrupted for one in endings),
        unended=Unended(max(one.seconds for one in unended), tuple(ranks)) if unended else None,
    )
