"""`docs/bundle_format.md` describes the records as they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
import typing
from pathlib import Path

import pytest

from attnres_aot.bundle import limits, manifest, names
from attnres_aot.spec import params as abi
from attnres_aot.spec import variants

PAGE = (Path(__file__).parents[3] / "docs" / "bundle_format.md").read_text()
SCALARS = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
RECORDS = [
    manifest.Manifest,
    manifest.ArchRecord,
    manifest.SelectionRecord,
    manifest.ModelRecord,
    manifest.MailboxRecord,
    manifest.TableRecord,
    abi.Param,
    manifest.ImageRecord,
    manifest.BudgetRecord,
    manifest.VariantRecord,
    manifest.ProducerRecord,
    manifest.LibraryRecord,
    manifest.Choice,
]


def table_under(heading: str) -> list[list[str]]:
    """Returns the cells of the first table after a heading, without the table's own heading."""
    body = re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
    return rows[2:]


def written(hint: object) -> str:
    """Writes a type as the page does."""
    if hint in SCALARS:
        return SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return hint.__name__
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join(map(written, args))
    if typing.get_origin(hint) is dict:
        return "object" if args[1] is typing.Any else f"object of {written(args[1])}"
    if args[-1] is Ellipsis:
        return f"list of {written(args[0])}"
    return f"[{', '.join(map(written, args))}]"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_page_lists_every_field_with_its_type(record):
    hints = typing.get_type_hints(record)
    expected = [[f"`{field.name}`", written(hints[field.name])] for field in dataclasses.fields(record)]
    rows = table_under(record.__name__)
    assert [row[:2] for row in rows] == expected
    assert all(len(row) == 3 and row[2].endswith(".") for row in rows)


def test_no_record_of_the_manifest_is_left_out():
    defined = {
        value for value in vars(manifest).values() if dataclasses.is_dataclass(value) and isinstance(value, type)
    }
    assert defined == set(RECORDS)


HEADINGS = {"consumer": "a consumer", "statistics": "a statistics producer", "publish": "a publisher"}


@pytest.mark.parametrize("kernel", abi.KERNEL_PARAMS)
def test_the_page_lists_every_parameter_in_order(kernel):
    rows = table_under(f"Parameters of {HEADINGS[kernel]}")
    assert [row[:2] for row in rows] == [[f"`{param.name}`", param.kind] for param in abi.KERNEL_PARAMS[kernel]]


def test_the_page_lists_every_kind_with_its_size():
    (kind,) = (row[2] for row in table_under("Param") if row[0] == "`kind`")
    sizes = re.findall(r"`(\w+)` \((\d+)", kind)
    assert {name: int(size) for name, size in sizes} == abi.KIND_BYTES


def test_the_page_names_the_schema_and_the_limits():
    assert PAGE.startswith(f"# The bundle format, schema {manifest.SCHEMA}\n")
    assert f"at most {names.MAX_NAME_CHARS} characters" in PAGE
    for line in (
        f"| manifest | {manifest.MAX_MANIFEST_BYTES >> 20} MiB; {manifest._MAX_PARTS:,} lists, objects and fields; ",
        f"; numbers of {manifest._MAX_DIGITS} digits |",
        f"| image, all images | {limits.MAX_IMAGE_BYTES >> 20} MiB, {limits.MAX_BUNDLE_BYTES >> 20} MiB |",
        f"| images, variants, producers | {limits.MAX_IMAGES:,}, {limits.MAX_VARIANTS:,}, {limits.MAX_VARIANTS:,} |",
        f"images of a variant | {variants.MAX_DEPLOYMENTS}, {variants.MAX_DEPLOYMENTS}, {limits.MAX_CHOICES} |",
        f"| all tables together | {limits.MAX_TABLE_CHARS:,} characters |",
        f"| any other text | {limits.MAX_TEXT_CHARS} characters |",
    ):
        assert line in PAGE


def test_the_page_says_how_a_manifest_is_digested(bundle):
    """As a reader in another language would check it, from the page alone."""
    data = bundle.manifest_path.read_bytes()
    assert data.count(b'\n "sha256": "') == 1
    start = data.index(b'\n "sha256": "') + len('\n "sha256": "')
    said = data[start : start + 64].decode()
    assert hashlib.sha256(data[:start] + b"0" * 64 + data[start + 64 :]).hexdigest() == said
    assert set(data) <= {*range(0x20, 0x7F), ord("\n")} - {ord("\\")}


def test_a_real_manifest_has_the_form_that_the_page_promises(bundle):
    data = bundle.manifest_path.read_bytes()
    assert data == (json.dumps(json.loads(data), indent=1, sort_keys=True) + "\n").encode("ascii")
    assert sorted(path.name for path in bundle.path.iterdir()) == sorted(
        [manifest.MANIFEST_NAME, *(image["file"] for image in bundle.read()["images"])]
    )
