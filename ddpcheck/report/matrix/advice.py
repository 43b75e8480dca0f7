"""From the rows of a matrix to sentences: which options a model needs, which are safe, wrong, or cost for nothing.

A pure function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import join_names
from ddpcheck.report.matrix.matrix import Advice, MatrixRow
from ddpcheck.report.matrix.option_sets import DEFAULTS, FIND_UNUSED

_NEEDLESS = "DDP109"
_NEVER_TRAINED = ("DDP101", "DDP102")


def advise(rows: Sequence[MatrixRow], *, noise: float | None = None) -> tuple[Advice, ...]:
    """Advice that follows from the rows of a matrix, the most important first; `noise` as in `Matrix`."""
    rows = [row for row in rows if row.own or not row.label]  # what is sharded has none of these options
    own = next((row for row in rows if row.own), None)
    if own is None:
        return ()
    found = [_on_own(own)] if own.verdict != "skipped" else []
    noise = noise or 0.0
    tried = [row for row in rows if row.verdict != "skipped"]
    fine = [row for row in tried if row.fine]
    defaults = next((row for row in tried if not row.label and row.options == DEFAULTS), None)
    if not fine:
        found += _on_fault(tried, own)
    elif defaults is not None and not defaults.fine:
        found += _on_needs(defaults, fine, said=defaults.own)
    if fine:
        found += _on_wrong(tried, fine)
        found += _on_fine(fine, noise)
    return tuple(found)


def _on_own(own: MatrixRow) -> Advice:
    what = "as the recipe wraps it" if own.label else f"with the recipe's own options ({own.options})"
    if own.verdict == "incomplete":
        return Advice("own", f"Nothing is wrong with the model {what}, but {own.reason}.")
    if own.fine:
        rounding = f", up to the rounding of its hook ({own.error:.1e})" if own.verdict == "lossy" and own.error else ""
        return Advice("own", f"The model is right {what}{rounding}.")
    does = "stops" if own.verdict == "stops" else "trains to the end and is wrong"
    return Advice("own", f"The model {does} {what}: {_because(own)}")


def _because(row: MatrixRow) -> str:
    text = " ".join(filter(None, (row.code, row.reason)))
    return text if text.endswith(".") else f"{text}."


def _on_fault(tried: Sequence[MatrixRow], own: MatrixRow) -> Iterator[Advice]:
    if len(tried) > 1:
        codes = join_names(list(dict.fromkeys(row.code for row in tried if row.code)), most=5)
        kind = f"is not mended by any option ({codes} under all of them)" if codes else "is under all options"
        fix = f" {own.what_to_do}" if own.what_to_do else ""
        yield Advice("fault", f"The fault {kind}.{fix}")


def _on_needs(defaults: MatrixRow, fine: Sequence[MatrixRow], *, said: bool) -> Iterator[Advice]:
    least = min(len(row.arguments) for row in fine)
    enough = [str(row.options) for row in fine if len(row.arguments) == least and not row.hook and not row.label]
    if enough:
        does = "stops" if defaults.verdict == "stops" else "is wrong"
        why = "." if said else f": without, it {does}: {_because(defaults)}"
        either = " or ".join(filter(None, (", ".join(enough[:-1]), enough[-1])))
        yield Advice("needs", f"It needs {either}{why}")
        if defaults.code in _NEVER_TRAINED:
            yield Advice("needs", f"That keeps DDP going and trains nothing more. To mend it: {defaults.what_to_do}")


def _on_wrong(tried: Sequence[MatrixRow], fine: Sequence[MatrixRow]) -> Iterator[Advice]:
    """Rows that are not right although the same options without one of them are."""
    for row in tried:
        less = [other for other in fine if not other.label and _is_less(other, row)]
        if less and not (row.fine or row.label or row.own):
            most = max(less, key=lambda other: len(other.arguments))
            does = "stops it" if row.verdict == "stops" else "is wrong for it"
            yield Advice("wrong", f"{_added(row, most)} {does}: {_because(row)}")


def _is_less(less: MatrixRow, more: MatrixRow) -> bool:
    """Whether the options of `less` are a part of those of `more`."""
    within = all(more.arguments.get(name) == value for name, value in less.arguments.items())
    return within and less.hook in ("", more.hook) and less.options != more.options


def _on_fine(fine: Sequence[MatrixRow], noise: float) -> Iterator[Advice]:
    """What options cost, gain or warn of, and those that make no measurable difference."""
    costs, gains, warns, safe = [], [], [], []
    expected = _warnings(fine[0])
    for row in fine:
        ratio, takes = _step_time(row, noise)
        rounds = f"rounds gradients by up to {row.error:.1e}" if row.verdict == "lossy" and row.error else ""
        right = "right as far as it was compared" if row.verdict == "incomplete" else "right"
        more = {code: message for code, message in _warnings(row).items() if code not in expected}
        needless = any(finding.code == _NEEDLESS for finding in row.findings)
        if needless and (row.options == FIND_UNUSED or row.own):  # else said once, of the option by itself
            cost = f"; {takes} here" if ratio > 1 else ""
            costs.append(f"{row.title} is needless: every parameter contributes in every step on every rank{cost}.")
        elif ratio > 1 and not needless:
            costs.append(f"{row.title} is {right} and slower: {takes}.")
        elif ratio < 1:
            gains.append((ratio, f"{row.title} is faster{f' and {rounds}' if rounds else ''}: {takes}."))
        if row.own or row.baseline or needless:
            continue
        if more:
            said = " ".join(f"{code}: {message}" for code, message in more.items())
            warns.append(f"{row.title} is {right}, with a warning: {said}")
        elif ratio == 1:
            safe.append(f"{row.title} ({rounds})" if rounds else row.title)
    yield from (Advice("costs", text) for text in costs)
    yield from (Advice("gains", text) for _, text in sorted(gains, key=lambda gain: gain[0]))
    yield from (Advice("warns", text) for text in warns)
    if safe:
        tail = ", and without a measurable difference in step time" if any(row.step_time for row in fine) else ""
        yield Advice("safe", f"Safe{tail}: {'; '.join(safe)}.")


def _step_time(row: MatrixRow, noise: float) -> tuple[float, str]:
    """The step time as a ratio to the baseline's, 1 where no difference could be measured, and in words."""
    time = row.step_time
    if time is None or not time.differs(noise):
        return 1.0, ""
    return time.ratio, f"a step takes {time.ratio:.2f} times as long ({time.low:.2f} to {time.high:.2f})"


def _warnings(row: MatrixRow) -> dict[str, str]:
    return {finding.code: finding.message for finding in row.findings if finding.severity is Severity.WARNING}


def _added(row: MatrixRow, base: MatrixRow) -> str:
    more = {name: value for name, value in row.arguments.items() if name not in base.arguments}
    words = [f"{name}={value!r}" for name, value in more.items()] + ([row.hook] if row.hook != base.hook else [])
    on = "" if base.options == DEFAULTS else f" on top of {base.options}"
    return f"{', '.join(words) or row.title}{on}"
