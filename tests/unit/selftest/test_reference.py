"""The fp64 reference against hand-made results, and the bit rules it stands for."""

from dataclasses import dataclass

import pytest
import torch

from attnres_aot.selftest import reference
from attnres_aot.selftest.reference import Operands
from attnres_aot.spec.variants import parse_variant

H = 64


EPS = (1e-5, 1e-6)


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def operands(rows: int = 2, seed: int = 0, **changes) -> Operands:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    given = {
        "source": normal(rows, H),
        "prefix": normal(rows, H),
        "blocks": normal(rows, 3, H),
        "norm": normal(H),
        "query": normal(H),
        "out_norm": normal(H),
        "out": torch.empty(rows, H, dtype=torch.bfloat16),
    }
    return Operands(**{**given, **changes})


def by_hand(given: Operands, row: int, nb: int, *, final: bool = False) -> list[float]:
    """The contract's steps 2 and 4 to 7 for one row, in Python floats."""
    p = [float(x) for x in given.prefix[row] + given.source[row]]
    sources = [[float(x) for x in given.blocks[row, s]] for s in range(nb)] + [p]
    w = [float(n) * float(q) for n, q in zip(given.norm, given.query, strict=True)]
    eps, out_eps = (float(torch.tensor(e, dtype=torch.float32)) for e in EPS)
    logits = [sum(x * y for x, y in zip(v, w, strict=True)) / (sum(x * x for x in v) / H + eps) ** 0.5 for v in sources]
    weights = [2.718281828459045 ** (logit - max(logits)) for logit in logits]
    mix = [sum(a * v[i] for a, v in zip(weights, sources, strict=True)) / sum(weights) for i in range(H)]
    if final:
        mix = [float(torch.tensor(x, dtype=torch.float32).bfloat16()) for x in mix]
    scale = (sum(x * x for x in mix) / H + out_eps) ** -0.5
    return [x * scale * float(g) for x, g in zip(mix, given.out_norm, strict=True)]


@pytest.mark.parametrize("nb", [1, 2, 3])
def test_output_is_the_contract_by_hand(nb):
    given = operands()
    found = reference.consume(parse_variant(f"nb{nb}-delta"), given, EPS)
    for row in range(2):
        assert found.exact[row].tolist() == pytest.approx(by_hand(given, row, nb), rel=1e-12)


def test_no_saved_block_leaves_the_prefix_alone():
    given = operands()
    found = reference.consume(parse_variant("nb0-write0"), given, EPS)
    value = given.source.double()
    eps = float(torch.tensor(1e-6, dtype=torch.float32))
    wanted = value * (value.square().mean(-1, keepdim=True) + eps).rsqrt() * given.out_norm.double()
    assert torch.equal(found.updated, given.source)
    assert torch.allclose(found.exact, wanted, rtol=1e-12)


def test_final_rounds_the_mixture_first():
    given = operands()
    found = reference.consume(parse_variant("nb3-delta-final"), given, EPS)
    assert found.exact[1].tolist() == pytest.approx(by_hand(given, 1, 3, final=True), rel=1e-12)
    assert found.exact[1].tolist() != pytest.approx(by_hand(given, 1, 3), rel=1e-4)


@pytest.mark.parametrize("name", ["nb1-delta", "nb3-delta", "nb3", "nb3-delta-final"])
def test_statistics_give_the_same_result(name):
    variant, with_statistics = parse_variant(name), parse_variant(f"{name}-stats")
    given = operands()
    mixture, scal = reference.statistics(given.blocks, variant.key.nb, given.norm, given.query, EPS[0])
    plain = reference.consume(variant, given, EPS)
    blind = operands(blocks=torch.full_like(given.blocks, float("nan")), mixture=mixture, scal=scal)
    found = reference.consume(with_statistics, blind, EPS)
    tolerance = 1e-2 if variant.key.final else 2e-6
    assert torch.allclose(found.exact, plain.exact, rtol=tolerance, atol=1e-6)


def test_statistics_follow_their_definition():
    given = operands()
    mixture, scal = reference.statistics(given.blocks, 2, given.norm, given.query, EPS[0])
    values, w = given.blocks.double(), given.norm.double() * given.query.double()
    logits = [(values[:, s] * w).sum(-1) * (values[:, s].square().mean(-1) + 1e-5).rsqrt() for s in range(2)]
    top = torch.maximum(*logits)
    shares = [(logit - top).exp() for logit in logits]
    assert scal[:, 0].tolist() == pytest.approx(top.tolist(), rel=1e-6)
    assert scal[:, 1].tolist() == pytest.approx((shares[0] + shares[1]).tolist(), rel=1e-6)
    wanted = shares[0][:, None] * values[:, 0] + shares[1][:, None] * values[:, 1]
    assert torch.allclose(mixture.double(), wanted, atol=1e-6)


def test_slots_are_summed_in_order_in_fp32_and_rounded_once():
    mailbox = torch.zeros(3, 4, H, dtype=torch.bfloat16)
    mailbox[:, 0, 0] = bf16(2.0**25, 1.0, -(2.0**25))  # the 1 is lost in fp32 only if added before the cancellation
    mailbox[:, 0, 1] = bf16(2.0**25, -(2.0**25), 1.0)
    mailbox[:, 0, 2] = bf16(1.0, 2.0**-8, 2.0**-8)  # 1 + 2**-7; rounding after every slot would give 1
    found = reference.updated_prefix(parse_variant("nb1-ring3"), operands(rows=1, source=mailbox))
    assert found[0, :3].tolist() == [0.0, 1.0, 1.0 + 2.0**-7]


def test_mailbox_rows_beyond_the_launch_are_not_read():
    mailbox = torch.full((2, 4, H), float("nan"), dtype=torch.bfloat16)
    mailbox[:, :2] = 1.0
    found = reference.updated_prefix(parse_variant("nb1-ring2"), operands(rows=2, source=mailbox))
    assert torch.equal(found, torch.full((2, H), 2.0, dtype=torch.bfloat16))


def test_updated_prefix_keeps_subnormals_and_signed_zeros():
    smallest = 2.0**-133
    prefix, delta = bf16(*[smallest, -0.0, -0.0, 1.0]), bf16(*[smallest, -0.0, 0.0, -1.0])
    given = operands(rows=1, source=delta.repeat(H // 4)[None], prefix=prefix.repeat(H // 4)[None])
    found = reference.updated_prefix(parse_variant("nb1-delta"), given)[0, :4]
    assert found.tolist() == [2 * smallest, 0.0, 0.0, 0.0]
    assert found.signbit().tolist() == [False, True, False, False]


def test_publish_never_writes_minus_zero():
    mailbox = torch.empty(2, 3, 8, dtype=torch.bfloat16)
    reference.arm(mailbox)
    assert reference.is_armed(mailbox).all()
    values = bf16(-0.0, 0.0, float("nan"), float("-inf"), -(2.0**-133), 1.0, -0.0, -0.0)
    reference.publish(mailbox, 1, values[None])
    assert not reference.is_armed(mailbox[1, 0]).any()
    assert reference.is_armed(mailbox[0]).all()
    assert reference.is_armed(mailbox[1, 1:]).all()
    kept = [index for index in range(8) if index not in (0, 6, 7)]
    assert torch.equal(mailbox[1, 0].view(torch.int16)[kept], values.view(torch.int16)[kept])
    assert mailbox[1, 0].view(torch.int16)[[0, 6, 7]].tolist() == [0, 0, 0]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    name: str
    value: float
    rounded: float


ROUNDINGS = [
    Rounding(name="tie-to-even-down", value=1 + 2.0**-8, rounded=1.0),
    Rounding(name="tie-to-even-up", value=1 + 3 * 2.0**-8, rounded=1 + 2.0**-6),
    Rounding(name="just-over-a-tie", value=1 + 2.0**-8 + 2.0**-50, rounded=1 + 2.0**-7),
    Rounding(name="just-under-a-tie", value=1 + 3 * 2.0**-8 - 2.0**-50, rounded=1 + 2.0**-7),
    Rounding(name="negative", value=-(1 + 2.0**-8 + 2.0**-50), rounded=-(1 + 2.0**-7)),
    Rounding(name="subnormal", value=2.5 * 2.0**-133 + 2.0**-180, rounded=3 * 2.0**-133),
    Rounding(name="too-small", value=2.0**-134, rounded=0.0),
    Rounding(name="half-the-smallest", value=2.0**-134 + 2.0**-170, rounded=2.0**-133),
    Rounding(name="overflow", value=3.4e38, rounded=float("inf")),
    Rounding(name="far-overflow", value=-1e300, rounded=float("-inf")),
    Rounding(name="largest", value=3.3895e38, rounded=3.3895313892515355e38),
    Rounding(name="infinite", value=float("inf"), rounded=float("inf")),
]


@pytest.mark.parametrize("case", ROUNDINGS, ids=lambda case: case.name)
def test_rounding_to_bf16_is_single(case):
    assert reference.round_to_bf16(torch.tensor([case.value], dtype=torch.float64)).item() == case.rounded


def test_rounding_keeps_nan():
    assert reference.round_to_bf16(torch.tensor([float("nan")], dtype=torch.float64)).isnan().all()


def test_ulp_distance_counts_bf16_steps():
    left = bf16(1.0, 1.0, 0.0, 2.0**-133, -1.0, 3.0)
    right = bf16(1.0, 1.0 + 2.0**-7, -0.0, -(2.0**-133), -1.0 - 2.0**-6, 3.0)
    assert reference.ulp_distance(left, right).tolist() == [0, 1, 0, 2, 2, 0]


def test_interval_is_tight_where_the_result_is_well_conditioned():
    found = reference.consume(parse_variant("nb3-delta"), operands(rows=64), EPS)
    width = reference.ulp_distance(found.low, found.high)
    assert (found.low <= found.out).all()
    assert (found.out <= found.high).all()
    assert (width > 1).float().mean() < 1e-2


def test_interval_widens_where_logits_of_size_1e4_nearly_tie():
    direction = torch.ones(H, dtype=torch.bfloat16)
    other = torch.where(torch.arange(H) % 2 == 0, 1.0078125, 0.9921875).to(torch.bfloat16)
    steep = operands(
        rows=1,
        source=direction[None], blocks=other.expand(1, 3, H), norm=direction, query=(150 * direction).bfloat16(),
    )  # fmt: skip
    found = reference.consume(parse_variant("nb1"), steep, EPS)
    mild = reference.consume(parse_variant("nb1"), Operands(**{**_fields(steep), "query": direction}), EPS)
    assert (found.high.double() - found.low.double()).mean() > (mild.high.double() - mild.low.double()).mean()


def _fields(given: Operands) -> dict:
    return {name: getattr(given, name) for name in Operands.__slots__}
