"""The report inside its page, as JSON in which no character means anything to HTML; compressed where it is large."""

from __future__ import annotations

import base64
import re
import zlib

from ddpcheck.findings.report import Document
from ddpcheck.render import in_ascii

_PLAIN = 200_000  # characters of JSON up to which it stands in the page as it is
_MOST_DATA = 1 << 28
_DATA = re.compile(r'<script type="application/(json|zlib)" id="ddpcheck-data">([^<]*)</script>')


def data_of(report: Document) -> tuple[str, str]:
    """The kind of data, and the data."""
    text = report.to_json(indent=None)
    if len(text) <= _PLAIN:
        return "json", in_ascii(text, besides="<>&")
    return "zlib", base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()


def data_in(page: str) -> str | None:
    """The JSON of the report that a page is of; None where `page` is no such page.

    Raises:
        ValueError: The data is damaged.
    """
    if not page.lstrip().lower().startswith("<!doctype html"):
        return None
    found = _DATA.search(page)
    if found is None or found[1] == "json":
        return found[2] if found else None
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(found[2], validate=True), _MOST_DATA)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the data in the page is damaged ({error})") from None
    if not reader.eof:
        raise ValueError("the data in the page is not whole")
    return data.decode("utf-8", "surrogatepass")
