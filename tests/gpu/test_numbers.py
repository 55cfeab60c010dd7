"""Shares of the softmax that are tiny and count: every variant, on inputs made for it."""

import pytest

from attnres_aot.selftest.suite import check_case
from tests.support.far_shares import far_banks, far_case


@pytest.fixture(scope="module")
def far(consumer):
    manifest = consumer.bundle.manifest
    return far_banks(manifest.model.hidden, manifest.mailbox.capacity, consumer.device)


def test_a_small_share_of_a_large_source_counts(variant, consumer, far):
    verdict = check_case(far_case(variant), consumer, far)
    assert not verdict.problems, "\n".join(verdict.problems)
