"""The reader of metrics.jsonl, beside a job that writes it."""

import json
from pathlib import Path

from atoll.core.metrics_file import TAIL_BYTES, last_line, parse_lines, read_lines


def line(images: int, **extra: object) -> str:
    return json.dumps({"images": images, "loss": 1.5, "images_per_second": 2.0, **extra}) + "\n"


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_lines(file) == []
    assert last_line(file) is None
    for end in ("", '{"images": 8', '{"images": 80, "loss": 1.0'):
        file.write_text(line(20) + line(40, total=100, loss_by_time=[1.0, None]) + end)
        assert [found.images for found in read_lines(file)] == [20, 40]
        last = last_line(file)
        assert last is not None
        assert (last.images, last.total) == (40, 100)


def test_the_last_line_of_a_long_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(number, loss_by_time=[0.5] * 10) for number in range(3000)))
    assert file.stat().st_size > 2 * TAIL_BYTES
    last = last_line(file)
    assert last is not None
    assert last.images == 2999


def test_lines_that_are_not_metrics_are_skipped() -> None:
    assert parse_lines(b"\xff\xfe\n[1]\n{}\nnull\n") == []
