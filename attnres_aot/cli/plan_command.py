"""`attnres-aot plan`: what a configuration needs, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attnres_aot.bundle.manifest import ProducerRecord, VariantRecord, to_json
from attnres_aot.cli.options import arch_option, config_option, json_option, selection_options
from attnres_aot.cli.printing import faint, show, strong
from attnres_aot.cli.variant_tables import show_producers, show_variants
from attnres_aot.cli.wording import count, pairs
from attnres_aot.config.reader import load_config
from attnres_aot.plan.plan import Plan, Position, Selection, plan
from attnres_aot.plan.records import producer_record, variant_record
from attnres_aot.spec.arch import Arch


@click.command("plan")
@arch_option
@config_option
@selection_options
@json_option
def command(archs: tuple[Arch, ...], config_path: Path, selection: Selection, *, as_json: bool) -> None:
    """Show which variants, producers and images a configuration needs, and for which (tp, dcp)."""
    config = load_config(config_path)
    first = plan(config, archs[0], selection=selection)
    plans = [replace(first, arch=arch) for arch in archs]  # what a model needs is the same for all
    if as_json:
        _write_json(plans)
    else:
        _show(plans)


def _write_json(plans: list[Plan]) -> None:
    """Prints one plan a line, so that not all of a large configuration for many arches is in memory at a time."""
    shown = _as_json(plans[0])
    click.echo('{"plans": [')
    for number, each in enumerate(plans, 1):
        text = json.dumps({**shown, "arch": str(each.arch), "bundle": each.bundle_name})
        click.echo(text + ("," if number < len(plans) else ""))
    click.echo("]}")


def _show(plans: list[Plan]) -> None:
    first, config = plans[0], plans[0].config
    everyone = tuple(each.pair for each in first.deployments)
    counts = f"{count(len(first.variants), 'variant')} and {count(len(first.producers), 'producer')} "
    counts += f"served by {count(len(first.images), 'image')}"
    show(f"{strong(config.name)}: {counts}, for each arch")
    model = config.model
    geometry = f"{count(model.layers, 'layer')} of {model.hidden_size}, {count(model.blocks, 'saved block')} (nb)"
    show(faint(f"{geometry}; (tp, dcp): {pairs(everyone)}"))
    show()
    positions = {str(each.variant): _where(each.positions) for each in first.variants}
    show_variants(tuple(map(variant_record, first.variants)), everyone, positions=positions)
    show()
    show_producers(tuple(map(producer_record, first.producers)), everyone)
    show()
    show(faint("Rows of a source share images: the written block, the aux copy and the"))
    show(faint("mailbox capacity are launch arguments, and with statistics nb is one too."))
    limits = sorted({choice.max_rows for each in first.variants for choice in each.choices if choice.max_rows})
    if limits:
        text = ", ".join(map(str, limits))
        show(faint(f"Some variants have images of their own for few rows: up to {text}."))
    show()
    for each in plans:
        show(f"{strong(each.bundle_name)}: for {each.arch.rule()}")


def _where(positions: tuple[Position, ...]) -> str:
    """Names positions in the model, the commonest ones in short."""
    if positions == (Position.BEFORE_ATTENTION, Position.BEFORE_MLP):
        return "before attn, MLP"
    return ", ".join(position.value for position in positions)


def _as_json(shown: Plan) -> dict[str, Any]:
    return {
        "name": shown.config.name,
        "arch": str(shown.arch),
        "bundle": shown.bundle_name,
        "config_sha256": shown.config.digest,
        "deployments": [
            {
                "tp": each.tp,
                "dcp": each.dcp,
                "attn_stats": str(each.attn_stats),
                "attn_stats_blocks": str(each.attn_stats_blocks),
            }
            for each in shown.deployments
        ],
        "counts": {
            "variants": len(shown.variants),
            "producers": len(shown.producers),
            "images": len(shown.images),
        },
        "images": [{"name": str(spec), "kernel": spec.kernel, **to_json(spec)} for spec in shown.images],
        "variants": [
            {
                **_fields(variant_record(each)),
                "positions": [position.value for position in each.positions],
                "images": [{"name": str(choice.spec), "max_rows": choice.max_rows} for choice in each.choices],
            }
            for each in shown.variants
        ],
        "producers": [{**_fields(producer_record(each)), "image": str(each.spec)} for each in shown.producers],
    }


def _fields(record: VariantRecord | ProducerRecord) -> dict[str, Any]:
    """Returns what a manifest says of a variant or producer, but for its images."""
    fields: dict[str, Any] = to_json(record)
    del fields["choices"]
    return fields
