"""The box: clocks, ceilings and stages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from flexsparse.device import Ceilings, Raised, Stages, ceiling, ceilings, clock, heard

CPU = torch.device("cpu")


def test_ceilings_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling._copy.cache_clear()
    ceiling._matmul.cache_clear()
    timed = []

    def ms(call: clock.Call, device: torch.device) -> float:
        call()
        timed.append(device)
        return 2.0

    monkeypatch.setattr(ceiling, "device_ms", ms)
    monkeypatch.setattr(ceiling, "_SIDE", {"cpu": 64})
    found = ceilings("cpu", torch.float32)
    assert found == Ceilings(2 * 64 * 2**20 / 2e-3, 2 * 64**3 / 2e-3)
    assert ceilings(CPU, torch.float32) == found and len(timed) == 2
    # Another precision multiplies at another rate, but copies no faster.
    ceilings(CPU, torch.float64)
    assert len(timed) == 3
    ceiling._copy.cache_clear()
    ceiling._matmul.cache_clear()


def test_a_median_is_of_the_call_and_of_all_of_it() -> None:
    calls = []

    def call() -> None:
        calls.append(time.sleep(0.02))

    for of in (clock.device_ms, clock.wall_ms):
        calls.clear()
        assert of(call, CPU) >= 20 and len(calls) > 3
    assert clock.peak_bytes(call, CPU) is None


def test_a_long_call_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_LONG_MS", 1.0)
    calls = []
    assert clock.device_ms(lambda: calls.append(time.sleep(0.002)), CPU) >= 2
    assert len(calls) == 2


def test_threads_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    seen = set()
    clock.device_ms(lambda: seen.add(torch.get_num_threads()), CPU)
    assert seen == {before} and torch.get_num_threads() == before


def test_stages_sum_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    stages = Stages(CPU)
    with stages.stage("index"):
        pass
    with stages.stage("kernel"):
        pass
    with pytest.raises(ZeroDivisionError), stages.stage("kernel"):
        _ = 1 / 0
    assert stages.seconds == {"index": 1.0, "kernel": 6.0}
    stages.seconds["index"] = 5.0
    assert stages.seconds["index"] == 1.0


def test_stages_of_a_device_wait_once_and_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            assert waits
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    stages = Stages(torch.device("cuda"))
    for name, seconds in (("index", 1.0), ("kernel", 2.0), ("index", 4.0)):
        with stages.stage(name):
            now[0] += seconds
    assert not waits
    assert stages.seconds == {"index": 5.0, "kernel": 2.0} == stages.seconds
    assert waits == [torch.device("cuda")]


def test_a_flag_is_read_once_the_stream_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of its device; a flag that was raised is not used again, one that was not is."""
    did: list[str] = []
    pinned = torch.zeros

    class Stream:
        def synchronize(self) -> None:
            did.append("wait")
            if raises:
                flag.flag.fill_(1)

    def stream(device: torch.device) -> Stream:
        did.append(f"the stream of {device}")
        return Stream()

    def zeros(*shape: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        did.append("pinned" if pin_memory else "plain")
        return pinned(*shape, **options)

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(heard, "_kept", heard._Kept())
    waits = ["the stream of cuda:1", "wait"]
    for raises, allocated in ((False, True), (True, False), (False, True), (False, False)):
        did.clear()
        flag = Raised(torch.device("cuda:1"))
        assert not flag.flag.item()
        assert flag.heard() is raises
        assert did == ["pinned"] * allocated + waits
    # One that another still waits for is its own.
    first, second = (Raised(torch.device("cuda:1")) for _ in range(2))
    assert first.flag.data_ptr() != second.flag.data_ptr()


def test_a_flag_of_the_host_is_heard_at_once() -> None:
    flag = Raised(torch.device("cpu"))
    assert not flag.heard()
    flag.flag.fill_(1)
    assert flag.heard() and not Raised(torch.device("cpu")).heard()


def test_a_call_that_no_graph_holds_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsparse.measure import cost as module

    eager, tried = [1.0], []

    def graph(call: clock.Call) -> float:
        tried.append(call)
        raise RuntimeError("Cannot copy\nand more")

    for name, value in (("device_ms", eager), ("wall_ms", [2.0]), ("peak_bytes", [64])):
        monkeypatch.setattr(module, name, lambda call, device, value=value: value[0])
    monkeypatch.setattr(module, "graph_ms", graph)
    device = torch.device("cuda")
    found = module.cost(lambda: None, device)
    assert found == module.Cost(1.0, 2.0, None, "RuntimeError: Cannot copy", 64)
    assert found.best_ms == 1.0 and len(tried) == 1
    assert module.cost(lambda: None, device, "it looks").no_graph == "it looks"
    eager[0] = 1000.0
    assert module.cost(lambda: None, device).no_graph == "longer than 100 ms" and len(tried) == 1
    eager[0] = 1.0
    monkeypatch.setattr(module, "graph_ms", lambda call: 0.25)
    assert module.cost(lambda: None, device).best_ms == 0.25


@pytest.mark.gpu
def test_stages_on_a_device_wait_only_when_read(device: torch.device) -> None:
    stages = Stages(device)
    a = torch.randn(4096, 4096, device=device)
    a @ a
    torch.cuda.synchronize()
    with stages.stage("much"):
        for _ in range(20):
            a @ a
    with stages.stage("little"):
        a + a
    with stages.stage("little"):
        a + a
    assert not torch.cuda.current_stream(device).query()
    found = stages.seconds
    assert set(found) == {"much", "little"} and 0 < found["little"] < found["much"]
    assert stages.seconds == found


@pytest.mark.gpu
def test_the_ceilings_of_a_device(device: torch.device) -> None:
    found = ceilings(device)
    assert found.copy_bytes_per_s > 1e11 and found.matmul_flops_per_s > 1e12
    assert ceilings(torch.device("cuda", torch.cuda.current_device())) == found


@pytest.mark.gpu
def test_a_graph_is_timed_or_says_why_not(device: torch.device) -> None:
    from flexsparse.measure.cost import cost

    a = torch.randn(1024, 1024, device=device)
    found = cost(lambda: a + a, device)
    assert found.graph_ms is not None and found.graph_ms > 0 and found.no_graph is None
    assert found.peak_bytes == a.numel() * 4
    looked = cost(lambda: float(a.sum()), device)
    assert looked.graph_ms is None and looked.no_graph
    # What failed leaves nothing behind.
    torch.randn(2, device=device)
    assert cost(lambda: a + a, device).graph_ms is not None
