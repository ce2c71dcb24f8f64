"""Write the reference pages of the documentation from the code. `docs_hook.py` puts them into the site.

`PAGES` are whole pages. `TABLES` are parts of hand-written pages, where they replace `<!-- generated: NAME -->`.
Every name, type and default is read from the code, so a page cannot be out of date.
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import warnings
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

PUBLIC = (
    *(
        "atoll",
        "atoll.flow",
        "atoll.nets",
        "atoll.ensemble",
        "atoll.experts.expert",
        "atoll.experts.expert_cache",
    ),
    *("atoll.experts.validation", "atoll.data.dataset", "atoll.train"),
    *("atoll.apps.evaluate.evaluation", "atoll.apps.evaluate.options"),
    *("atoll.apps.models.pipeline", "atoll.nets.layouts", "atoll.core.artifacts", "atoll.core.config"),
)
"""The modules of the Python API. A module with `__all__` shows these names, any other its public definitions."""

# Small parts


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return a Markdown table without the columns that are empty in all rows; bars inside of cells are escaped."""
    names, body = list(header), [list(row) for row in rows]
    kept = [number for number in range(len(names)) if any(row[number] for row in body)]
    lines = [[names[number] for number in kept], ["---"] * len(kept)]
    lines += [[row[number] or "–" for number in kept] for row in body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def code(text: object) -> str:
    """Return text as code, and nothing for no text."""
    return f"`{text}`" if str(text) else ""


def summary(text: str | None) -> str:
    """Return the first paragraph of a docstring or a description in one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def type_name(annotation: Any) -> str:
    """Return a type as a reader of the configuration understands it: choices by value, unions with `or`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.__name__
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(str(value) for value in parts)
    if origin is Annotated:
        return type_name(parts[0])
    if origin in (Union, types.UnionType):
        names = ["null" if part is type(None) else type_name(part) for part in parts]
        return " or ".join(dict.fromkeys(names))
    if origin in (list, tuple):
        return f"list of {type_name(parts[0])}" if parts else "list"
    if origin is not None and issubclass(origin, Mapping):
        return f"mapping of {type_name(parts[0])} to {type_name(parts[1])}"
    return str(getattr(annotation, "__name__", annotation))


def attribute_docs(owner: type) -> dict[str, str]:
    """Return the docstrings below the attributes of a class and of its base classes."""
    bases = [base for base in reversed(owner.__mro__) if base.__module__.startswith("atoll.")]
    return {
        ast.unparse(field.target): doc.value.value
        for base in bases
        for field, doc in pairwise(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body)  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a configuration section and those below it, each with its dotted name."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{prefix}.{name}".lstrip("."))


def field_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and description of the fields of a model."""
    docs = attribute_docs(model)
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            continue
        shown = "required" if default is PydanticUndefined else code(json.dumps(default, default=_plain))
        limits = [
            f"{sign} {getattr(item, key):,}" for item in field.metadata for key, sign in _SIGNS if hasattr(item, key)
        ]
        about = summary(field.description or docs.get(name))
        kind = type_name(field.annotation) + (f", {' and '.join(limits)}" if limits else "")
        yield code(f"{prefix}.{name}".lstrip(".")), kind, shown, about


_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else str(value)


# The pages


def option_parser(verb: type) -> ArgumentParser:
    """Return the parser of a verb's options."""
    import tyro

    from atoll.cli import TYRO_CONFIG

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other way to list its options
        return tyro.extras.get_parser(verb, config=TYRO_CONFIG)


def cli_page() -> str:
    """Return the page of all verbs with their options, from the parser that reads them."""
    from atoll.cli import VERBS
    from atoll.cli.verb import Configured

    lines = [
        "# Command line",
        "",
        "`atoll VERB --help` prints the same options. A verb marked *takes settings*",
    ]
    lines += ["accepts any [configuration key](configuration.md) as an option: `--clusters.count 4`.", ""]
    for name, verb in VERBS.items():
        actions = [action for action in option_parser(verb)._actions if action.dest != "help"]
        usage = ["atoll", name, *(str(action.metavar) for action in actions if not action.option_strings)]
        takes = any(field.name in Configured.__annotations__ for field in dataclasses.fields(verb))  # type: ignore[arg-type]
        lines += [f"## atoll {name}", "", summary(inspect.getdoc(verb)) + (" *Takes settings.*" if takes else ""), ""]
        lines += ["```text", " ".join([*usage, "[options]"]), "```", ""]
        lines += table(("argument", "value", "default", "meaning"), map(option_row, actions))
    return "\n".join(lines)


def option_row(action: Action) -> tuple[str, str, str, str]:
    """Return name, value, default and meaning of an option."""
    found = re.fullmatch(r"(.*?)\s*\((required|default: .*)\)", action.help or "", re.DOTALL)
    about, default = found.groups() if found else (action.help or "", "")
    default = default.removeprefix("default: ")
    name = action.option_strings[0] if action.option_strings else str(action.metavar)
    value = re.sub(r"\{None\}\||\bNone,|,None\b", "", str(action.metavar)) if action.option_strings else ""
    if action.nargs == 0:
        # Every flag is off unless it is given. A flag --no-NAME turns off what is on by default; its hint names that.
        value, default = "flag", f"off: {default}" if name.startswith("--no-") else "off"
    return code(name), code(value) if value != "flag" else value, default.replace("None", "none"), about


def configuration_page() -> str:
    """Return the page of all configuration keys, by section, with the named objectives and the presets."""
    from atoll.core.config import Config, resolve
    from atoll.core.names import OBJECTIVES
    from atoll.core.presets import PRESETS

    lines = ["# Configuration keys", "", "The keys of `RUN/atoll.yaml`. Each is also an option of the verbs that take"]
    lines += ["settings: `--train.lr 1e-4`. An unknown key is an error that names the nearest known one.", ""]
    lines += [f"`atoll init --preset NAME` writes the file from a preset: {', '.join(map(code, PRESETS))}.", ""]
    for name, section in sections(Config):
        lines += [f"## {name or 'Top level'}", "", summary(inspect.getdoc(section)), ""]
        lines += table(("key", "type", "default", "meaning"), field_rows(section, name))
    objective = Config().experts["default"]
    lines += ["## An objective by its parts", "", summary(inspect.getdoc(type(objective))), ""]
    lines += table(("key", "type", "default", "meaning"), field_rows(type(objective), "experts.N"))
    lines += ["## Objectives by name", "", "Keys that are left out have the defaults above.", ""]
    objectives = {name: resolve({"experts": {"default": name}}).experts["default"] for name in OBJECTIVES}
    named = ((code(name), code(json.dumps(_plain(parts)))) for name, parts in objectives.items())
    return "\n".join([*lines, *table(("name", "keys that differ from the default"), named)])


def http_page() -> str:
    """Return the page of all routes and their schemas, from the OpenAPI description of the server."""
    from atoll.apps.studio.app import Studio, create_app

    described = create_app(Studio(None, None)).openapi()  # type: ignore[arg-type] # describing needs neither
    lines = ["# HTTP API", "", f"{summary(described['info']['description'])} `atoll serve` serves these routes, and"]
    lines += ["`GET /openapi.json` returns this description for programs.", ""]
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            about = summary(route.get("description") or route["summary"])
            lines += [f"## {method.upper()} {path}", "", about, ""]
            body = [_schema(part["schema"]) for part in route.get("requestBody", {}).get("content", {}).values()]
            given = [(code(each["name"]), each["in"], _schema(each["schema"])) for each in route.get("parameters", ())]
            given += [("body", "body", kind) for kind in body]
            lines += table(("parameter", "in", "type"), given) if given else []
            lines += table(("status", "meaning", "body"), map(_response, route["responses"].items()))
    for name, schema in described["components"]["schemas"].items():
        lines += [f"## {name}", "", *([summary(schema["description"]), ""] if "description" in schema else [])]
        required = schema.get("required", ())
        rows = (
            (code(key), _schema(part), "required" if key in required else code(json.dumps(part.get("default"))),
             summary(part.get("description")))
            for key, part in schema.get("properties", {}).items()
        )  # fmt: skip
        lines += table(("field", "type", "default", "meaning"), rows)
    return "\n".join(lines)


def _response(item: tuple[str, dict[str, Any]]) -> tuple[str, str, str]:
    status, response = item
    kinds = {_schema(part.get("schema", {})) or code(media) for media, part in response.get("content", {}).items()}
    return code(status), summary(response["description"]), " or ".join(sorted(kinds))


def _schema(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_schema(part) for part in schema["anyOf"])
    if "items" in schema:
        return f"list of {_schema(schema['items'])}"
    if "enum" in schema or "const" in schema:
        return ", ".join(code(value) for value in schema.get("enum", [schema.get("const")]))
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("maxLength", "length ≤"))
    limits = [f"{sign} {schema[key]:,.16g}" for key, sign in signs if key in schema]
    return ", ".join([str(schema.get("type", "")), *limits]) if schema.get("type") else ""


def function_section(name: str) -> list[str]:
    """Return the arguments of a function that is also a verb, from the dataclass that both share."""
    from atoll import api

    own = vars(api)[f"{name.title()}Arguments"]
    docs, about = attribute_docs(own), {each.name: each for each in dataclasses.fields(own)}
    signature = inspect.signature(vars(api)[name])
    result = str(signature.return_annotation).strip("'")
    lines = [f"## atoll.{name}", "", f"{summary(inspect.getdoc(own))} Returns `{result}`.", ""]
    rows = []
    for part in signature.parameters.values():
        default = "required" if part.default is part.empty else code(repr(part.default))
        default = code("{}") if about[part.name].default_factory is dict else default
        kind = str(part.annotation) if get_args(part.annotation) else getattr(part.annotation, "__name__", "")
        kind = re.sub(r"\b(collections\.abc|typing|pathlib|PIL\.Image|atoll\.core\.progress)\.", "", kind)
        rows.append((code(part.name), code(kind), default, summary(docs.get(part.name))))
    return [*lines, *table(("argument", "type", "default", "meaning"), rows)]


def python_page() -> str:
    """Return the page that mkdocstrings fills with the public names."""
    from atoll import api

    lines = ["# Python API", "", "Names that are not listed here may change without notice.", ""]
    for name in api.__all__:
        lines += function_section(name)
    for module in PUBLIC:
        opened = import_module(module)
        names = list(getattr(opened, "__all__", [])) or [
            name for name, value in vars(opened).items()
            if getattr(value, "__module__", None) == module and not name.startswith("_") and inspect.getdoc(value)
        ]  # fmt: skip
        names = [name for name in names if module != "atoll" or name not in api.__all__]
        lines += [f"## {module}", "", summary(inspect.getdoc(opened)), ""]
        lines += [part for name in names if not name.startswith("__") for part in (f"::: {module}.{name}", "")]
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": cli_page,
    "reference/configuration.md": configuration_page,
    "reference/http.md": http_page,
    "reference/python.md": python_page,
}


# Tables inside hand-written pages


def layout_tree() -> str:
    """Return the paths of a run, as the module that defines them lists them."""
    from atoll.core import layout

    tree = [line for line in (inspect.getdoc(layout) or "").splitlines() if line.startswith("    ")]
    return "\n".join(["```text", textwrap.dedent("\n".join(tree)), "```"])


def manifest_tables() -> str:
    """Return the fields that every kind of manifest declares, then those of the values inside of them."""
    from atoll.core import manifests
    from atoll.core.artifacts import ArtifactKind, Content

    kinds = {kind.content: kind for kind in vars(manifests).values() if isinstance(kind, ArtifactKind)}
    inner = [
        value for value in vars(manifests).values()
        if isinstance(value, type) and issubclass(value, Content) and value not in (Content, *kinds)
    ]  # fmt: skip
    lines = []
    for content in (*kinds, *inner):
        kind = kinds.get(content)
        lines += [f"### Manifest `{kind.name}`, version {kind.version}" if kind else f"### {content.__name__}", ""]
        lines += [summary(inspect.getdoc(content)), ""]
        lines += table(("field", "type", "default", "meaning"), field_rows(content))
    return "\n".join(lines)


def _model_table(module: str, name: str) -> str:
    fields = field_rows(getattr(import_module(module), name))
    return "\n".join(table(("field", "type", "default", "meaning"), fields))


TABLES: dict[str, Callable[[], str]] = {
    "layout": layout_tree,
    "manifests": manifest_tables,
    "metrics": lambda: _model_table("atoll.core.metrics_file", "MetricsLine"),
    "lease": lambda: _model_table("atoll.apps.share.lease_records", "Record"),
    "root": lambda: _model_table("atoll.verify.trust", "Root"),
    "policy": lambda: _model_table("atoll.verify.trust", "Policy"),
    "snapshot": lambda: "\n\n".join(_model_table("atoll.verify.trust", name) for name in ("Snapshot", "Network")),
    "signature": lambda: "\n\n".join(_model_table("atoll.verify.signing", name) for name in ("Signature", "Statement")),
}
