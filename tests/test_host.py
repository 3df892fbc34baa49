"""What the host takes for a call: against what it is held, and that each call is the one named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexsparse.backends import routes
from flexsparse.masks import Causal, SlidingWindow
from flexsparse.measure import host
from flexsparse.planning import make_plan

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CALLS", 3)


def test_calls_take_turns(few: None) -> None:
    order: list[str] = []
    took = host.host_us([lambda: order.append("a"), lambda: order.append("b")], CPU)
    assert order == ["a", "b"] * 3 and len(took) == 2 and min(took) > 0


def test_where_no_function_is_compiled_nothing_is_taken_off(few: None) -> None:
    rows = host.around(CPU, torch.float32, "tiles")
    assert [row["what"] for row in rows] == [
        f"{call}, {of}"
        for of in ("rule", "rule and selection")
        for call in ("plan.run", "attention")
    ]
    assert all(row["us"] > 0 and row["over"] is None for row in rows)


def test_the_compiled_function_alone_computes_the_same(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "remembers", lambda work: not torch.compiler.is_compiling())
    q, k, v = host.inputs(CPU, torch.float32)
    with torch.no_grad():
        plan = make_plan(q, k, v, rule=Causal() & SlidingWindow(200), backend="flex")
        layout = plan.layout()
        run = plan.run(q, k, v, layout).out
        bare: Any = host._bare(plan, layout, (q, k, v))
        out, lse = bare()
    assert lse is None
    torch.testing.assert_close(plan.address.unpack(out, 1), run)


@pytest.mark.parametrize("kind", ["rule", "decode"])
def test_a_first_call_is_right(kind: str) -> None:
    found = host.first_s(kind, CPU, torch.float32)
    assert found["ok"] and found["s"] > 0 and found["by"] in ("tiles", "decode", "dense")
