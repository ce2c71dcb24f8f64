"""The command line: verbs, help, overrides and exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atoll import __version__, cli
from atoll.cli.verb import Verb
from atoll.core import config
from atoll.core.errors import nearest
from atoll.core.presets import PRESETS, SUMMARIES


def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "atoll.cli", *arguments], capture_output=True, text=True, check=False)


def test_help_lists_the_verbs_in_pipeline_order_and_never_imports_torch() -> None:
    code = (
        "import sys; from atoll.cli import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'datasets', 'faiss'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.split("\n\n")[1].splitlines()
    listed = [line[7:].split()[0] for line in rows]
    assert listed == list(cli.VERBS)
    expected = ["demo", "init", "config", "prepare", "train", "launch", "merge", "keys", "push", "trust", "join"]
    expected += ["status", "admit", "pull", "sample", "evaluate", "report", "serve", "convert", "export"]
    assert listed == expected
    assert [line[:7].strip() for line in rows if line[:7].strip()] == ["start", "train", "share", "use", "models"]


def test_the_help_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_of_80_columns(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: atoll {verb}" in text
    assert "overrides" not in text
    assert "(default: )" not in text, "an empty default has a word"
    assert "None" not in text
    for line in text.splitlines():
        assert len(line) <= 80, line


@pytest.mark.parametrize("verb", ["init", "launch", "sample", "evaluate", "convert", "export"])
def test_the_examples_of_a_help_are_valid(verb: str) -> None:
    examples = cli.verb_help(verb).rpartition("examples:\n")[2].splitlines()
    assert len(examples) == 2
    for example in examples:
        program, *arguments = shlex.split(example)
        assert (program, arguments[0]) == ("atoll", verb)
        parsed = cli.parse(verb, arguments[1:])
        config.resolve({}, getattr(parsed, "overrides", {}))


def test_every_preset_has_a_line_of_help() -> None:
    text = cli.verb_help("init")
    assert list(SUMMARIES) == list(PRESETS)
    assert all(about in text for about in SUMMARIES.values())


def test_usage_marks_optional_arguments() -> None:
    assert cli.verb_help("sample").startswith("usage: atoll sample [-h] [OPTIONS] RUN [PROMPT ...]\n")
    assert cli.verb_help("trust").startswith("usage: atoll trust [-h] [OPTIONS] RUN [ACTION] [WORD ...]\n")


@pytest.mark.parametrize("option", ["--num_inference_steps", "--num-inference-steps", "--num_inference_steps=20"])
def test_a_name_of_diffusers_gives_ours(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "run", option, "20"]) == 2
    assert f"unknown option {option.partition('=')[0]}; did you mean --steps?" in capsys.readouterr().err


def test_the_names_for_those_of_diffusers_exist() -> None:
    keys = {f"{section}.{key}" for section, part in config.resolve({}).model_dump().items()
            if isinstance(part, dict) for key in part}  # fmt: skip
    options = " ".join(map(cli.verb_help, ("init", "sample")))
    for theirs, ours in cli.DIFFUSERS.items():
        name = re.search(r"--([\w.-]+)", ours)[1]
        assert name in keys if "." in name else f"--{name}" in options, ours
        assert f"--{theirs} " not in options


def test_the_package_runs_as_a_module_and_lists_its_names() -> None:
    code = "import atoll; assert {'load', 'flow', 'AtollPipeline', 'attach'} <= set(dir(atoll)); atoll.flow.solve"
    for arguments in (["-m", "atoll", "--version"], ["-c", code]):
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"atoll {__version__}"


def test_unknown_verb_names_the_nearest() -> None:
    result = atoll("inti")
    assert result.returncode == 2
    assert "unknown verb 'inti' (did you mean 'init'?)" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("wrong", "right"), [("steps", "num_inference_steps"), ("latent", "latents"), ("promt", "prompt"), ("xyz", None)]
)
def test_the_nearest_name_is_a_slip_or_has_the_word(wrong: str, right: str | None) -> None:
    assert nearest(wrong, ["latents", "num_inference_steps", "prompt", "solver"]) == right


def test_ctrl_c_prints_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.start.ShowConfig, "run", interrupted)
    assert cli.main(["config", "runs/mine"]) == 130
    assert capsys.readouterr().err == "atoll: stopped by Ctrl-C\n"


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--help"]])
def test_a_closed_standard_output_prints_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "atoll.cli", *arguments]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Verb) -> None:
        raise BrokenPipeError("a worker died")

    monkeypatch.setattr(cli.VERBS["init"], "run", broken)
    with pytest.raises(BrokenPipeError, match="a worker"):
        cli.main(["init", str(tmp_path / "run")])


def test_an_unknown_preset_lists_the_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path), "--preset", "imgs"]) == 2
    message = f"unknown preset 'imgs' (did you mean 'images'?); known: {', '.join(PRESETS)}"
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", PRESETS)
def test_init_writes_what_config_reads(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.main(["init", str(run), "--preset", preset]) == 0
    expected = config.resolve(PRESETS[preset])
    source = config.absolute_source(expected.data.source, run)
    assert config.load(run) == expected.model_copy(update={"data": expected.data.model_copy(update={"source": source})})
    capsys.readouterr()
    assert cli.main(["config", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert config.resolve(printed) == config.load(run)
    assert cli.main(["config", str(run)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_init_does_not_overwrite_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path)]) == 0
    assert cli.main(["init", str(tmp_path), "--clusters.count", "3"]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(["init", str(tmp_path), "--clusters.count", "3", "--force"]) == 0
    assert config.load(tmp_path).clusters.count == 3


def test_dotted_options_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init", str(tmp_path), "--preset", "laion256"])
    capsys.readouterr()
    cli.main(["config", "--json", "--clusters.count=5", str(tmp_path), "--experts.1.schedule", "cosine"])
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["clusters"]["count"] == 5
    assert resolved["experts"]["1"]["schedule"] == "cosine"
    assert resolved["experts"]["3"]["prediction"] == "epsilon"


@pytest.mark.parametrize("verb", ["demo", "sample", "status", "convert", "keys"])
def test_overrides_for_verbs_without_settings_are_errors(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"demo": [], "keys": [], "convert": [str(tmp_path)] * 2}.get(verb, [str(tmp_path)])
    assert cli.main([verb, *paths, "--guidance.interval", "0.2"]) == 2
    assert f"atoll {verb} accepts no settings of a run: --guidance.interval" in capsys.readouterr().err


def test_an_override_without_a_value_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(tmp_path), "--clusters.count"]) == 2
    assert "--clusters.count needs a value" in capsys.readouterr().err


def test_the_error_for_a_missing_file_names_the_command_that_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", str(tmp_path)]) == 2
    assert f"atoll init {tmp_path}" in capsys.readouterr().err
