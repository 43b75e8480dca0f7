"""JSON Schema (draft 2020-12) of saved documents, generated from dataclasses."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ddpcheck.findings.report import SCHEMA_VERSION, Finding

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE_TYPES: Mapping[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def schema_of(kind: type, name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a document.

    Unknown keys are allowed, since newer versions add keys. Fields missing in older versions are not required.
    `extra` has the schemas of keys that are not fields of `kind`, a dataclass as in `from_json.build`.
    """
    definitions: dict[str, Any] = {}
    body = _dataclass_schema(kind, definitions)
    version = {"const": SCHEMA_VERSION}
    body["properties"] = dict(sorted({**body["properties"], **extra, "schema_version": version}.items()))
    body["required"] = sorted([*body["required"], *extra, "schema_version"])
    title = {"$schema": DIALECT, "title": f"ddpcheck {name}"}
    return {**title, **body, "$defs": dict(sorted(definitions.items()))}


def literal(choices: Any) -> dict[str, Any]:
    return {"enum": list(get_args(choices))}


def _dataclass_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]))
    descriptions = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(inspect.getdoc(kind) or "")}
    properties: dict[str, Any] = {}
    required = []
    for field in fields(kind):
        if kind is Finding and field.name == "tags":
            continue  # not in the JSON
        text = {"description": descriptions[field.name]} if field.name in descriptions else {}
        properties[field.name] = {**_hint_schema(hints[field.name], definitions), **text}
        if not field.metadata.get("added"):
            required.append(field.name)
    if kind is Finding:
        properties["name"] = {"type": "string", "description": "Of the rule; empty where its code is not known."}
    summary = {"description": " ".join(kind.__doc__.split("\n\n")[0].split())} if kind.__doc__ else {}
    return {"type": "object", **summary, "properties": dict(sorted(properties.items())), "required": sorted(required)}


def _hint_schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    type_args, origin = get_args(hint), get_origin(hint)
    if origin is UnionType:
        return {"anyOf": [_hint_schema(arg, definitions) for arg in type_args]}
    if origin is Literal:
        return literal(hint)
    if origin is tuple:
        return {"type": "array", "items": _hint_schema(type_args[0], definitions)}
    if origin is Mapping:
        values = {} if type_args[1] is Any else {"additionalProperties": _hint_schema(type_args[1], definitions)}
        return {"type": "object", **values}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        if name not in definitions:
            definitions[name] = {}  # stops the recursion for a recursive type
            definitions[name] = _dataclass_schema(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {"type": _SIMPLE_TYPES[hint]} if hint in _SIMPLE_TYPES else {}
