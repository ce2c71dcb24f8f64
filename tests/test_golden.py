"""The comparison with the golden commit finds differences."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from golden.compare import bit_differences, compare, image_differences, report, update_differences  # noqa: E402

_spec = importlib.util.spec_from_file_location("golden_tool", SCRIPTS / "golden.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

WEIGHTS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.array([np.nan, 0.0])}
IMAGE = {"000.png": np.full((4, 4, 3), 100, np.uint8)}


def with_pixel(value: int) -> dict[str, np.ndarray]:
    changed = IMAGE["000.png"].copy()
    changed[1, 2, 0] = value
    return {"000.png": changed}


def test_equal_bits_are_equal() -> None:
    assert bit_differences(WEIGHTS, {name: tensor.copy() for name, tensor in WEIGHTS.items()}) == []


def test_one_bit_of_a_tensor_is_found() -> None:
    changed = WEIGHTS["a"].copy()
    changed[1, 2] = np.nextafter(changed[1, 2], 2, dtype=np.float32)
    (line,) = bit_differences(WEIGHTS, {**WEIGHTS, "a": changed})
    assert line.startswith("a: 1 of 12 values differ, by at most 7.45e-09")
    assert len(bit_differences(WEIGHTS, {**WEIGHTS, "b": np.array([np.nan, -0.0])})) == 1


def test_missing_added_and_recast_tensors_are_found() -> None:
    assert bit_differences(WEIGHTS, {"b": WEIGHTS["b"]}) == ["a: golden (3, 4), present missing"]
    assert bit_differences({"b": WEIGHTS["b"]}, WEIGHTS) == ["a: golden missing, present (3, 4)"]
    assert bit_differences(WEIGHTS, {**WEIGHTS, "a": WEIGHTS["a"].T}) == ["a: golden (3, 4), present (4, 3)"]
    (line,) = bit_differences(WEIGHTS, {**WEIGHTS, "b": WEIGHTS["b"].astype(np.float32)})
    assert line.startswith("b: float64 became float32")


def test_an_image_may_be_off_by_two_on_another_machine_and_not_by_three() -> None:
    assert image_differences(IMAGE, with_pixel(98)) == []
    assert image_differences(IMAGE, with_pixel(102)) == []
    assert image_differences(IMAGE, with_pixel(97)) == ["000.png: differs by up to 3 of 255"]
    assert image_differences(IMAGE, with_pixel(103)) == ["000.png: differs by up to 3 of 255"]
    assert image_differences(IMAGE, {}) == ["000.png: golden (4, 4, 3), present missing"]
    assert bit_differences(IMAGE, with_pixel(101)) == ["000.png: 1 of 48 values differ, by at most 1"]


def test_an_update_may_be_off_by_a_hundredth_of_its_norm_on_another_machine() -> None:
    update = {"a": WEIGHTS["a"]}
    assert update_differences(update, {"a": 1.009 * WEIGHTS["a"]}) == []
    assert update_differences(update, {"a": 1.011 * WEIGHTS["a"]}) == [
        "the weights differ by 1.1e-02 of the update's norm"
    ]
    assert update_differences(update, {}) == ["a: golden (3, 4), present missing"]


def test_the_report_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    golden = {"expert": WEIGHTS, "sample": IMAGE}
    assert report(compare(golden, golden, bit_differences)) == 0
    assert "equal: 3 tensors and images" in capsys.readouterr().out
    assert report(compare(golden, {"expert": WEIGHTS}, bit_differences)) == 1
    assert report(compare({"expert": WEIGHTS}, golden, bit_differences)) == 1
    assert report(compare(golden, {**golden, "sample": with_pixel(101)}, bit_differences)) == 1
    printed = capsys.readouterr().out
    assert "000.png: 1 of 48 values differ" in printed
    assert "DIFFERENT: 1 of 2 groups" in printed


def test_results_are_read_from_files_under_the_golden_names(tmp_path: Path) -> None:
    for folder in ("run/cluster_0", "run/cluster_1", "samples"):
        (tmp_path / folder).mkdir(parents=True)
    for number in (0, 1):
        save_file({"latent": WEIGHTS["a"] + number}, tmp_path / f"run/cluster_{number}/val-0.safetensors")
    Image.fromarray(IMAGE["000.png"]).save(tmp_path / "samples" / "000.png")
    files = {"shards": "run/*/*-*.safetensors", "sample": "samples/[0-9]*.png"}
    results = tool.collect(tmp_path, files, {"val": "held-out"})
    names = [f"cluster_{number}/held-out-0.safetensors:latent" for number in (0, 1)]
    assert list(results["shards"]) == names
    assert np.array_equal(results["shards"][names[1]], WEIGHTS["a"] + 1)
    assert bit_differences(IMAGE, results["sample"]) == []
    with pytest.raises(tool.GoldenError, match="no file of 'export'"):
        tool.collect(tmp_path, {"export": "export/*.safetensors"}, {})


def test_both_sides_do_the_same() -> None:
    """Both tables list the same results, and the same commands by phase and name; options may be renamed."""
    golden, present = tool.read_table("golden"), tool.read_table("present")
    for key in ("files", "updates"):
        assert list(golden[key]) == list(present[key])
    for initial in (False, True):
        golden_names, present_names = (
            [list(phase) for phase in tool.phases_of(table, initial=initial)] for table in (golden, present)
        )
        assert golden_names == present_names


def test_the_committed_results_are_those_of_the_golden_commit() -> None:
    assert tool.committed_origin()["commit"] == tool.GOLDEN_COMMIT
    assert {file.stem for file in tool.IMAGES.glob("*.png")} == {*tool.sample_commands(tool.read_table("golden"))}
    assert sum(file.stat().st_size for file in [tool.UPDATES, *tool.IMAGES.iterdir()]) < 1_000_000
