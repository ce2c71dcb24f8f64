from pathlib import Path

import pytest

from atoll.core import config
from atoll.core.config import to_yaml
from atoll.core.errors import AtollError


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clusters": {"cuont": 4}}, "unknown key 'clusters.cuont'; did you mean 'clusters.count'?"),
        ({"cluster": {"count": 4}}, "unknown key 'cluster'; did you mean 'clusters'?"),
        ({"clusters": {"zzzz": 4}}, "unknown key 'clusters.zzzz'; known: count"),
        ({"clusters": {"count": 0}}, "clusters.count: Input should be greater than or equal to 1, got 0"),
        ({"clusters": {"count": "many"}}, "clusters.count: .*got 'many'"),
        ({"experts": {"default": "flow-maching"}}, "experts.default: unknown objective .*did you mean 'flow-matching'"),
        ({"experts": {"one": "ddpm"}}, "unknown key 'experts.one'; expected 'default' or the number of an expert"),
        ({"experts": {0: {"schedul": "cosine"}}}, "'experts.0.schedul'; did you mean 'experts.0.schedule'"),
        ({"experts": {0: {"schedule": "cosin"}}}, "experts.0.schedule: .*got 'cosin'"),
        (
            {"networks": {"default": {"modulation": "Single"}}},
            "networks.default: modulation: .*'single' or 'zero', got 'Single'",
        ),
        ({"networks": {0: {"text_projection": "MLP"}}}, "networks.0: text_projection: .*'linear' or 'mlp', got 'MLP'"),
        ({"networks": {"default": {"positions": "alibi"}}}, "networks.default: positions: .*got 'alibi'"),
        ({"networks": {"default": {"patch": 0}}}, "networks.default: patch: .*greater than 0, got 0"),
        ({"networks": {"default": {"width": 50}}}, "networks.default: width 50 must be a multiple of 4 and of heads 4"),
        ({"networks": {"default": {"widht": 64}}}, "unknown field of DiTConfig 'widht' .did you mean 'width'"),
        ({"networks": {"default": "DiT-XS/3"}}, "networks.default: unknown network size 'DiT-XS/3'"),
        (
            {"networks": {"default": {"_class_name": "UNet"}}},
            "unknown kind of network 'UNet' .did you mean 'UNetExpert'",
        ),
        (
            {"router": {"network": {"modulation": "single"}}},
            "router.network: unknown field of RouterConfig 'modulation'",
        ),
        ({"student": {"network": {"modulation": "Zero"}}}, "student.network: modulation: .*got 'Zero'"),
        ({"train": {"ema": {"../../x": 1.0}}}, r"train.ema: '../../x' is not a name of at most 32 letters"),
        ({"train": {"ema": {"/tmp/x": 1.0}}}, "train.ema: '/tmp/x' is not a name"),
        ({"monolith": {"ema": {"../x": 1.0}}}, "monolith.ema: '../x' is not a name"),
        (
            {"train": {"grad_accum_steps": 4}, "monolith": {"batch_size": 6}},
            "monolith.batch_size 6 is not a multiple of grad_accum_steps 4",
        ),
        ({"train": {"ema": {"..\\x": 1.0}}}, "train.ema: .* is not a name"),
        ({"train": {"ema": {".hidden": 1.0}}}, "train.ema: '.hidden' is not a name"),
        ({"train": {"ema": {"": 1.0}}}, "train.ema: '' is not a name"),
        ({"train": {"ema": {"a" * 33: 1.0}}}, "train.ema: 'a*' is not a name"),
        ({"train": {"ema": {"a\n": 1.0}}}, "train.ema: .* is not a name"),
        ({"data": {"buckets": "on"}}, "data.buckets: .*expected auto, off, or a list of sizes such as .64x64, 96x64."),
        ({"data": {"buckets": []}}, "data.buckets: .*expected different sizes, at least one"),
        ({"data": {"buckets": ["64x64", "64x64"]}}, "data.buckets: .*expected different sizes"),
        ({"data": {"buckets": ["64"]}}, "data.buckets: .*'64' is not a size WIDTHxHEIGHT"),
        ({"data": {"caption": []}}, "data.caption: .*expected the names of columns"),
        ({"data": {"caption": ["a", "a"]}}, "data.caption: .*expected different names"),
        ({"data": {"caption": {"a": 0}}}, "data.caption.*greater than 0"),
        (["clusters"], "expected sections with keys, got list"),
    ],
)
def test_the_error_of_a_wrong_setting_names_it(values: object, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        config.resolve(values, source="file.yaml")


def test_all_mistakes_are_listed_in_one_error() -> None:
    with pytest.raises(AtollError) as refusal:
        config.resolve({"clusters": {"cuont": 1, "count": -1}, "nets": {}})
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["clusters: [", "\xff\xfe", "- 1"])
def test_a_file_that_is_not_a_configuration_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "atoll.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(AtollError, match=r"atoll\.yaml"):
        config.load(tmp_path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "atoll.yaml").write_text("")
    assert config.load(tmp_path) == config.Config()


def test_single_experts_differ_from_the_default() -> None:
    resolved = config.resolve({"clusters": {"count": 4}, "experts": {"default": "flow-matching", 3: "ddpm"}})
    assert resolved.objective(0).prediction == "velocity"
    assert resolved.objective(3).prediction == "epsilon"
    with pytest.raises(AtollError, match="no expert 4: this run has experts 0 to 3"):
        resolved.objective(4)


def test_the_written_file_comments_every_key() -> None:
    text = to_yaml(config.Config())
    for line in text.splitlines():
        if line.strip() and not line.startswith(("  default:", "    ")):  # entries of mappings
            assert "#" in line, line


@pytest.mark.parametrize("section", ["experts", "networks"])
def test_an_expert_that_does_not_exist_has_no_settings(section: str) -> None:
    """As of someone who counts from 1: the last would be trained with the default, without a word."""
    chosen = {"experts": "ddpm", "networks": "DiT-S/2"}[section]
    with pytest.raises(AtollError, match=f"{section}.8: there is no expert 8; this run has experts 0 to 7"):
        config.resolve({"clusters": {"count": 8}, section: {8: chosen}})
    assert config.resolve({"clusters": {"count": 9}, section: {8: chosen}})


def test_stored_overrides_keep_the_other_lines_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "atoll.yaml"
    file.write_text(
        "# my photographs\ntrain:\n  lr: 0.01  # high\n  ema:  # two\n    short: 1.0\n    long: 9.0\n"
        "networks:\n  default: {name: DiT-XS/4, width: 256}  # small\nexperts:\n  1: ddpm\n"
    )
    given = {"train.lr": "1e-3", "networks.default.width": "128", "experts.1": "flow-matching", "train.ema.long": "8"}
    config.store(tmp_path, given)
    assert file.read_text() == (
        "# my photographs\ntrain:\n  lr: 1e-3  # high\n  ema:  # two\n    short: 1.0\n    long: 8\n"
        "networks:\n  default: {name: DiT-XS/4, width: 128}  # small\nexperts:\n  1: flow-matching\n"
    )
    expected = config.load(tmp_path, {"train.ema": "{one: 5.0}", "clusters.count": "4"})
    config.store(tmp_path, {"train.ema": "{one: 5.0}", "clusters.count": "4"})
    assert config.load(tmp_path) == expected, "keys of several lines, and keys that the file does not have"


def test_a_source_is_a_path_relative_to_the_run_or_a_name(tmp_path: Path) -> None:
    for source, expected in (
        ("my images", str(tmp_path / "my images")),
        ("../shards/*.tar", str(tmp_path.parent / "shards/*.tar")),
        ("/data/images", "/data/images"),
        ("owner/name", "owner/name"),
        ("emoji:styles=noto", "emoji:styles=noto"),
    ):
        (tmp_path / "atoll.yaml").write_text(f"data: {{source: {source!r}}}")
        assert config.load(tmp_path).data.source == expected
    (tmp_path / "atoll.yaml").write_text("data: {source: mnist, kind: datasets}")
    assert config.load(tmp_path).data.source == "mnist"


def test_options_that_are_not_yaml_are_plain_text() -> None:
    for text in ("*.tar", "@x", "2024-13-45", "a: b: c"):
        assert config.resolve({}, {"data.source": text}).data.source == text
    with pytest.raises(AtollError, match=r"clusters.count: .*got '\[1'"):
        config.resolve({}, {"clusters.count": "[1"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("clusters.max_imbalance", ".inf"), ("experts.default.time_mean", ".nan"), ("clusters.seed", str(2**31))],
)
def test_nan_and_infinity_are_errors(key: str, value: str) -> None:
    with pytest.raises(AtollError, match=key):
        config.resolve({}, {key: value})


@pytest.mark.parametrize(
    ("text", "buckets"),
    [("off", "off"), ("auto", "auto"), ("[64x64, 96x64]", ["64x64", "96x64"])],
)
def test_buckets_survive_yaml(tmp_path: Path, text: str, buckets: object) -> None:
    """YAML reads an unquoted `off` as false."""
    (tmp_path / "atoll.yaml").write_text(f"data: {{buckets: {text}, caption: {{short: 1, long: 3}}}}")
    found = config.load(tmp_path)
    assert found.data.buckets == buckets
    assert found.data.caption == {"short": 1, "long": 3}
    (tmp_path / "atoll.yaml").write_text(to_yaml(found))
    assert config.load(tmp_path) == found
