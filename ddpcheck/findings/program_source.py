"""What the source of a program says, asked through one object: what was asked can be told where the source is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_type_hints

import msgspec

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


class ProgramSource:
    """The files of a program, or what was asked of them elsewhere.

    Attributes:
        answers: To each question that was asked, in lists, strings and numbers.
    """

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        """Take the files that are here; `answers`: take those, of another machine, and read no file."""
        self.answers: dict[str, Any] = dict(answers or {})
        self._is_here = answers is None

    def ask(self, question: Callable[_Asked, _Answer], *asked: _Asked.args, **named: _Asked.kwargs) -> _Answer | None:
        """What a function that reads source files returns; `None` where nobody has asked when these were there."""
        key = f"{question.__name__}{asked}{named or ''}"
        if not self._is_here:
            answer = self.answers.get(key)
            return None if answer is None else msgspec.convert(answer, get_type_hints(question)["return"])
        found = question(*asked, **named)
        self.answers[key] = msgspec.to_builtins(found)
        return found
