"""The quick comparison of metadata: both forms must judge alike."""

from __future__ import annotations

import pytest
import torch

from attnres_aot.runtime.operands import guards

BF16 = torch.bfloat16
MODEL = (torch.zeros(3, 1024, dtype=BF16), torch.zeros(3, 4, 1024, dtype=BF16))
SECOND = {
    "same": (torch.zeros(3, 1024, dtype=BF16), True),
    "rows": (torch.zeros(4, 1024, dtype=BF16), False),
    "hidden": (torch.zeros(3, 512, dtype=BF16), False),
    "dtype": (torch.zeros(3, 1024, dtype=torch.float16), False),
    "rank": (torch.zeros(3, 1, 1024, dtype=BF16), False),
    "row-stride": (torch.zeros(3, 2048, dtype=BF16)[:, :1024], False),
    "last-stride": (torch.zeros(1024, 3, dtype=BF16).t(), False),
    "device": (torch.zeros(3, 1024, dtype=BF16, device="meta"), False),
    "negated": (torch._neg_view(torch.zeros(3, 1024, dtype=BF16)), False),
    "parameter": (torch.nn.Parameter(torch.zeros(3, 1024, dtype=BF16)), False),
    "zero-tensor": (torch._efficientzerotensor((3, 4), dtype=BF16), False),
    "not-a-tensor": (None, False),
}


@pytest.mark.parametrize("make", [guards.native_guard, guards.python_guard])
@pytest.mark.parametrize("name", SECOND)
def test_guard_judges(make, name):
    tensor, accepted = SECOND[name]
    assert make(MODEL)(tensor, MODEL[1]) is accepted


@pytest.mark.parametrize("make", [guards.native_guard, guards.python_guard])
@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_guard_refuses_what_a_transform_shows(make, transform):
    plain = torch.zeros(3, 1024)
    guard, seen = make([plain]), []

    def function(tensor):
        seen.append((tensor.shape, guard(tensor)))
        return tensor.sum()

    transforms = {"vmap": torch.func.vmap, "grad": torch.func.grad, "functionalize": torch.func.functionalize}
    given = torch.zeros(2, 3, 1024) if transform == "vmap" else plain.clone()
    transforms[transform](function)(given)
    assert seen == [(plain.shape, False)]


def test_this_torch_has_working_native_guards():
    guards.native_guards_work.cache_clear()
    assert guards.native_guards_work()


@pytest.mark.parametrize("broken", ["missing", "lenient", "strict"])
def test_guards_that_judge_differently_are_not_used(monkeypatch, broken):
    class Lenient:
        def __init__(self, *_args, **_options):
            self.check = lambda *_: broken == "lenient"

    native = torch._C._dynamo.guards
    if broken == "missing":
        monkeypatch.delattr(native, "TensorGuards")
    else:
        monkeypatch.setattr(native, "TensorGuards", Lenient)
    guards.native_guards_work.cache_clear()
    assert not guards.native_guards_work()
    assert guards.make_guard(MODEL)(*MODEL)
    monkeypatch.undo()
    guards.native_guards_work.cache_clear()


def test_guard_keeps_no_reference():
    import weakref

    tensor = torch.zeros(3, 1024, dtype=BF16)
    alive = weakref.ref(tensor)
    guard = guards.make_guard([tensor])
    del tensor
    assert alive() is None
    assert guard(torch.zeros(3, 1024, dtype=BF16))
