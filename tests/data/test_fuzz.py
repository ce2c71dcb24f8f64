"""Mutated sources and model folders raise nothing but `AtollError` and `BadImage`."""

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.core.errors import AtollError
from atoll.data.images import BadImage, decode
from atoll.data.sources.open import open_source
from data import hostile_sources as hostile

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
many = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))

# Where a mutation begins, as a fraction of the file or as a distance from its end; what it is; and whether it replaces.
MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["replace", "insert", "cut", "repeat"]), st.binary(max_size=40)),
    min_size=1,
    max_size=4,
)
SPECIAL = [b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"9" * 12, b"../" * 3, b"[" * 50, b"\x80" * 9]


def mutated(data: bytes, mutations: list[tuple[float, str, bytes]]) -> bytes:
    for where, how, what in mutations:
        start = int(where * len(data))
        new = what or SPECIAL[start % len(SPECIAL)]
        rest = {"replace": len(new), "insert": 0, "cut": 4 * len(new), "repeat": -len(new)}[how]
        data = data[:start] + new + data[max(0, start + rest) :]
    return data


def read_all(spec: Path) -> None:
    """Read a source as `prepare` does."""
    with suppress(AtollError):
        for image in open_source(spec).images():
            with suppress(BadImage):
                decode(image.read(), 8)


def tar_bytes() -> bytes:
    parts = [hostile.stored(f"{n}.png", hostile.png(8)) + hostile.stored(f"{n}.txt", b"a") for n in range(3)]
    others = [hostile.member("long" * 40 + ".png", 0), hostile.stored("x.json", b'{"a": 1}')]
    return b"".join([*parts, *others, hostile.END])


def parquet_bytes(**options: object) -> bytes:
    sink = pa.BufferOutputStream()
    rows = {"image": [hostile.png(8)] * 6, "text": [f"caption {n}" for n in range(6)], "id": [str(n) for n in range(6)]}
    pq.write_table(pa.table({**rows, "vector": [[1.0, 2.0]] * 6}), sink, row_group_size=3, **options)
    return bytes(sink.getvalue())


FILES: dict[str, bytes] = {
    "t.tar": tar_bytes(),
    "plain.parquet": parquet_bytes(compression="none", use_dictionary=False),
    "t.parquet": parquet_bytes(compression="zstd", data_page_version="2.0"),
}


@pytest.mark.parametrize("name", FILES)
@many
@given(mutations=MUTATIONS)
def test_mutated_tars_and_tables(name: str, mutations: list[tuple[float, str, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(mutated(FILES[name], mutations))
        read_all(file)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
@many
@given(mutations=MUTATIONS)
def test_mutated_metadata(name: str, mutations: list[tuple[float, str, bytes]]) -> None:
    rows = {
        "metadata.jsonl": b'{"file_name": "a.png", "text": "one", "n": [1, {"x": 2.5}]}\n{"file_name": "b/../a.png"}\n',
        "metadata.csv": b'file_name,text,n\na.png,"one, two",3\nb.png,three,4\n',
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "a.png").write_bytes(hostile.png(8))
        (Path(folder) / name).write_bytes(mutated(rows[name], mutations))
        read_all(Path(folder))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "data"
    datasets.Dataset.from_dict({"image": [hostile.png(8)], "id": ["a"]}).save_to_disk(folder)
    return folder


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=JSON, key=st.sampled_from(["_data_files", "_fingerprint", "_format_columns", "_split", None]))
def test_any_state_of_a_saved_dataset(saved: Path, value: object, key: str | None) -> None:
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "data"
        shutil.copytree(saved, folder)
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, key: value} if key else value))
        read_all(folder)


def numbers(rng: np.random.Generator) -> bytes:
    return bytes(rng.integers(0, 256, int(rng.integers(0, 300)), dtype=np.uint8))


@pytest.mark.parametrize("make", hostile.IMAGES.values(), ids=hostile.IMAGES)
def test_mutated_image_bombs(make: Callable[[], bytes]) -> None:
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            data = bytearray(make() + numbers(rng))
            for position in rng.integers(0, len(data), 3):
                data[position] = rng.integers(0, 256)
            with suppress(BadImage):
                decode(bytes(data), 8)
