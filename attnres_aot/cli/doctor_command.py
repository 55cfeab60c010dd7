"""`attnres-aot doctor`: whether bundles can be launched on this machine."""

from __future__ import annotations

import click

from attnres_aot.cli.options import json_option
from attnres_aot.cli.printing import show
from attnres_aot.doctor.doctor import diagnose, gather_facts, report_json, report_lines


@click.command("doctor")
@click.argument("bundle", required=False)
@click.option("--name", help="Configuration name, e.g. kimi_k3; any when left out.")
@json_option
def command(bundle: str | None, *, name: str | None, as_json: bool) -> int:
    """Say whether bundles can be launched here, and how to fix it if not.

    BUNDLE is a bundle or a folder of bundles; when left out, they are searched for as load() does. Exits with 1 when
    something prevents launching.
    """
    facts = gather_facts(bundle, name)
    findings = diagnose(facts)
    show(report_json(facts, findings) if as_json else "\n".join(report_lines(facts, findings)))
    return int(any(finding.severity == "problem" for finding in findings))
