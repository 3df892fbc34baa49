"""A run of a bench: every row in turn, each on disk as soon as it is finished."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flexsparse.ahead import Terms, look_ahead
from flexsparse.bench.config import Bench, Config, Row
from flexsparse.bench.problems import problem
from flexsparse.device import Ceilings, ceilings
from flexsparse.errors import FlexSparseError
from flexsparse.experiment.environment import environment
from flexsparse.experiment.journal import append, plain
from flexsparse.experiment.run import open_folder
from flexsparse.measure.baselines import measured
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.cost import cost, first_line
from flexsparse.measure.delivery import attended
from flexsparse.rules import MaskRule

Told = Callable[[dict[str, Any]], None]


def run(bench: Bench, out: Path, told: Told = lambda record: None) -> list[dict[str, Any]]:
    """Runs all rows and leaves config.yaml, environment.json and rows.jsonl in ``out``.

    What stood there is replaced. ``told`` hears of each row as it is finished.
    """
    config = bench.config
    device = _device(bench)
    limits = ceilings(device, getattr(torch, config.dtype))
    around = environment(device) | {"ceilings": limits._asdict(), "packages": _packages()}
    texts = {"config.yaml": config.as_yaml(), "environment.json": json.dumps(around, indent=2)}
    open_folder(out, texts)
    records = []
    for row, rule in zip(config.rows, bench.rules, strict=True):
        record = plain(run_row(row, rule, config, device, limits))
        append(out / "rows.jsonl", record)
        records.append(record)
        told(record)
    return records


def run_row(
    row: Row, rule: MaskRule | None, config: Config, device: torch.device, limits: Ceilings
) -> dict[str, Any]:
    """What stands in ``rows.jsonl`` for this row; ``status`` is ok, wrong or failed.

    Times are in ms, ``copy_share`` is what moving the fewest bytes would take at the device's copy
    bandwidth over what the conversion took.
    """
    begun = time.perf_counter()
    record: dict[str, Any] = {
        "name": row.name,
        "kind": row.kind,
        "problem": getattr(row, row.kind).model_dump(exclude_none=True),
        "device": str(device),
        "status": "ok",
        "error": None,
        "ours": None,
        "baselines": [],
        "attention": None,
    }
    try:
        made = conversion(
            problem(row, rule, config, device), attention=row.attention, seed=config.seed
        )
        record |= _ours(made, limits)
        for name in config.baselines:
            record["baselines"].append(measured(name, made))
        if row.attention:
            record["attention"] = found = attended(made, config.seed)
            if not found["check"]["ok"]:
                detail = record["attention"]["check"]["detail"]
                record |= {
                    "status": "wrong",
                    "error": f"attention differs from the reference: {detail}",
                }
    except Exception as error:
        said = str(error) if isinstance(error, FlexSparseError) else first_line(error)
        record |= {"status": "failed", "error": said}
        if not isinstance(error, FlexSparseError):
            record["traceback"] = traceback.format_exc()
    if device.type == "cuda":
        # What a row leaves in torch's allocator must not make the next one fail.
        torch.cuda.empty_cache()
    return record | {"seconds": time.perf_counter() - begun}


def _ours(made: Conversion, limits: Ceilings) -> dict[str, Any]:
    given, layout = made.problem, made.layout
    taken = cost(made.call, given.device)
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
        ahead = cost(lambda: look_ahead(terms), given.device)
        found["look_ahead"] = ahead._asdict()
    return found


def _packages() -> dict[str, str | None]:
    """Versions of what a baseline or a clock needs; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ("triton", "attn-gym", "flashinfer-python"):
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
