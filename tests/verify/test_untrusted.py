"""Strict JSON: the time to read hostile text grows with its length, not with its square."""

import json
import subprocess
import sys

import pytest

from atoll.verify.untrusted import MAX_DEPTH, Refused, strict_json

SIZE = 16 << 20
LIMIT_SECONDS = 3600
"""A scan takes at most ten seconds on one slow core. With backtracking, 64 kB took 47 s, and these would take hours."""
HOSTILE = {
    "a string without an end": ("b'\"' + b'a' * size", "Unterminated string"),
    "escaped quotes without an end": ("b'\"' + b'\\\\\"' * (size // 2)", "Unterminated string"),
    "backslashes in a string": ("b'\"' + b'\\\\' * size", "Unterminated string"),
    "backslashes outside a string": ("b'\\\\\"' * (size // 2)", "Expecting value"),
    "strings that begin over and over": ("b'\"a' * (size // 2)", "Expecting|Extra data"),
    "quotes alone": ("b'\"' * size", "Extra data"),
    "brackets that open": ("b'[' * size", "nested deeper than 32 levels"),
    "brackets in a string without an end": ("b'[\"' + b'[' * size", "Unterminated string"),
    "a key without an end": ("b'{\"' + b'{\"' * 8 + b'\\\\\\\\' * (size // 2)", "is not plain JSON"),
    "digits": ("b'[' + b'1' * size + b']'", "is not plain JSON"),
}
"""What it is: an expression for the bytes, and the reason that must be given."""
SCAN = """
import re, sys
from atoll.verify.untrusted import Refused, strict_json
size = {size}
try:
    strict_json({data}, "it", 4 * size)
except Refused as reason:
    assert re.search(sys.argv[1], str(reason)), reason
else:
    raise AssertionError("it was taken")
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused_in_linear_time(name: str) -> None:
    """The limit is far from both: a linear scan ends in seconds, a quadratic one takes hours."""
    data, reason = HOSTILE[name]
    code = SCAN.format(size=SIZE if name != "quotes alone" else SIZE // 8, data=data)
    subprocess.run([sys.executable, "-c", code, reason], check=True, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "text",
    ['"[[["', r'"\"[["', r'"\\"', r'["\\", "\"", "{"]', '{"a[": ["]", {"}": "\\\\\\""}]}', '"é\\u005b"', "[]", "1"],
)
def test_valid_json_is_parsed_as_by_the_json_module(text: str) -> None:
    assert strict_json(text.encode(), "it") == json.loads(text)


def test_brackets_in_strings_do_not_count_as_nesting() -> None:
    allowed, deeper = "[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    assert strict_json(allowed.encode(), "it") == json.loads(allowed)
    assert strict_json(json.dumps(["[" * 100, '"[' * 100, "\\" * 100]).encode(), "it")[0] == "[" * 100
    for text in (deeper, f'["]", {deeper}]', f'["\\\\", {deeper}]', f'["\\"]", {deeper}]'):
        with pytest.raises(Refused, match="nested deeper"):
            strict_json(text.encode(), "it")
