"""What a manifest says of the variants and producers of a plan."""

from __future__ import annotations

from attnres_aot.bundle.manifest import Choice, ProducerRecord, VariantRecord
from attnres_aot.plan.plan import PlannedProducer, PlannedVariant


def variant_record(planned: PlannedVariant) -> VariantRecord:
    """Returns the record of a planned variant."""
    variant = planned.variant
    key = variant.key
    return VariantRecord(
        name=str(variant),
        nb=key.nb,
        has_delta=key.has_delta,
        write=key.write,
        final=key.final,
        slots=variant.slots,
        aux=variant.aux,
        stats=variant.stats,
        choices=tuple(Choice(image=str(choice.spec), max_rows=choice.max_rows) for choice in planned.choices),
        deployments=planned.deployments,
    )


def producer_record(planned: PlannedProducer) -> ProducerRecord:
    """Returns the record of a planned producer."""
    return ProducerRecord(
        name=str(planned.producer),
        kernel=planned.producer.kernel,
        nb=planned.producer.nb,
        choices=(Choice(image=str(planned.spec), max_rows=None),),
        deployments=planned.deployments,
    )
