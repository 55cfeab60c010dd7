"""`attnres-aot config`: prints the configurations that ship."""

from __future__ import annotations

import click

from attnres_aot.cli.options import json_option
from attnres_aot.cli.printing import show, show_json
from attnres_aot.columns import table
from attnres_aot.config.shipped import DEFAULT_NAME, about, names, path_of


@click.command("config", epilog="To make a configuration of your own: `attnres-aot config > my_model.yaml`")
@click.argument("name", default=DEFAULT_NAME)
@click.option("--list", "as_list", is_flag=True, help="List the names, each with what it is.")
@json_option
def command(name: str, *, as_list: bool, as_json: bool) -> None:
    """Print a configuration that ships with attnres-aot.

    NAME is one of those that `--list` shows; kimi_k3 when left out.
    """
    shown = {each: path_of(each).read_text(encoding="utf-8") for each in (names() if as_list else (name,))}
    if as_json:
        found = [{"name": each, "about": about(text), "text": text} for each, text in shown.items()]
        show_json({"configs": found} if as_list else found[0])
    elif as_list:
        for line in table([(each, about(text)) for each, text in shown.items()], words=2):
            show(line)
    else:
        show(shown[name].removesuffix("\n"))
