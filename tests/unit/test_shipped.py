"""`attnres-aot config`: the configurations that ship, to start from after an installation with pip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.cli.entry import main
from attnres_aot.config import shipped
from attnres_aot.config.reader import DEFAULT_CONFIG, load_config


def test_the_default_is_printed_to_the_last_byte(capfd):
    assert main(["config"]) == 0
    assert capfd.readouterr().out == DEFAULT_CONFIG.read_text()


def test_what_is_printed_is_a_configuration_that_plans(tmp_path, capfd):
    assert shipped.names() == ("kimi_k3", "kimi_k3_all")
    for name in shipped.names():
        assert main(["config", name]) == 0
        path = tmp_path / "mine.yaml"
        path.write_text(capfd.readouterr().out)
        assert load_config(path).name == name
        assert main(["plan", "--arch", "sm_90", "--config", str(path)]) == 0
        assert name in capfd.readouterr().out


def test_the_list_says_what_each_is(capsys):
    assert main(["config", "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("kimi_k3      Kimi K3: ")
    assert second.startswith("kimi_k3_all  Kimi K3 with every statistics variant")


def test_json(capsys):
    assert main(["config", "kimi_k3_all", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == "kimi_k3_all"
    assert shown["text"] == (shipped.FOLDER / "kimi_k3_all.yaml").read_text()
    assert main(["config", "--list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["configs"]] == ["kimi_k3", "kimi_k3_all"]


@pytest.mark.parametrize("name", ["kimi_k3.yaml", "kimi", "../kimi_k3", "x" * 5000, ""])
def test_an_unknown_name_lists_those_there_are(name, capsys):
    assert main(["config", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "choose from kimi_k3, kimi_k3_all" in err
    assert len(err) < 300


def test_it_works_without_the_build_tools():
    program = "import sys; sys.modules['yaml'] = sys.modules['torch'] = None\n"
    program += "from attnres_aot.cli.entry import main; sys.exit(main(['config']))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, DEFAULT_CONFIG.read_text())


def test_the_checkout_links_to_every_shipped_file():
    """So that a reader of the repository finds them at the top, and nothing exists twice."""
    top = Path(__file__).parents[2] / "configs"
    assert {path.name for path in top.iterdir()} == {f"{name}.yaml" for name in shipped.names()}
    assert all(path.is_symlink() and path.resolve() == shipped.FOLDER / path.name for path in top.iterdir())
