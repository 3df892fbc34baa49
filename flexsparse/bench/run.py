"""A run of a bench: every row in turn, each on disk as soon as it is finished."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flexsparse.ahead import Terms, look_ahead
from flexsparse.bench.config import Bench, Config, Row
from flexsparse.bench.problems import budgets, problem
from flexsparse.choice import BackendName
from flexsparse.device import Ceilings, ceilings
from flexsparse.errors import BackendError, FlexSparseError
from flexsparse.experiment.environment import environment
from flexsparse.experiment.journal import append, plain
from flexsparse.experiment.picked import named_with_changes
from flexsparse.experiment.run import open_folder
from flexsparse.measure.attention_peers import peer
from flexsparse.measure.baselines import measured
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.cost import cost, first_line
from flexsparse.measure.decoding import steps
from flexsparse.measure.delivery import attended, dense_ms
from flexsparse.measure.judged import judged
from flexsparse.measure.linear import fitted
from flexsparse.measure.membership import membership
from flexsparse.measure.problem import Problem
from flexsparse.measure.timed import kernel_ms
from flexsparse.measure.tried import tried
from flexsparse.measure.uneven import uneven
from flexsparse.rules import MaskRule
from flexsparse.selectors.base import Selector

Record = dict[str, Any]
Told = Callable[[Record], None]

PAIR_BY_PAIR = "captured, a rule is evaluated pair by pair, as the host must not look"


def run(
    bench: Bench, out: Path, told: Told = lambda record: None, workers: int = 0
) -> list[Record]:
    """Runs all rows and leaves config.yaml, environment.json and rows.jsonl in ``out``.

    What stood there is replaced. ``told`` hears of each row as it is finished. ``workers`` processes
    share the rows, where there are any: they compile at once, and then take turns on the device.
    """
    config = bench.config
    device = _device(bench)
    limits = ceilings(device, getattr(torch, config.dtype))
    around = environment(device) | {"ceilings": limits._asdict(), "packages": _packages()}
    texts = {"config.yaml": config.as_yaml(), "environment.json": json.dumps(around, indent=2)}
    open_folder(out, texts)
    from flexsparse.bench.workers import shared

    records = []
    for record in (
        shared(bench, device, limits, workers) if workers else every(bench, device, limits)
    ):
        append(out / "rows.jsonl", record)
        records.append(record)
        told(record)
    return records


def every(bench: Bench, device: torch.device, limits: Ceilings) -> Iterator[Record]:
    """The records of all rows, one after the other."""
    for i in range(len(bench.config.rows)):
        yield from one(bench, i, device, limits)


def one(bench: Bench, i: int, device: torch.device, limits: Ceilings) -> Iterator[Record]:
    """The records of row ``i``, as JSON has them."""
    row, given = bench.config.rows[i], (bench.rules[i], bench.selectors[i])
    said = named_with_changes(row.name, bench.source, i)
    for found in run_row(row, given[0], bench.config, device, limits, given[1]):
        yield plain(found | {"name": said})


def run_row(
    row: Row,
    rule: MaskRule | None,
    config: Config,
    device: torch.device,
    limits: Ceilings,
    selector: Selector | None = None,
) -> Iterator[Record]:
    """What stands in ``rows.jsonl`` for this row, a record for each of its backends; ``status`` is ok,
    refused (by a backend that was asked for by name), wrong or failed.

    Times are in ms, ``copy_share`` is what moving the fewest bytes would take at the device's copy
    bandwidth over what the conversion took. What others do is timed once, beside the first backend
    that runs; ``dense_ms`` and ``peers`` are repeated in the records of the rest.
    """
    beside: Record = {}
    for backend in row.backends(config.backend):
        begun = time.perf_counter()
        record: Record = {
            "name": row.name,
            "note": row.note,
            "kind": row.kind,
            "asked": backend,
            "pack": row.pack,
            "problem": row.of.model_dump(exclude_none=True),
            "device": str(device),
            "status": "ok",
            "error": None,
            "ours": None,
            "baselines": [],
            "attention": None,
            "peers": [],
            "uneven": None,
            "membership": None,
            "linear": None,
            "ways": None,
        }
        try:
            if row.kind == "linear":
                _line(record, row, rule, config, device, backend)
            elif row.ways is not None:
                given = problem(row, rule, config, device, selector)
                _ways(record, given, row.ways == "all", config)
            else:
                given = problem(row, rule, config, device, selector)
                _fill(record, beside, row, given, config, limits, backend)
        except BackendError as why:
            record |= {"status": "failed" if backend == "auto" else "refused", "error": str(why)}
        except Exception as error:
            said = str(error) if isinstance(error, FlexSparseError) else first_line(error)
            record |= {"status": "failed", "error": said}
            if not isinstance(error, FlexSparseError):
                record["traceback"] = traceback.format_exc()
        if device.type == "cuda":
            # What a row leaves in torch's allocator must not make the next one fail.
            torch.cuda.empty_cache()
        yield record | {"seconds": time.perf_counter() - begun}


def _fill(
    record: Record,
    beside: Record,
    row: Row,
    given: Problem,
    config: Config,
    limits: Ceilings,
    backend: BackendName,
) -> None:
    """The record of one backend, filled as far as it gets."""
    made = conversion(
        given, attention=row.attention, seed=config.seed, backend=backend, pack=row.pack
    )
    record |= _ours(made, limits)
    if not beside:
        record["baselines"] = [measured(name, made) for name in config.baselines]
    if not row.attention:
        beside["baselines"] = True
        return
    found, wrong = judged(made, config.checked, config.seed, backend, row.pack)
    record["attention"] = found
    if wrong is not None:
        record |= {"status": "wrong", "error": wrong}
    if not beside:
        beside["dense"] = dense_ms(made)
        wanted = config.peers if row.peers is None else row.peers
        beside["peers"] = [peer(name, made, config.patience) for name in wanted]
    record["peers"] = beside["peers"]
    found |= attended(made, beside["dense"])
    if given.scores is not None:
        found["steps"] = steps(made)
    if given.even is not None:
        record["uneven"] = uneven(made, found, config.seed, backend, row.pack)
    if given.whole is not None:
        record["membership"] = membership(made, found, config.seed, backend, row.pack)


def _ways(record: Record, given: Problem, every: bool, config: Config) -> None:
    """The choice, or every way, beside what was predicted."""
    found = tried(given, config.seed, config.checked, every=every)
    record["ways"] = found
    if found["wrong"] is not None:
        record |= {"status": "wrong", "error": found["wrong"]}


def _line(
    record: Record,
    row: Row,
    rule: MaskRule | None,
    config: Config,
    device: torch.device,
    backend: BackendName,
) -> None:
    """Kernel time at one budget after the other."""
    points = []
    for given in budgets(row, rule, config, device):
        made = conversion(given, attention=True, seed=config.seed, backend=backend, pack=row.pack)
        found, wrong = judged(made, config.checked, config.seed, backend, row.pack)
        if wrong is not None:
            record |= {"status": "wrong", "error": wrong}
        assert made.qkv is not None
        points.append({
            "tiles": made.layout_of_plan.budget().physical_tiles,
            "kernel_ms": kernel_ms(made.attend, made.qkv, device),
            **found,
        })  # fmt: skip
    record["linear"] = fitted(points)


def _ours(made: Conversion, limits: Ceilings) -> Record:
    given, layout = made.problem, made.layout
    no_graph = PAIR_BY_PAIR if given.indices is None else None
    taken = cost(made.call, given.device, no_graph)
    found = {
        "ours": taken._asdict(),
        "tile": list(layout.block_size),
        "kept_bytes": made.kept_bytes,
        "fewest_bytes": made.fewest_bytes,
        "copy_share": 1e3 * made.fewest_bytes / limits.copy_bytes_per_s / taken.best_ms,
        "look_ahead": None,
    }
    if given.indices is None:
        terms = Terms(layout.program, given.grid, layout.block_size, given.device)
        ahead = cost(lambda: look_ahead(terms), given.device, no_graph)
        found["look_ahead"] = ahead._asdict()
    return found


def _packages() -> dict[str, str | None]:
    """Versions of what a baseline or a clock needs; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in (
        "triton",
        "flash-attn-4",
        "fla-core",
        "attn-gym",
        "flashinfer-python",
        "nvidia-cudnn-cu13",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _device(bench: Bench) -> torch.device:
    wanted = bench.config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    elif wanted == "cuda" and not torch.cuda.is_available():
        bench.source.note(("device",), "is cuda, but torch finds no CUDA device here")
    bench.source.raise_noted()
    return torch.device(wanted)
