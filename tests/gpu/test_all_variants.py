"""Every variant of the bundle against the fp64 reference."""

from attnres_aot.selftest.cases import ROW_COUNTS
from attnres_aot.selftest.suite import DeviceLostError, bundle_variants, check_subject, lost


def test_variant(variant, consumer, banks, ledger):
    salt = bundle_variants(consumer.bundle.manifest).index(variant)
    try:
        result = check_subject(variant, consumer, banks, ROW_COUNTS, salt)
    except DeviceLostError as error:
        ledger.results.append(lost(variant, error))
        raise
    ledger.results.append(result)
    assert not result.problems, "\n".join(result.problems)
    assert result.launches == 3 * len(ROW_COUNTS)
