"""A run: every row in turn, each on disk as soon as it is finished."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexsparse.errors import ConfigError, FlexSparseError
from flexsparse.experiment.config import Experiment
from flexsparse.experiment.environment import environment
from flexsparse.experiment.inputs import QKV, load_inputs
from flexsparse.experiment.report import write_report
from flexsparse.experiment.row import run_row
from flexsparse.experiment.timing import time_dense
from flexsparse.measure.delivery import Dense
from flexsparse.parameters import moved

Told = Callable[[dict[str, Any]], None]


def run(
    experiment: Experiment, out: Path, told: Told = lambda record: None
) -> list[dict[str, Any]]:
    """Runs all rows and leaves config.yaml, environment.json, rows.jsonl and report.html in ``out``.

    What stood there is replaced. ``told`` hears of each row as it is finished.
    """
    config = experiment.config
    qkv = _inputs(experiment)
    device = qkv[0].device
    rule = moved(experiment.baseline, device)
    around = environment(device)
    open_folder(
        out, {"config.yaml": config.as_yaml(), "environment.json": json.dumps(around, indent=2)}
    )
    dense: dict[int | None, Dense] = {}
    records = []
    with (out / "rows.jsonl").open("w", encoding="utf-8") as file:
        for case in experiment.cases:
            offset = case.row.q_offset
            if offset not in dense:
                dense[offset] = time_dense(qkv, rule, offset, config.repeats)
            record = run_row(
                case, qkv, rule, dense[offset],
                checked=config.check, repeats=config.repeats, seed=config.seed,
            )  # fmt: skip
            record = plain(record | {"seed": config.seed, "config": config.sha256})
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            records.append(record)
            told(record)
    write_report(out / "report.html", config.name, records, around, config.as_yaml())
    return records


def _inputs(experiment: Experiment) -> QKV:
    config = experiment.config
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    elif wanted == "cuda" and not torch.cuda.is_available():
        experiment.source.note(("device",), "is cuda, but torch finds no CUDA device here")
    try:
        dtype = getattr(torch, config.dtype)
        found = load_inputs(config.input, dtype, torch.device("cpu"), config.seed)
    except FlexSparseError as error:
        experiment.source.note(("input",), str(error))
    experiment.source.raise_noted()
    q, k, v = (x.to(wanted) for x in found)
    return q, k, v


def open_folder(out: Path, texts: dict[str, str]) -> None:
    """Makes the folder, with what is known before any row."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(f"{text.rstrip()}\n", encoding="utf-8")
        # The report of an earlier run must not stand beside the rows of this one.
        (out / "report.html").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write results to {out}: {error.strerror}") from None


def plain(value: Any) -> Any:
    """The value as JSON has it, which knows no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
