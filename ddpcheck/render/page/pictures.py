"""Pictures as inline SVG: a parameter's path to where it ends, and which ranks wait for which.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddpcheck.findings.figures import ParameterPath
from ddpcheck.findings.wording import counted
from ddpcheck.render.page.frame import Markup, fitted, tag

_WIDTH = 340
_BOX = 40  # height
_GAP = 22
_LETTERS = 44  # in a line

_ENDS = {
    "unused": "no operation of the forward pass reads it",
    "cut": "the path is cut here: no gradient comes back",
    "unreachable": "what this made does not reach the loss",
    "zero": "here its gradient becomes exactly zero",
    "lost": "here backward gives None for its gradient",
}


def path_picture(path: ParameterPath, where: str = "") -> Markup:
    """A parameter, the operations on what was made of it, and the loss that the last of them does not come to."""
    drawn: list[Markup] = [_box(0, path.parameter, "parameter", "bad")]
    top = 0
    bad = path.end in ("cut", "zero", "lost")
    halves = (path.steps[:-1], path.steps[-1:]) if path.left_out else (path.steps, ())
    for number, step in enumerate((*halves[0], *halves[1])):
        top += _BOX + _GAP
        drawn.append(_arrow(top - _GAP, top))
        if path.end in ("zero", "lost"):
            drawn.append(_line(_WIDTH / 2 + 12, top - 8, "and maybe others between", "small"))
        if path.left_out and number == len(halves[0]):
            drawn.append(_line(_WIDTH / 2 + 12, top - 8, f"{counted(path.left_out, 'more operation')}", "small"))
        last = number == len(path.steps) - 1
        about = " · ".join(filter(None, (step.module, str(step.location or ""))))
        drawn.append(_box(top, step.operation, about, "bad" if last and bad else "box"))
    below = top + _BOX
    drawn.append(_cut(below, below + 46))
    ends = f"cut by {path.reason}" if path.reason else _ENDS[path.end]
    drawn.append(_line(_WIDTH / 2, below + 62, _in_box(ends, _WIDTH), "badtext"))
    comes = "" if bad and path.end != "cut" else "no gradient comes from here"
    drawn.append(_box(below + 74, "loss", comes, "off"))
    words = ", ".join(step.operation for step in path.steps)
    said = f"From {path.parameter}{f' through {words}' if words else ''}: {ends}."
    figure = _svg(below + 74 + _BOX, said, drawn)
    return tag("figure", tag("figcaption", f"From the parameter towards the loss{where}"), figure)


def wait_picture(names: Sequence[str], doing: Sequence[str], waits: Mapping[int, Sequence[int]]) -> Markup:
    """Groups of ranks, and arrows from those that wait to those that they wait for.

    Args:
        names: Of the groups, as "ranks 0 and 1".
        doing: What each of them did.
        waits: By number of a group, the numbers of the others that it waits for.
    """
    drawn: list[Markup] = []
    wide = _WIDTH - 60
    for number, (name, what) in enumerate(zip(names, doing, strict=True)):
        drawn.append(_box(number * (_BOX + _GAP), name, what, "bad" if waits.get(number) else "box", wide))
    lane = 0
    for source, targets in waits.items():
        for target in targets:
            start = source * (_BOX + _GAP) + (28 if target > source else 12)
            end = target * (_BOX + _GAP) + (12 if target > source else 28)
            out = wide + 20 + 12 * (lane % 4)
            lane += 1
            drawn.append(tag("path", d=f"M{wide} {start} H{out} V{end} H{wide + 7}", class_="edge"))
            drawn.append(tag("path", d=f"M{wide} {end} l8 -4.5 v9 z", class_="tip"))
    said = "; ".join(f"{names[one]} waits for {', '.join(names[i] for i in others)}" for one, others in waits.items())
    height = len(names) * (_BOX + _GAP) - _GAP
    caption = tag("figcaption", "Which ranks wait for which (an arrow leads to those that are waited for)")
    return tag("figure", caption, _svg(height, said, drawn))


def _svg(height: float, said: str, drawn: Sequence[Markup]) -> Markup:
    box = f"-1 -1 {_WIDTH + 2} {height + 2}"
    return tag(
        "svg", tag("title", said), drawn, viewBox=box, width=_WIDTH + 2, height=height + 2, role="img", aria_label=said
    )


def _box(top: float, name: str, about: str, class_: str, width: int = _WIDTH) -> Markup:
    drawn: Iterator[Markup] = iter(
        (
            tag("title", f"{name}\n{about}" if about else name),
            tag("rect", x=0, y=top, width=width, height=_BOX, rx=5, class_=class_),
            _line(width / 2, top + (17 if about else 25), _in_box(name, width), ""),
            _line(width / 2, top + 33, _in_box(about, width), "small"),
        )
    )
    return tag("g", list(drawn))


def _line(x: float, y: float, text: str, class_: str) -> Markup:
    anchor = "start" if class_ == "small" and x > _WIDTH / 2 else "middle"
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_ or None)


def _arrow(top: float, bottom: float) -> Markup:
    x = _WIDTH / 2
    line = tag("line", x1=x, y1=top, x2=x, y2=bottom - 7, class_="edge")
    return tag("g", line, tag("path", d=f"M{x} {bottom} l-4.5 -8 h9 z", class_="tip"))


def _cut(top: float, bottom: float) -> Markup:
    x, y = _WIDTH / 2, (top + bottom) / 2 - 4
    cross = tag("path", d=f"M{x - 7} {y - 7} l14 14 m0 -14 l-14 14", class_="cross")
    return tag("g", tag("line", x1=x, y1=top, x2=x, y2=bottom, class_="cut"), cross)


def _in_box(text: str, width: int) -> str:
    return fitted(text, _LETTERS * width // _WIDTH)
