"""The origin of a shared run: contributors on the model card, and no code outside Atoll."""

from pathlib import Path

import pytest

import atoll
from atoll.core import config as configuration
from atoll.nets import own
from share.conftest import Published
from share.shared import person


def test_the_card_names_who_trained_and_signed_each_network(published: Published, tmp_path: Path) -> None:
    atoll.export(published.run, tmp_path / "out", model="expert:0")
    section = (tmp_path / "out/README.md").read_text().split("## Contributors")[1].split("##")[0]
    assert f"| experts/000 | owner | {person('owner').public} |" in section


def test_a_shared_run_imports_no_class_whatever_its_settings_say(published: Published) -> None:
    config = configuration.resolve({"networks": {"default": {"class": "own_networks:ConvExpert"}}})
    with pytest.raises(atoll.AtollError, match="is a shared run, and own_networks:ConvExpert is code outside Atoll"):
        own.allow(published.run, config)
    assert "own_networks:ConvExpert" not in own._allowed
