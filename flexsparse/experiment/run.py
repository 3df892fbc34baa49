"""A run: every row in turn, each on disk as soon as it is finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexsparse.errors import ConfigError, FlexSparseError
from flexsparse.experiment.environment import environment
from flexsparse.experiment.inputs import load_inputs
from flexsparse.experiment.journal import append, finished, plain, write_whole
from flexsparse.experiment.load import Experiment
from flexsparse.experiment.model import QKV, Read, read
from flexsparse.experiment.replaced import Replaced
from flexsparse.experiment.report import write_report
from flexsparse.experiment.resume import refuse_changes
from flexsparse.experiment.row import run_row
from flexsparse.experiment.timing import time_dense
from flexsparse.measure.delivery import Dense
from flexsparse.parameters import moved
from flexsparse.rules import MaskRule


class Progress(NamedTuple):
    """Rows done of all, and the seconds that the rest will take if they are like these."""

    done: int
    of: int
    left: float


Told = Callable[[dict[str, Any], Progress], None]


def run(
    experiment: Experiment,
    out: Path,
    told: Told = lambda record, progress: None,
    *,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """Runs all rows and leaves config.yaml, environment.json, rows.jsonl and report.html in ``out``.

    With ``resume``, rows that stand there are kept, failed ones too, if configuration, files and
    environment are still the same; else the rows that stood there are put aside. ``told`` hears of each row as
    it is finished.
    """
    config, text = experiment.config, experiment.as_yaml(out)
    qkv, model = _inputs(experiment)
    around = environment(qkv[0].device) | {"files": experiment.files}
    journal = out / "rows.jsonl"
    records: list[dict[str, Any]] = []
    if resume and journal.is_file() and journal.stat().st_size:
        refuse_changes(out, text, around)
        names = [case.row.name for case in experiment.cases]
        records = finished(journal, names, experiment.sha256)
    if not records:
        open_folder(out, {"config.yaml": text, "environment.json": json.dumps(around, indent=2)})
    common = {"seed": config.seed, "config": experiment.sha256, "environment": around}
    rule = moved(experiment.baseline, qkv[0].device)
    # Rows of one offset are held against one measurement, also if another run has made it.
    dense: dict[int | None, Dense | Exception] = {
        case.row.q_offset: Dense(**{f.name: record["dense"][f.name] for f in fields(Dense)})
        for case, record in zip(experiment.cases, records, strict=False)
        if "dense" in record
    }
    replaced = None if model is None else Replaced(model)
    started, before = time.monotonic(), len(records)
    for case in experiment.cases[before:]:
        begun, offset = time.monotonic(), case.row.q_offset
        if offset not in dense:
            dense[offset] = _timed(qkv, rule, offset, config.repeats)
        record = run_row(case, qkv, rule, dense[offset], config, replaced)
        record = plain(record | {"seconds": time.monotonic() - begun} | common)
        append(journal, record)
        records.append(record)
        new, of = len(records) - before, len(experiment.cases)
        left = (time.monotonic() - started) / new * (of - len(records))
        told(record, Progress(len(records), of, left))
    write_report(out / "report.html", config.name, records, around, text)
    return records


def _timed(
    qkv: QKV, baseline: MaskRule | None, q_offset: int | None, repeats: int
) -> Dense | Exception:
    """What went wrong is told by each row that would be held against it."""
    try:
        return time_dense(qkv, baseline, q_offset, repeats)
    except Exception as error:
        return error


def _inputs(experiment: Experiment) -> tuple[QKV, Read | None]:
    """q, k and v, and the model where its perplexity is asked for."""
    config, source = experiment.config, experiment.source
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    elif wanted == "cuda" and not torch.cuda.is_available():
        source.note(("device",), "is cuda, but torch finds no CUDA device here")
        wanted = "cpu"
    dtype, device = getattr(torch, config.dtype), torch.device(wanted)
    model = None
    try:
        if config.perplexity and config.input.model is not None:
            model = read(config.input.model, dtype, device, source.folder, head=True)
        found = load_inputs(config.input, dtype, device, config.seed, source.folder, model)
    except FlexSparseError as error:
        source.note(("input",), str(error))
    except (RuntimeError, MemoryError) as error:
        source.note(("input",), f"cannot be made: {error}")
    source.raise_noted()
    return found, model


def open_folder(out: Path, texts: dict[str, str]) -> None:
    """Makes the folder, with what is known before any row.

    Rows of an earlier run, which belong to another configuration, are kept as ``rows-DATE-TIME.jsonl``.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        rows = out / "rows.jsonl"
        if rows.is_file() and rows.stat().st_size:
            written = time.localtime(rows.stat().st_mtime)
            rows.replace(out / time.strftime("rows-%Y%m%d-%H%M%S.jsonl", written))
        (out / "report.html").unlink(missing_ok=True)
        for name, text in texts.items():
            write_whole(out / name, text)
        (out / "rows.jsonl").touch()
    except OSError as error:
        raise ConfigError(f"cannot write results to {out}: {error.strerror}") from None
