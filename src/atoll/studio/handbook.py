"""The description of the API as a page to read, made from openapi.json; nothing is fetched from elsewhere."""

from collections.abc import Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]


def handbook(description: Schema) -> str:
    """One page: every route with what it takes and answers."""
    about = description["info"]
    routes = [
        _route(method, path, route)
        for path, methods in description["paths"].items()
        for method, route in methods.items()
    ]
    shapes = [_shape(name, schema) for name, schema in description["components"]["schemas"].items()]
    head = f'<head><meta charset="utf-8"><title>{escape(about["title"])}: API</title>'
    head += '<meta name="viewport" content="width=device-width">'
    head += '<link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/handbook.css"></head>'
    intro = f"<h1>{escape(about['title'])} {escape(about['version'])}</h1><p>{escape(about['description'])} "
    intro += 'For programs: <a href="/openapi.json">openapi.json</a>. The page: <a href="/">studio</a>.</p>'
    body = "\n".join([intro, "<h2>Routes</h2>", *routes, "<h2>Shapes</h2>", *shapes])
    return f'<!doctype html>\n<html lang="en">{head}<body>\n{body}\n</body></html>\n'


def _route(method: str, path: str, route: Schema) -> str:
    rows = [_row(each["name"], each["schema"], each.get("required", False)) for each in route.get("parameters", [])]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    takes = f"<p>Takes {_kind(body)}.</p>" if body else ""
    good = [f"{status} {_content(answer)}".strip() for status, answer in route["responses"].items() if status < "400"]
    bad = sorted((status, answer) for status, answer in route["responses"].items() if status >= "400")
    refusals = ", ".join(f"{status} {escape(answer.get('description', ''))}" for status, answer in bad)
    answers = f"<p>Answers {'; '.join(good)}.</p>" + (f"<p>Refuses with {refusals}.</p>" if bad else "")
    about = escape(route.get("description", ""))
    title = f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
    return f"{title}<p>{about}</p>{_table(rows)}{takes}{answers}"


def _content(answer: Schema) -> str:
    kinds = answer.get("content", {})
    return ", ".join(
        f"{escape(name)} {_kind(kind['schema'])}" if "schema" in kind else escape(name) for name, kind in kinds.items()
    )


def _shape(name: str, schema: Schema) -> str:
    required = schema.get("required", [])
    rows = [_row(key, part, key in required) for key, part in schema.get("properties", {}).items()]
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>{_table(rows)}'


def _row(name: str, schema: Schema, required: bool) -> str:
    default = f", default {escape(str(schema['default']))}" if "default" in schema else ""
    need = "required" if required else f"optional{default}"
    about = escape(str(schema.get("description", "")))
    return f"<tr><td><code>{escape(name)}</code></td><td>{_kind(schema)}</td><td>{need}</td><td>{about}</td></tr>"


def _kind(schema: Schema) -> str:
    """A type in words, with its limits."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    words = escape(str(schema.get("type", "anything")))
    if "items" in schema:
        words += f" of {_kind(schema['items'])}"
    limits = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("maximum", "≤"), ("maxLength", "length ≤"))
        if key in schema
    ]
    return f"{words} {', '.join(limits)}".strip()


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>" if rows else ""
