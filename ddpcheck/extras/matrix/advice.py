"""Advice on a matrix: which options are needed, safe, wrong, or slow without benefit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpcheck.extras.matrix.option_sets import FIND_UNUSED
from ddpcheck.findings.report import Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import join_names
from ddpcheck.report.matrix.matrix import Advice, MatrixRow
from ddpcheck.report.matrix.option_sets import DEFAULTS


def advise(rows: Sequence[MatrixRow], *, noise: float | None = None) -> tuple[Advice, ...]:
    """Return advice on DDP options, most important first; `noise` is `Matrix.noise`."""
    rows = [row for row in rows if row.own or not row.label]  # sharded rows have none of these options
    own_row = next((row for row in rows if row.own), None)
    if own_row is None:
        return ()
    advice = [_own_advice(own_row)] if own_row.verdict != "skipped" else []
    noise = noise or 0.0
    tried = [row for row in rows if row.verdict != "skipped"]
    fine = [row for row in tried if row.fine]
    defaults = next((row for row in tried if not row.label and row.options == DEFAULTS), None)
    if not fine:
        advice += _fault_advice(tried, own_row)
    elif defaults is not None and not defaults.fine:
        advice += _needs_advice(defaults, fine, is_known=defaults.own)
    if fine:
        advice += _wrong_advice(tried, fine)
        advice += _fine_advice(fine, noise)
    return tuple(advice)


def _own_advice(own: MatrixRow) -> Advice:
    setup = "as the recipe wraps it" if own.label else f"with the recipe's own options ({own.options})"
    if own.verdict == "incomplete":
        return Advice("own", f"Nothing is wrong with the model {setup}, but {own.reason}.")
    if own.fine:
        rounding = f", up to the rounding of its hook ({own.error:.1e})" if own.verdict == "lossy" and own.error else ""
        return Advice("own", f"The model is right {setup}{rounding}.")
    verb = "stops" if own.verdict == "stops" else "trains to the end and is wrong"
    return Advice("own", f"The model {verb} {setup}: {_reason(own)}")


def _reason(row: MatrixRow) -> str:
    text = " ".join(filter(None, (row.code, row.reason)))
    return text if text.endswith(".") else f"{text}."


def _fault_advice(tried: Sequence[MatrixRow], own: MatrixRow) -> Iterator[Advice]:
    if len(tried) > 1:
        codes = join_names(list(dict.fromkeys(row.code for row in tried if row.code)), most=5)
        kind = f"is not mended by any option ({codes} under all of them)" if codes else "is under all options"
        fix = f" {own.what_to_do}" if own.what_to_do else ""
        yield Advice("fault", f"The fault {kind}.{fix}")


def _needs_advice(defaults: MatrixRow, fine: Sequence[MatrixRow], *, is_known: bool) -> Iterator[Advice]:
    least = min(len(row.arguments) for row in fine)
    options = [str(row.options) for row in fine if len(row.arguments) == least and not row.hook and not row.label]
    if options:
        verb = "stops" if defaults.verdict == "stops" else "is wrong"
        reason = "." if is_known else f": without, it {verb}: {_reason(defaults)}"
        choices = " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))
        yield Advice("needs", f"It needs {choices}{reason}")
        rule = RULES.get(defaults.code)
        if rule and rule.no_gradient and not rule.conditional_use:
            yield Advice(
                "needs", f"It avoids the error of DDP, but trains nothing more. To fix that: {defaults.what_to_do}"
            )


def _wrong_advice(tried: Sequence[MatrixRow], fine: Sequence[MatrixRow]) -> Iterator[Advice]:
    """Yield advice on options that make a correct row fail when added."""
    for row in tried:
        simpler = [candidate for candidate in fine if not candidate.label and _is_subset(candidate, row)]
        if simpler and not (row.fine or row.label or row.own):
            nearest = max(simpler, key=lambda candidate: len(candidate.arguments))
            verb = "stops it" if row.verdict == "stops" else "is wrong for it"
            yield Advice("wrong", f"{_added_options(row, nearest)} {verb}: {_reason(row)}")


def _is_subset(less: MatrixRow, more: MatrixRow) -> bool:
    within = all(more.arguments.get(name) == value for name, value in less.arguments.items())
    return within and less.hook in ("", more.hook) and less.options != more.options


def _fine_advice(fine: Sequence[MatrixRow], noise: float) -> Iterator[Advice]:
    """Yield advice on correct rows that are slower, faster, equally fast or have warnings."""
    costs, gains, warns = [], [], []
    safe: list[str] = []
    lossy: list[str] = []
    expected = _warnings(fine[0])
    for row in fine:
        ratio, takes = _step_time(row, noise)
        rounds = f"rounds gradients by up to {row.error:.1e}" if row.verdict == "lossy" and row.error else ""
        right = "right in all that was compared" if row.verdict == "incomplete" else "right"
        warnings = {code: message for code, message in _warnings(row).items() if code not in expected}
        needless = any(RULES[finding.code].needless_option for finding in row.findings)
        if needless and (row.options == FIND_UNUSED or row.own):  # otherwise reported once, for the option by itself
            cost = f"; {takes} here" if ratio > 1 else ""
            costs.append(f"{row.title} is needless: every parameter contributes in every step on every rank{cost}.")
        elif ratio > 1 and not needless:
            costs.append(f"{row.title} is {right} and slower: {takes}.")
        elif ratio < 1:
            gains.append((ratio, f"{row.title} is faster{f' and {rounds}' if rounds else ''}: {takes}."))
        if row.own or row.baseline or needless:
            continue
        if warnings:
            words = " ".join(f"{code}: {message}" for code, message in warnings.items())
            warns.append(f"{row.title} is {right}, with a warning: {words}")
        elif ratio == 1:
            (lossy if rounds else safe).append(f"{row.title} ({rounds})" if rounds else row.title)
    yield from (Advice("costs", text) for text in costs)
    yield from (Advice("gains", text) for _, text in sorted(gains, key=lambda gain: gain[0]))
    yield from (Advice("warns", text) for text in warns)
    tail = ", and without a measurable difference in step time" if any(row.step_time for row in fine) else ""
    if safe:
        yield Advice("safe", f"Safe{tail}: {'; '.join(safe)}.")
    if lossy:
        yield Advice("lossy", f"Right except for rounding{tail}: {'; '.join(lossy)}.")


def _step_time(row: MatrixRow, noise: float) -> tuple[float, str]:
    """Return the step time relative to the baseline (1 if indistinguishable), and in words."""
    time = row.step_time
    if time is None or not time.differs(noise):
        return 1.0, ""
    return time.ratio, f"a step takes {time.ratio:.2f} times as long ({time.low:.2f} to {time.high:.2f})"


def _warnings(row: MatrixRow) -> dict[str, str]:
    return {finding.code: finding.message for finding in row.findings if finding.severity is Severity.WARNING}


def _added_options(row: MatrixRow, base: MatrixRow) -> str:
    extra = {name: value for name, value in row.arguments.items() if name not in base.arguments}
    parts = [f"{name}={value!r}" for name, value in extra.items()] + ([row.hook] if row.hook != base.hook else [])
    suffix = "" if base.options == DEFAULTS else f" on top of {base.options}"
    return f"{', '.join(parts) or row.title}{suffix}"
