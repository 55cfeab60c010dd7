"""The banks hold the values that they are there for."""

import torch

from attnres_aot.selftest import reference
from attnres_aot.selftest.cases import MAX_ROWS
from attnres_aot.selftest.inputs import BANK_ROWS, FAMILIES, Bank
from attnres_aot.selftest.reference import ARMED_WORD

NEGATIVE_ZERO = -0x8000


def rows_of(bank: Bank, name: str) -> list[int]:
    rows = [i for i, family in enumerate(bank.families) if family.name == name]
    assert rows
    return rows


def logits(bank: Bank, row: int) -> torch.Tensor:
    values = torch.cat([bank.blocks[row], bank.slots[0, row][None]]).double()
    weight = bank.norm.double() * bank.query.double()
    return (values @ weight) * (values.square().mean(-1) + 1e-5).rsqrt()


def test_every_window_of_the_largest_launch_holds_every_family():
    names = {family.name for family in FAMILIES}
    for start in range(BANK_ROWS - MAX_ROWS + 1):
        assert {FAMILIES[i % len(FAMILIES)].name for i in range(start, start + MAX_ROWS)} == names


def test_equal_sources_are_equal(banks):
    for row in rows_of(banks.mild, "equal"):
        assert (banks.mild.blocks[row] == banks.mild.slots[0, row]).all()


def test_one_logit_dominates(banks):
    for row in rows_of(banks.steep, "dominant"):
        first, second = logits(banks.steep, row).topk(2).values
        assert first > 1e3
        assert second < 0.1 * first


def test_logits_reach_ten_thousand_of_either_sign(banks):
    """The largest logit is |norm * query| * sqrt(H), so it grows with H: about 2 H."""
    reach = banks.hidden
    found = torch.stack([logits(banks.steep, row) for row in rows_of(banks.steep, "aligned")])
    assert found.max() > reach
    assert found.min() < -reach


def test_zeros_and_specials_are_there(banks):
    bank = banks.mild
    parts = (bank.prefix, bank.slots, bank.blocks.movedim(1, 0))

    def values(name: str, row: int) -> torch.Tensor:
        return torch.cat([part.reshape(-1, BANK_ROWS, banks.hidden)[:, row].flatten() for part in parts])

    for row in rows_of(bank, "zero"):
        assert (values("zero", row) == 0).all()
    for row in rows_of(bank, "negative-zero"):
        assert (values("negative-zero", row).view(torch.int16) == NEGATIVE_ZERO).all()
    for row in rows_of(bank, "subnormal"):
        found = values("subnormal", row)
        assert 0 < found.abs().max() < 2.0**-126
    for name, what in (("infinite", torch.inf), ("negative-infinite", -torch.inf)):
        for row in rows_of(bank, name):
            assert (values(name, row) == what).sum() == 1
    for row in rows_of(bank, "not-a-number"):
        assert values("not-a-number", row).isnan().sum() == 1


def test_nearly_armed_words_are_one_bit_away_once_published(banks):
    bank = banks.mild
    mailbox = torch.empty(1, 1, banks.hidden, dtype=torch.bfloat16)
    for row in rows_of(bank, "nearly-armed"):
        reference.arm(mailbox)
        reference.publish(mailbox, 0, bank.slots[0, row][None])
        words = mailbox.view(torch.int32)
        assert not (words == ARMED_WORD).any()
        assert (words == ARMED_WORD | 0x00010000).sum() == banks.hidden // 4
        assert (words == 0x00000001).sum() == banks.hidden // 8
