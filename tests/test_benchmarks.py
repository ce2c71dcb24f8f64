"""Benchmarks share one output format. Their measurements never decide a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HOUR

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))

from harness import Row, interleave  # noqa: E402


def test_targets_are_met_or_not() -> None:
    assert Row("a", 1.2, 1.1).met is True
    assert Row("a", 1.0, 1.1).met is False
    assert Row("a", 1.0, 1.1, better="lower").met is True
    assert Row("a", 1.0).met is None


def test_sides_are_measured_in_turn_in_alternating_order() -> None:
    calls: list[str] = []
    seconds = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=4, warmup=1)
    assert "".join(calls) == "ab" + "abba" * 2
    assert set(seconds) == {"a", "b"}


@pytest.mark.parametrize("name", ["flow"])
def test_the_last_line_of_json_is_the_whole_table(name: str) -> None:
    command = [sys.executable, FOLDER / f"{name}.py", "--quick", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HOUR)
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout.splitlines()[-1])
    assert output["machine"]["cores"] >= 1
    for row in output["rows"]:
        assert set(row) == {"name", "value", "target", "better"}
        assert row["value"] > 0
        assert row["better"] in ("higher", "lower")
