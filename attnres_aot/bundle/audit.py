"""What the parts of a usable manifest promise each other: tables say what the bundle holds, nothing is there unused.

`manifest_check` asks whether a reader can use a manifest safely; this module asks whether it tells a true story. The
writer asks before it writes a bundle, and `verify` asks again. Nothing here opens a file of the bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attnres_aot.bundle.manifest import Manifest, ProducerRecord, TableRecord, VariantRecord
from attnres_aot.bundle.manifest_check import MAX_PROBLEMS, producer_of, variant_of
from attnres_aot.spec.arch import BUILDABLE, parse_arch
from attnres_aot.spec.tables import scan_table
from attnres_aot.spec.toolkits import FLAVOURS, cuda_text, oldest_driver
from attnres_aot.spec.variants import MAX_BLOCKS, producers_for, variant_name

Pair = tuple[int, int]
"""(tp, dcp) of a deployment."""


def audit_problems(manifest: Manifest) -> list[str]:
    """Lists the contradictions between the parts of a manifest, in manifest order, up to MAX_PROBLEMS.

    Args:
      manifest: one in which `manifest_problems` finds nothing.
    """
    return list(islice(_problems(manifest), MAX_PROBLEMS))


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _header_problems(manifest)
    yield from _table_problems(manifest)
    yield from _image_problems(manifest)
    pairs = {(table.tp, table.dcp): None for table in manifest.tables}
    blocks = -(-manifest.model.layers // manifest.model.block_size)
    for variant in manifest.variants:
        for problem in (*_block_problems(variant.nb, blocks), *_deployment_problems(variant.deployments, pairs)):
            yield f"variant {variant.name!r:.80}: {problem}"
    yield from _producer_problems(manifest, pairs, blocks)


def statistics_held(variants: Iterable[VariantRecord]) -> dict[Pair, frozenset[int]]:
    """Returns, per deployment, for which numbers of saved blocks it can use precomputed statistics.

    It can where every variant that it has of so many blocks has a twin for it that takes statistics.
    """
    users = {variant.name: frozenset(variant.deployments) for variant in variants}
    able: dict[Pair, set[int]] = {}
    unable: dict[Pair, set[int]] = {}
    nobody: frozenset[Pair] = frozenset()
    for variant in variants:
        if variant.stats:
            for pair in variant.deployments:
                able.setdefault(pair, set()).add(variant.nb)
        else:
            fields = (variant.nb, variant.has_delta, variant.write, variant.final, variant.slots, variant.aux)
            for pair in users[variant.name] - users.get(variant_name(*fields, stats=True), nobody):
                unable.setdefault(pair, set()).add(variant.nb)
    return {pair: frozenset(blocks - unable.get(pair, set())) for pair, blocks in able.items()}


def _header_problems(manifest: Manifest) -> Iterator[str]:
    if not manifest.toolchain:
        yield "toolchain: empty; a bundle says what compiled it"
    arch = parse_arch(manifest.arch.proven)
    if manifest.flavour in FLAVOURS and arch in BUILDABLE:
        derived = cuda_text(oldest_driver(manifest.flavour, arch))
        if manifest.oldest_driver != derived:
            code = f"code of {manifest.flavour} for {arch}"
            yield f"oldest_driver is {manifest.oldest_driver!r}; {code} needs {derived!r}"
    slots = sorted({variant.slots for variant in manifest.variants} - {0})
    if list(manifest.mailbox.slots) != slots:
        yield f"mailbox.slots are {list(manifest.mailbox.slots)}, but the variants have {slots}"
    used = {image.abi for image in manifest.images}
    yield from (f"abis.{name}: no image takes it" for name in sorted(manifest.abis.keys() - used))


def _table_problems(manifest: Manifest) -> Iterator[str]:
    pairs = [(table.tp, table.dcp) for table in manifest.tables]
    if pairs != sorted(pairs):
        yield f"tables: (tp, dcp) {_pairs(pairs)} are not ascending"
    held = statistics_held(manifest.variants)
    for table in manifest.tables:
        where = f"table tp {table.tp}, dcp {table.dcp}"
        problems = [
            *_text_problems("attn_stats", table.attn_stats, manifest.mailbox.capacity),
            *_text_problems("attn_stats_blocks", table.attn_stats_blocks, MAX_BLOCKS),
        ]
        problems = problems or list(_promise_problems(table, held.get((table.tp, table.dcp), frozenset())))
        yield from (f"{where}: {problem}" for problem in problems)


def _text_problems(field: str, text: str, limit: int) -> Iterator[str]:
    parsed, problems = scan_table(text)
    yield from (f"{field}: {problem}" for problem in problems)
    yield from (
        f"{field}: entry '{str(span)[:80]}' is outside of 1..{limit}, or not 0 or 1"
        for span in parsed.spans
        if not 1 <= span.first <= span.last <= limit or span.value not in (0, 1)
    )


def _promise_problems(table: TableRecord, held: frozenset[int]) -> Iterator[str]:
    """Yields the differences between what a good table turns on and what the bundle holds for its deployment."""
    rows = scan_table(table.attn_stats)[0].switched_on()
    spans = scan_table(table.attn_stats_blocks)[0].switched_on()
    promised = frozenset(number for first, last in spans for number in range(first, last + 1)) if rows else frozenset()
    if missing := sorted(promised - held):
        yield f"turns statistics on for {missing} saved blocks, for which the bundle lacks variants that take them"
    if unused := sorted(held - promised):
        yield f"never turns statistics on for {unused} saved blocks, for which the bundle has variants that take them"


def _image_problems(manifest: Manifest) -> Iterator[str]:
    served = {choice.image for variant in manifest.variants for choice in variant.choices}
    served |= {choice.image for producer in manifest.producers for choice in producer.choices}
    for image in manifest.images:
        where = f"image {image.name!r}"
        if image.name not in served:
            yield f"{where}: no variant or producer uses it"
        for field, used, allowed in (
            ("registers", image.registers, image.budget.registers),
            ("smem_static_bytes", image.smem_static_bytes, image.budget.smem_bytes),
        ):
            if used > allowed:
                yield f"{where}: {field} is {used}, over its budget of {allowed}"


def _producer_problems(manifest: Manifest, pairs: Mapping[Pair, None], blocks: int) -> Iterator[str]:
    present = {producer_of(record): record for record in manifest.producers}
    users: dict[ProducerRecord, set[Pair]] = {}
    for variant in manifest.variants:
        for producer in producers_for(variant_of(variant)):
            if producer not in present:
                yield f"variant {variant.name!r:.80}: takes what {str(producer)!r} makes, which is not in the bundle"
            else:
                users.setdefault(present[producer], set()).update(variant.deployments)
    for record in manifest.producers:
        problems = [*_block_problems(record.nb or 0, blocks), *_deployment_problems(record.deployments, pairs)]
        if lacking := sorted(users.get(record, set()) - set(record.deployments)):
            problems.append(f"deployments {_pairs(lacking)} take what it makes, but are not among its own")
        yield from (f"producer {record.name!r:.80}: {problem}" for problem in problems)


def _block_problems(nb: int, blocks: int) -> Iterator[str]:
    if nb > blocks:
        yield f"nb is {nb}; the model has {blocks} saved blocks"


def _deployment_problems(deployments: tuple[Pair, ...], pairs: Mapping[Pair, None]) -> Iterator[str]:
    if not deployments:
        yield "no deployment needs it"
    if list(deployments) != sorted(set(deployments)):
        yield f"its deployments {_pairs(deployments)} are not ascending"
    unknown = [pair for pair in deployments if pair not in pairs]
    if unknown:
        yield f"deployments {_pairs(unknown)} are not in the tables, which have {_pairs(pairs)}"


def _pairs(pairs: Iterable[Pair]) -> str:
    listed = list(pairs)
    more = " and more" if len(listed) > _SHOWN_PAIRS else ""
    return ", ".join(f"({tp}, {dcp})" for tp, dcp in listed[:_SHOWN_PAIRS]) + more


_SHOWN_PAIRS = 8
