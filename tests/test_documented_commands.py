"""Documented commands and settings are valid; README and tutorials are executed with small sizes.

A page's fenced `bash` blocks have one command per line, which a backslash continues. Every `atoll` command is parsed by
the command line's own parser, and its settings are validated. README and tutorials are then executed in order, in a
temporary folder, except for the commands in `NOT_EXECUTED`.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from atoll import cli
from atoll.apps.studio.schemas import ImagesRequest
from atoll.cli.start import Init
from atoll.cli.verb import Configured
from atoll.core import config as configuration
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.presets import PRESETS
from models.test_dit_pipeline import write as write_dit
from shapes import SETTINGS, write_shapes
from share.servers import CREDENTIALS, moto, new_bucket
from train.workers import TINY

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import reference  # noqa: E402

README = ROOT / "README.md"
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = [README, ROOT / "docs/glossary.md", *sorted((ROOT / "docs").glob("*/*.md"))]
PAGE_IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]

OTHER_PROGRAMS = ("git", "cd", "cp", "pip", "source", "sky", "hf")
EXAMPLE = re.compile(r"examples/\w+\.py")
"""Scripts that a tutorial may run with Python."""
OTHER_OPTIONS = ("--help", "--max-restarts", "--partition", "--account", "--markdown", "--logdir", "--project")
"""Options in the text that belong to every verb, to torchrun, sbatch and trackers."""
OPEN_KEYS = ("experts", "networks")
"""Sections of the configuration whose keys are numbers of experts."""
VERB_OPTIONS = {
    name: {option for action in reference.option_parser(verb)._actions for option in action.option_strings}
    for name, verb in cli.VERBS.items()
}
"""The options of each verb. `--no-NAME` is one only for a flag that is on by default."""
OTHER_YAML = {
    "docs/how-to/train-on-cloud-machines.md": {"name", "workdir", "resources", "envs", "file_mounts", "setup", "run"}
}
"""Pages whose `yaml` block is no configuration of Atoll, with its keys: a task of SkyPilot."""

NOT_EXECUTED = {
    "git clone": "needs a network",
    "pip install": "changes the environment of the tests",
    "cd": "the tests already run inside a clone",
    "source": "changes the user's shell",
    "make demo": "takes 15 minutes; tests/launch/test_demo.py runs it at a small scale",
    "make test": "these are the tests",
    "atoll demo": "takes an hour with these minutes",
    "atoll serve": "does not end by itself; tests/studio/test_serve.py starts and stops it",
}
"""Commands of README and tutorials that the journeys leave out, by how they begin, with the reason."""

SMALL_OPTIONS = {
    "sample": {"--steps": ["2"], "--num-images": ["2"]},
    "evaluate": {
        "--num-images": ["8"],
        "--num-real": ["16"],
        "--num-val": ["8"],
        "--routings": ["top-1"],
        "--without": ["diversity", "trajectories"],
        "--steps": ["2"],
        "--extractors": ["efficientnet-lite0"],
        "--allow-small": [],
    },
    "train": {"--monolith.batch_size": ["16"]},
}
"""Options that a journey sets to small values, by verb."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a page, without leading environment variables."""

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}: {shlex.join(self.words)}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start(2)].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def commands(block: Block) -> Iterator[Command]:
    lines = block.text.splitlines()
    starts = [0, *(number + 1 for number, line in enumerate(lines[:-1]) if not line.endswith("\\"))]
    for number, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        words = shlex.split(" ".join(line.removesuffix("\\") for line in lines[number:end]), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words[:1] == ["torchrun"] and "atoll" in words:
            words = ["atoll", *words[words.index("atoll") + 1 :]]
        if words:
            words[0] = words[0].removeprefix(".venv/bin/")
            yield Command(block.page, block.line + number, tuple(words))


COMMANDS = [
    command for page in PAGES for block in blocks(page) if block.language == "bash" for command in commands(block)
]


def test_there_are_commands_to_check() -> None:
    assert len([command for command in COMMANDS if command.words[0] == "atoll"]) > 50
    assert len(TUTORIALS) == 4


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_a_command_fits_its_box(page: Path) -> None:
    """The box of the site has 80 columns; longer lines run under its copy button."""
    bash = [block for block in blocks(page) if block.language == "bash"]
    assert [line for block in bash for line in block.text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_is_valid(command: Command) -> None:
    program, *arguments = command.words
    if program == "make":
        targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert arguments[0] in targets
    elif program == "curl":
        ImagesRequest.model_validate_json(arguments[arguments.index("-d") + 1])
    elif program == "python":
        assert EXAMPLE.fullmatch(arguments[0])
        assert (ROOT / arguments[0]).is_file()
    elif program != "atoll":
        assert program in OTHER_PROGRAMS
    else:
        verb = cli.parse(arguments[0], arguments[1:])  # exits or raises if it does not fit
        if isinstance(verb, Configured):
            base: Any = {"clusters": {"count": 8}}
            if isinstance(verb, Init):
                base = PRESETS[verb.preset or ("emoji" if verb.base is None else "base")]
            configuration.resolve(base, verb.overrides, source=str(command))


def test_invalid_commands_are_found() -> None:
    for invalid in ("sample runs/demo --no-json", "sample runs/demo --guidance 2", "convert a b --fold", "nonsense"):
        with pytest.raises((SystemExit, AtollError)):
            cli.parse(invalid.split()[0], invalid.split()[1:])


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_settings_of_a_page_are_valid(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "yaml":
            values = yaml.safe_load(block.text)
            if set(values) != OTHER_YAML.get(page.relative_to(ROOT).as_posix()):
                configuration.resolve({"clusters": {"count": 8}, **values}, source=where)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_options_and_keys_in_the_text_exist(page: Path) -> None:
    """An option belongs to a verb that its sentence names, as in `atoll sample`, or to any verb if it names none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"\n\s*\n|\n(?=[-|])|(?<=[.:;])\s", text):
        spans = [span.split() for span in re.findall(r"`([^`]+)`", sentence)]
        named = [span[1] for span in spans if span[0] == "atoll" and span[1:2] and span[1] in cli.VERBS]
        allowed = set[str]().union(OTHER_OPTIONS, *(VERB_OPTIONS[name] for name in named or cli.VERBS))
        options = [word for span in spans for word in span if re.fullmatch(r"--[a-z-]+", word)]
        assert [option for option in options if option not in allowed] == [], sentence
    for word in (word for span in re.findall(r"`([^`]+)`", text) for word in span.split()):
        section, _, key = word.removeprefix("--").rstrip(":,").partition(".")
        if section in Config.model_fields and re.fullmatch(r"[a-z_]+", key) and section not in OPEN_KEYS:
            assert key in configuration.keys_at([section]), f"{page.name}: {word}"


def test_the_examples_of_the_readme_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, verbs = [block for block in blocks(README) if block.language == "python"]
    x0, noise = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    values = {"x0": x0, "noise": noise, "network": lambda x, time: 0.1 * x * torch.cos(time).reshape(-1, 1, 1, 1)}
    exec(compile(example.text, str(README), "exec"), values)
    assert values["loss"].ndim == 0
    assert values["images"].shape == noise.shape
    assert values["images"].isfinite().all()
    # The verbs do nothing where their results exist. tests/test_api.py prepares images of an iterator.
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(trained)
    text = verbs.text.replace("pairs_of_images_and_captions, ", "").replace("steps=25", "steps=2")
    assert "captions" not in text
    exec(compile(text, str(README), "exec"), values)
    assert [image.size for image in values["images"]] == [(32, 32)]


EXAMPLES = {
    "your-own-training-loop": (
        {},
        "{*samples.mean(1).sign().tolist()} == {-1, 1} and (samples.mean(1).abs() - 0.8).abs().mean() < 0.2",
    ),
    "sample-with-little-memory": ({}, "len(images) == 4"),
    "mix-objectives": ({}, "len(images) == 1 and len(both.references) == 6"),
    "export-to-diffusers": (
        {"guidance_scale=4.0": "guidance_scale=4.0, num_inference_steps=2"},
        'image.size == (64, 64) and type(network).__name__ == "DiTTransformer2DModel"',
    ),
    "use-atoll-from-python": (
        {
            "range(4)": "range(3)",  # the run has three experts, and its own learning rate
            ', overrides={"train.lr": 1e-4}': "",
            "steps=25": "steps=2",
            'atoll.prepare("runs/mine", images())': "given = list(images())",
        },
        "len(samples.images) == 2 and set(given[0][1]) == {'caption', 'label', 'license'}"
        " and ConvExpert(3, 5)(noise, time, Condition(noise.new_ones(2, 4, 5))).shape == noise.shape",
    ),
    "gpus": (
        {
            'device_map="balanced"': 'device_map="cpu"',
            "enable_model_cpu_offload()": 'enable_model_cpu_offload(device="cpu")',
        },
        "all(expert.offloaded for expert in pipe.experts)",
    ),
    "images-from-folders-tars-parquet": ({}, "square.size == (256, 256)"),
    "evaluate": (
        {
            "num_images=4096,": 'num_images=4, num_real=16, models=("monolith",), allow_small=True, '
            'extractors=("efficientnet-lite0",), without=("diversity", "diagnostics", "trajectories"),',
            "steps=(30,)": "steps=(2,)",
            "inception": "efficientnet-lite0",
        },
        'math.isfinite(result.models[0].metrics["efficientnet-lite0"].kid.value)',
    ),
}
"""How-to pages with a Python example: what is replaced to make it small, and what is true afterwards."""
SLOW_EXAMPLES = ("export-to-diffusers", "gpus")
"""Examples that take more than a few seconds, here for the export and the pipelines of diffusers."""


def test_every_python_example_is_executed() -> None:
    """Those of serve.md by a real client: tests/studio/openai_clients.py."""
    found = [block for page in PAGES for block in blocks(page)]
    assert {block.page.stem for block in found if block.language == "python"} == {"README", "serve", *EXAMPLES}
    assert not {block.language for block in found} & {"py", "python3", "pycon"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_EXAMPLES else name for name in EXAMPLES]
)
def test_the_python_example_of_a_guide_runs(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, (small, expected) = ROOT / f"docs/how-to/{name}.md", EXAMPLES[name]
    example = "\n".join(block.text for block in blocks(page) if block.language == "python")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for run in ("runs/mine", "runs/other"):
        Path(run).symlink_to(trained)
    if "/my-model" in example:
        assert cli.main(["export", "runs/mine", "my-model"]) == 0
    if "/my-dit" in example:
        write_dit(Path("runs/dit"))
        for options in (
            ["runs/mine", "my-pipeline", "--standalone"],
            ["runs/dit", "my-student", "--model", "monolith"],
        ):
            assert cli.main(["export", *options]) == 0
        assert cli.main(["export", "runs/dit", "my-dit", "--model", "monolith", "--dit-pipeline"]) == 0
    if '"my-images"' in example:
        write_shapes(Path("my-images"))
    for old, new in small.items():
        assert old in example
        example = example.replace(old, new)
    photo = SimpleNamespace(image=Image.new("RGB", (8, 8)), text="a circle", species="circle")
    values: dict[str, object] = {"run": Path("runs/mine"), "math": math, "my_database": [photo]}
    values |= {"noise": torch.randn(2, 3, 8, 8), "time": torch.tensor([3.0, 900.0])}
    exec(compile(example, str(page), "exec"), values)
    assert eval(expected, values)


# Journeys


def with_options(words: tuple[str, ...], options: dict[str, list[str]]) -> list[str]:
    """Return a command with some options replaced."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word in options
        if not dropping:
            kept.append(word)
    return [*kept, *(word for option, values in options.items() for word in (option, *values))]


def small_settings(source: Path, *, images: int, base: bool = False) -> list[str]:
    """Return overrides that make a run of any preset tiny, without models from the hub; a base has its own network."""
    sections: dict[str, dict[str, object]] = {name: dict(values) for name, values in SETTINGS.items()}
    for name, values in TINY.items():
        sections[name] = {**sections.get(name, {}), **values}
    sections["data"] |= {"source": str(source), "workers": 1}
    sections["features"] |= {"model": "efficientnet-lite0"}
    sections["clusters"] = {"count": 2}
    sections["text"] |= {"encoder": "minilm"}
    # Admission demands a little training of the tutorial on sharing, which has two experts.
    sections["train"] |= {"total_images": images, "precision": "float32", "lr": 3e-3}
    sections["router"] |= {"total_images": 64}
    if base:
        del sections["networks"]
    return [
        word
        for name, values in sections.items()
        for key, value in values.items()
        for word in (f"--{name}.{key}", yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip())
    ]


def excepted(command: Command) -> str | None:
    """Return the exception that a command falls under."""
    text = " ".join(command.words) + " "
    return next((start for start in NOT_EXECUTED if text.startswith(f"{start} ")), None)


def execute(page: Path, source: Path, capfd: pytest.CaptureFixture[str], *, store: str | None = None) -> None:
    """Execute the commands of a page in the current folder, with the keys and the fingerprint that were printed."""
    printed: dict[str, str] = {}
    for block in blocks(page):
        for command in commands(block) if block.language == "bash" else ():
            if excepted(command):
                continue
            program, verb, *arguments = command.words
            if program == "python":
                subprocess.run([sys.executable, ROOT / verb, *arguments], check=True, capture_output=True)
                continue
            words = with_options(command.words[1:], SMALL_OPTIONS.get(verb, {}))
            if verb == "init":
                words += small_settings(source, images=3200 if store else 64, base="--base" in words)
            words = [re.sub(r"[A-Z]+_PUBLIC_KEY|FINGERPRINT", lambda found: printed[found[0]], word) for word in words]
            words = [word.replace("shared/run", store or "") for word in words]
            capfd.readouterr()
            code = cli.main(words)
            output = capfd.readouterr()
            assert code == 0, f"{command}\n{output.err}"
            if verb == "keys":
                printed[f"{Path(words[-1]).stem.upper()}_PUBLIC_KEY"] = output.out.strip()
            if verb == "push":
                printed["FINGERPRINT"] = output.out.strip().rpartition("#sha256=")[2].partition("@")[0]


def test_every_exception_is_needed_and_has_a_reason() -> None:
    journeys = [command for command in COMMANDS if command.page in (README, *TUTORIALS)]
    assert {excepted(command) for command in journeys} - {None} == set(NOT_EXECUTED)
    assert all(NOT_EXECUTED.values())
    assert {command.words[0] for command in journeys if not excepted(command)} == {"atoll", "python"}


@pytest.mark.parametrize("page", [README, ROOT / "docs/tutorials/first-run.md"], ids=["README", "first-run"])
def test_the_commands_after_the_demo_run(
    page: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`make demo` is replaced by a small run that has the same jobs."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "runs/demo", ignore=shutil.ignore_patterns("evaluation"))
    execute(page, tmp_path, capfd)
    assert list(Path("runs/demo/samples").glob("0*.png"))


@pytest.mark.slow
def test_the_tutorial_on_your_own_images_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shapes(Path("my-images"))
    execute(ROOT / "docs/tutorials/your-own-images.md", Path("my-images"), capfd)
    assert Path("runs/mine/report.html").is_file()
    assert Path("my-model/model_index.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_the_tutorial_on_sharing_runs(
    where: str, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As owner and as contributor, on a folder and on an S3 server."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/tutorials/sharing-a-run.md"
    if where == "folder":
        execute(page, shapes, capfd, store="shared/run")
    else:
        with moto() as address:
            for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": address}.items():
                monkeypatch.setenv(name, value)
            execute(page, shapes, capfd, store=new_bucket(address))
    assert len(list(Path("runs/model/experts").glob("*/final/manifest.json"))) == 2
    assert list(Path("runs/model/samples").glob("0*.png"))


@pytest.mark.slow
def test_the_tutorial_on_experts_of_a_base_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_shapes(Path("my-images"))
    execute(ROOT / "docs/tutorials/base-experts.md", Path("my-images"), capfd)
    assert len(list(Path("runs/base/experts").glob("*/final/manifest.json"))) == 2
    assert list(Path("runs/base/samples").glob("0*.png"))
