"""Progress as lines of a log."""

import pytest

from atoll.core import progress


def test_lines_have_rate_and_time_left_only_if_they_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress("launch", 1000, done=200) as bar:
        bar.update(0)
        bar.set_postfix_str("experts/000 loss 0.5", refresh=False)
        bar.update(100)  # the first progress: its duration is unknown
        bar.update(100)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "launch: 200 of 1,000 images"
    assert second == "launch: 300 of 1,000 images, experts/000 loss 0.5"
    assert third.startswith("launch: 400 of 1,000 images, ")
    assert third.endswith(" left, experts/000 loss 0.5")
    assert " per second, " in third


def test_durations_have_a_unit_that_fits() -> None:
    seconds = (5, 119, 600, 3 * 3600, 60 * 3600)
    assert [progress.duration(one) for one in seconds] == ["5 s", "119 s", "10 min", "3.0 h", "2.5 days"]
