"""What is checked once, when it is bound: weights, epsilons, mailboxes, statistics, and layers read for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attnres_aot
from attnres_aot.errors import OperandError, UsageError
from attnres_aot.spec.variants import ConsumerKey

HIDDEN = 1024
BF16 = torch.bfloat16


def vector(elements: int = HIDDEN, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(elements, dtype=dtype)


BAD_WEIGHTS = {
    "dtype": ((vector(), vector(dtype=torch.float32), vector()), "weights.query is torch.float32; torch.bfloat16"),
    "length": ((vector(8), vector(), vector()), r"weights.norm is \[8\]; \[1024\] is wanted"),
    "strided": ((vector(), vector(), vector(2 * HIDDEN)[::2]), "weights.out_norm has strides .*must be contiguous"),
    "unaligned": ((vector(HIDDEN + 1)[1:], vector(), vector()), "weights.norm starts at .*aligned to 16 bytes"),
    "not-a-tensor": ((vector(), None, vector()), "weights.query is NoneType"),
    "count": ((vector(), vector()), "weights hold 2 tensors"),
    "device": ((vector(), vector().to("meta"), vector()), "weights are on cpu, meta, cpu; one device is wanted"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights_are_named(bundle, key, name):
    weights, text = BAD_WEIGHTS[name]
    with pytest.raises(OperandError, match=text):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)


def test_all_bad_weights_are_reported_together(bundle, key):
    with pytest.raises(OperandError) as caught:
        attnres_aot.PreparedAttnRes((vector(1), vector(2), vector(3)), key, 1e-5, bundle)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "eps", [-1e-5, 0, 1e-31, (1e-5, 0.0), float("nan"), float("inf"), (1e-5,), (1e-5, 1e-5, 1e-5), "1e-5", True, None]
)
def test_bad_eps_is_refused(bundle, weights, key, eps):
    with pytest.raises(OperandError, match=r"eps is .*a finite number of at least 1e-30"):
        attnres_aot.PreparedAttnRes(weights, key, eps, bundle)


def test_memory_of_weights_outlives_the_caller(stub, bundle, key, operands):
    norm = torch.nn.Parameter(vector(), requires_grad=False)
    prepared = attnres_aot.PreparedAttnRes((norm, vector(), vector()), key, 1e-5, bundle)
    address = norm.data_ptr()
    norm.data = vector()
    others = [vector() for _ in range(64)]  # would be given the memory if it were free
    prepared.run(*operands().ordinary)
    assert stub.launch().arguments()["norm"] == address
    assert address not in [tensor.data_ptr() for tensor in (norm, *others)]


BAD_MAILBOXES = {
    "dtype": (torch.zeros(8, 64, HIDDEN), "mailbox is torch.float32"),
    "rank": (torch.zeros(64, HIDDEN, dtype=BF16), r"mailbox is \[64, 1024\]; \[any, any, 1024\] is wanted"),
    "hidden": (torch.zeros(8, 64, 512, dtype=BF16), r"\[any, any, 1024\] is wanted"),
    "strided": (torch.zeros(8, 128, HIDDEN, dtype=BF16)[:, ::2], "must be contiguous"),
    "empty": (torch.zeros(8, 0, HIDDEN, dtype=BF16), "at least one slot and row"),
    "device": (
        torch.zeros(8, 64, HIDDEN, dtype=BF16, device="meta"),
        "mailbox: on meta, but the bundle was loaded for",
    ),
}


@pytest.mark.parametrize("name", BAD_MAILBOXES)
def test_bad_mailbox_is_named(bundle, weights, key, name):
    mailbox, text = BAD_MAILBOXES[name]
    with pytest.raises(OperandError, match=text):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox)


@pytest.mark.parametrize("budget", [-1, 2**31])
def test_bad_spin_budget_is_refused(bundle, weights, key, budget):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
    with pytest.raises(OperandError, match=r"spin_budget is"):
        prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu"), spin_budget=budget)


def test_new_mailbox_is_armed_in_every_word():
    mailbox = attnres_aot.new_mailbox(2, 3, HIDDEN, "cpu")
    assert (mailbox.shape, mailbox.dtype) == ((2, 3, HIDDEN), BF16)
    assert {word & 0xFFFFFFFF for word in mailbox.view(torch.int32).unique().tolist()} == {0x80000000}
    mailbox.zero_()
    attnres_aot.arm(mailbox)
    low, high = mailbox.view(torch.int16).view(-1, 2).unique(dim=0)[0].tolist()
    assert (low, high) == (0, -0x8000)


BAD_STATISTICS = {
    "mixture-dtype": (torch.zeros(4, HIDDEN, dtype=BF16), torch.zeros(4, 2), [1], "mixture is torch.bfloat16"),
    "scal-shape": (torch.zeros(4, HIDDEN), torch.zeros(4, 3), [1], r"scal is \[4, 3\]; \[any, 2\] is wanted"),
    "caps": (torch.zeros(4, HIDDEN), torch.zeros(5, 2), [1], "mixture holds 4 rows, but scal 5"),
    "beyond": (torch.zeros(4, HIDDEN), torch.zeros(4, 2), [5, 0, 4], r"rows hold \[0, 5\]; 1 to 4"),
    "strided": (torch.zeros(4, 2 * HIDDEN)[:, :HIDDEN], torch.zeros(4, 2), [1], "mixture has strides"),
}


@pytest.mark.parametrize("name", BAD_STATISTICS)
def test_bad_statistics_are_named(bundle, weights, key, name):
    mixture, scal, rows, text = BAD_STATISTICS[name]
    with pytest.raises(OperandError, match=text):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_statistics(mixture, scal, rows)


def test_a_refused_binding_leaves_the_old_one(stub, bundle, weights, key, operands):
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).bind_ring(mailbox)
    with pytest.raises(OperandError):
        prepared.bind_ring(torch.zeros(8, 64, HIDDEN))
    prepared.run_ring(*operands().ring)
    assert stub.launch().arguments()["source"] == mailbox.data_ptr()


def norm(eps: float) -> SimpleNamespace:
    return SimpleNamespace(weight=vector(), variance_epsilon=eps)


def layer(**changes: object) -> SimpleNamespace:
    facts = {
        "self_attention_res_norm": norm(1e-5),
        "self_attention_res_proj": SimpleNamespace(weight=torch.ones(1, HIDDEN, dtype=BF16)),
        "input_layernorm": norm(1e-6),
        "prev_valid_blocks": 2,
        "block_write_idx": 2,
        "is_block_write_layer": True,
    }
    return SimpleNamespace(**{**facts, **changes})


class TestForTarget:
    def test_layer_gives_key_weights_and_both_epsilons(self, stub, bundle, operands):
        target = layer()
        prepared = attnres_aot.PreparedAttnRes.for_target(target, bundle=bundle)
        assert prepared.key == ConsumerKey(nb=2, has_delta=True, write=2)
        prepared.run(*operands().ordinary)
        arguments = stub.launch().arguments()
        assert arguments["norm"] == target.self_attention_res_norm.weight.data_ptr()
        assert arguments["query"] == target.self_attention_res_proj.weight.data_ptr()
        assert arguments["out_norm"] == target.input_layernorm.weight.data_ptr()
        assert (arguments["eps"], arguments["out_eps"]) == (pytest.approx(1e-5), pytest.approx(1e-6))

    def test_index_counts_only_in_a_layer_that_writes(self, bundle):
        prepared = attnres_aot.PreparedAttnRes.for_target(layer(is_block_write_layer=False), bundle=bundle)
        assert prepared.key == ConsumerKey(nb=2, has_delta=True)

    def test_first_layer_has_no_delta_unless_told(self, bundle):
        first = layer(prev_valid_blocks=0, block_write_idx=0)
        assert not attnres_aot.PreparedAttnRes.for_target(first, bundle=bundle).key.has_delta
        plain = layer(is_block_write_layer=False)
        assert not attnres_aot.PreparedAttnRes.for_target(plain, has_delta=False, bundle=bundle).key.has_delta

    def test_backbone_gives_the_final_consumer(self, bundle):
        backbone = SimpleNamespace(
            output_attn_res_norm=norm(1e-5),
            output_attn_res_proj=SimpleNamespace(weight=vector()),
            norm=norm(1e-5),
            num_attn_res_blocks=2,
        )
        prepared = attnres_aot.PreparedAttnRes.for_target(backbone, final=True, bundle=bundle)
        assert prepared.key == ConsumerKey(nb=2, has_delta=True, final=True)

    def test_everything_missing_is_named(self, bundle):
        target = layer(input_layernorm=SimpleNamespace(weight=vector()))
        del target.block_write_idx
        with pytest.raises(
            UsageError, match=r"has no input_layernorm.variance_epsilon, block_write_idx; give a decoder"
        ):
            attnres_aot.PreparedAttnRes.for_target(target, bundle=bundle)
        with pytest.raises(UsageError, match=r"as a backbone: it has no output_attn_res_norm.weight"):
            attnres_aot.PreparedAttnRes.for_target(target, final=True, bundle=bundle)


def test_repr_says_what_is_bound(bundle, weights, key):
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
    assert repr(prepared) == "<PreparedAttnRes nb2-delta, bound: nothing>"
    prepared.bind_ring(attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")).bind_aux()
    prepared.bind_statistics(torch.zeros(4, HIDDEN), torch.zeros(4, 2), [1, 2])
    assert repr(prepared) == "<PreparedAttnRes nb2-delta, bound: ring 8x64, aux, statistics for 2 row counts>"
    assert repr(bundle) == f"<bundle tiny for sm_90 at {bundle.bundle.path}, 66 variants, on cpu>"
