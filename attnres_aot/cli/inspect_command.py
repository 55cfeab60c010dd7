"""`attnres-aot inspect`: what a bundle holds, one variant or image in full, and the code of an image."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from attnres_aot.binary.cubin import read_cubin
from attnres_aot.binary.disassembler import disassemble, find_disassembler
from attnres_aot.bundle.manifest import ImageRecord, VariantRecord, dump_manifest, to_json
from attnres_aot.bundle.reader import Bundle, read_bundle, read_image
from attnres_aot.cli.bundle_argument import bundles_at
from attnres_aot.cli.inspect_show import ImageView, show_bundle, show_bundles, show_part
from attnres_aot.cli.options import json_option
from attnres_aot.cli.printing import show_json
from attnres_aot.cli.streams import tell
from attnres_aot.cli.variant_tables import Part, images_of, parts_of
from attnres_aot.errors import BundleError, UsageError, VariantMissError
from attnres_aot.spec.arch import parse_arch

_Record = TypeVar("_Record", Part, ImageRecord)


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path), metavar="BUNDLE")
@click.option(
    "--variant", "variant_name", metavar="NAME", help="Show one variant or producer in full, with its images."
)
@click.option("--image", "image_name", metavar="NAME", help="Show one image in full, with what its binary says.")
@click.option("--sass", is_flag=True, help="Add the disassembled code; with --variant or --image.")
@json_option
def command(path: Path, *, variant_name: str | None, image_name: str | None, sass: bool, as_json: bool) -> int:
    """Show what a bundle holds and for which GPUs it is.

    BUNDLE is a bundle folder, or a folder of bundles, which are then listed. Exits with 1 when one cannot be read.
    """
    if variant_name is not None and image_name is not None:
        raise UsageError("--variant and --image exclude each other; choose one")
    if sass and variant_name is None and image_name is None:
        raise UsageError("--sass shows the code of one image: add --image NAME or --variant NAME")
    found = bundles_at(path)
    if variant_name is None and image_name is None:
        return _one(path, as_json=as_json) if found == (path,) else _all(found, as_json=as_json)
    if len(found) > 1:
        raise UsageError(f"{str(path)!r} holds several bundles; choose one of {', '.join(each.name for each in found)}")
    bundle = read_bundle(found[0])
    manifest = bundle.manifest
    part = None if variant_name is None else _find(bundle, "variant or producer", variant_name, parts_of(manifest))
    names = [choice.image for choice in part.choices] if part else [str(image_name)]
    views = [_view(bundle, _find(bundle, "image", name, manifest.images), sass=sass) for name in names]
    if as_json:
        show_json(_part_as_json(bundle, part, views))
    else:
        show_part(bundle, part, views)
    return 0


def _one(path: Path, *, as_json: bool) -> int:
    bundle = read_bundle(path)
    if as_json:
        show_json(_as_json(bundle))
    else:
        show_bundle(bundle)
    return 0


def _all(paths: Iterable[Path], *, as_json: bool) -> int:
    """Shows the bundles of a folder, and which of them cannot be read; returns the exit status."""
    bundles: list[Bundle] = []
    unreadable: list[tuple[Path, str]] = []
    for path in paths:
        try:
            bundles.append(read_bundle(path))
        except BundleError as error:
            unreadable.append((path, str(error)))
    if as_json:
        bad = [{"path": str(path), "problem": problem} for path, problem in unreadable]
        show_json({"bundles": [_as_json(bundle) for bundle in bundles], "unreadable": bad})
        return 1 if unreadable else 0
    if bundles:
        show_bundles(bundles)
    for path, problem in unreadable:
        tell(f"{path.name}: cannot be read: {problem}")
    return 1 if unreadable else 0


def _find(bundle: Bundle, what: str, name: str, records: Sequence[_Record]) -> _Record:
    """Returns the record of a name.

    Raises:
      VariantMissError: there is none.
    """
    for record in records:
        if record.name == name:
            return record
    raise VariantMissError(_miss(bundle, what, name, [record.name for record in records]))


def _miss(bundle: Bundle, what: str, name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=5, cutoff=0.3) or known[:5]
    return (
        f"no {what} {name!r:.140} among the {len(known)} of {bundle.path}; nearest: {', '.join(near) or 'none'}. "
        f"`attnres-aot inspect {shlex.quote(str(bundle.path))} --json` lists every name"
    )


def _view(bundle: Bundle, image: ImageRecord, *, sass: bool) -> ImageView:
    data, manifest = read_image(bundle, image), bundle.manifest
    return ImageView(
        record=image,
        params=manifest.abis[image.abi],
        facts=read_cubin(data),
        serves=tuple(part.name for part in parts_of(manifest) if image.name in images_of([part])),
        sass=disassemble(data, find_disassembler()) if sass else None,
    )


def _as_json(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    arch = parse_arch(manifest.arch.proven)
    return {
        "path": str(bundle.path),
        "gpus": {"arch": str(arch), "rule": arch.rule()},
        "counts": {
            "images": len(manifest.images),
            "variants": len(manifest.variants),
            "producers": len(manifest.producers),
            "bytes": sum(image.size for image in manifest.images),
        },
        "manifest": json.loads(dump_manifest(manifest)),
    }


def _part_as_json(bundle: Bundle, part: Part | None, views: Iterable[ImageView]) -> dict[str, Any]:
    kind = "variant" if isinstance(part, VariantRecord) else "producer"
    return {
        "path": str(bundle.path),
        "arch": to_json(bundle.manifest.arch),
        **({kind: to_json(part)} if part else {}),
        "images": [
            {
                "record": to_json(view.record),
                "params": to_json(view.params),
                "binary": {**to_json(view.facts), "arch": str(view.facts.arch)},
                "serves": list(view.serves),
                **({} if view.sass is None else {"sass": view.sass}),
            }
            for view in views
        ],
    }
