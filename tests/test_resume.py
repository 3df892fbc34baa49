"""What a run leaves when it is killed, and how it goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import EVERY_NTH, SMALL, lines, written

from flexsparse.errors import ConfigError
from flexsparse.experiment.journal import finished
from flexsparse.experiment.load import Experiment
from flexsparse.experiment.run import run

# What one clock reading says and the next does not.
TIMED = {
    "time_ms", "first_ms", "seconds", "dense", "promised", "got", "delivered", "factors",
}  # fmt: skip
MANY = SMALL + "".join(
    f"  - {{name: w{n}, rule: {{sliding_window: {{size: {n}}}}}}}\n" for n in range(2, 11)
)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return written(tmp_path_factory.mktemp("many"), MANY)


@pytest.fixture(scope="module")
def whole(many: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(many, out)
    return out


def interrupted(whole: Path, tmp_path: Path, rows: bytes) -> Path:
    """The folder as a run would leave it that ended in the middle of ``rows``."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.yaml", "environment.json"):
        (out / name).write_bytes((whole / name).read_bytes())
    (out / "rows.jsonl").write_bytes(rows)
    return out


def test_every_row_says_how_it_came_about(whole: Path, many: Experiment) -> None:
    around = json.loads((whole / "environment.json").read_text())
    for row in lines(whole):
        assert row["config"] == many.sha256 and row["seed"] == 0 and row["environment"] == around
        for found in row["check"]["quantities"].values():
            assert {"error", "plain_error", "budget"} <= set(found)
        assert row["check"]["rows"] == row["queries"] == 80 and row["seconds"] > 0


@pytest.mark.parametrize("cut", [0, 1, 700, -2, -1])
def test_a_torn_line_is_done_again(whole: Path, many: Experiment, tmp_path: Path, cut: int) -> None:
    kept = whole.joinpath("rows.jsonl").read_bytes().splitlines(keepends=True)
    # The last four lines are gone, and of the one before a part is there.
    left = b"".join(kept[:-5])
    out = interrupted(whole, tmp_path, left + kept[-5][:cut])
    told = []
    rows = run(many, out, lambda row, progress: told.append((row["name"], progress)), resume=True)
    assert [name for name, _ in told] == ["w6", "w7", "w8", "w9", "w10"]
    assert [(p.done, p.of) for _, p in told] == [(n, 12) for n in range(8, 13)]
    assert told[-1][1].left == 0 and told[0][1].left > 0
    assert untimed(rows) == untimed(lines(whole)) and lines(out) == rows
    assert out.joinpath("rows.jsonl").read_bytes().startswith(left)
    # What is done anew is held against the same measurement of dense attention.
    assert len({json.dumps(row["dense"]) for row in rows}) == 1
    assert (out / "report.html").is_file()


def test_nothing_is_left_to_do(whole: Path, many: Experiment) -> None:
    before = (whole / "rows.jsonl").read_bytes()
    told: list[Any] = []
    assert run(many, whole, lambda *heard: told.append(heard), resume=True) == lines(whole)
    assert told == [] and (whole / "rows.jsonl").read_bytes() == before


def test_nothing_to_resume_is_a_new_run(many: Experiment, tmp_path: Path) -> None:
    small = written(tmp_path, SMALL, "check=4")
    assert len(run(small, tmp_path / "out", resume=True)) == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("repeats=2", "repeats was 1, is 2"),
        ("rows.window.rule.sliding_window.size=9", "rows.1.rule.sliding_window.size was 8, is 9"),
        ("rows.w10.name=other", "rows.11.name was 'w10', is 'other'"),
        ("seed=1", "seed was 0, is 1"),
    ],
)
def test_another_configuration_is_refused_by_what_changed(
    whole: Path, tmp_path: Path, override: str, words: str
) -> None:
    before = (whole / "rows.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="cannot be resumed") as caught:
        run(written(tmp_path, MANY, override), whole, resume=True)
    assert words in str(caught.value) and (whole / "rows.jsonl").read_bytes() == before


def test_another_rule_file_or_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERY_NTH)
    text = (
        SMALL.split("  - {name: window")[0] + '  - {name: a, rule: {"mine.py:EveryNth": {n: 2}}}\n'
    )
    out = tmp_path / "out"
    run(written(tmp_path, text, "check=4"), out)
    (tmp_path / "mine.py").write_text(EVERY_NTH + "\n# changed")
    with pytest.raises(ConfigError, match=r"environment.files.mine.py was '\w{16}', is '\w{16}'"):
        run(written(tmp_path, text, "check=4"), out, resume=True)
    (tmp_path / "mine.py").write_text(EVERY_NTH)
    around = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps(around | {"torch": "1.0"}))
    with pytest.raises(ConfigError, match=r"environment.torch was '1.0', is "):
        run(written(tmp_path, text, "check=4"), out, resume=True)


@pytest.mark.parametrize(
    ("lines_", "words"),
    [
        (['{"name": "a", "config": "x"}', "{broken", '{"name": "b", "config": "x"}'], ":2: is not"),
        (['{"name": "b", "config": "x"}'], ":1: is not the row 'a'"),
        (['{"name": "a", "config": "y"}'], ":1: the row 'a' belongs to the configuration y"),
        ([json.dumps({"name": n, "config": "x"}) for n in "abc"], ":3: is not the row"),
    ],
)
def test_rows_that_are_not_of_this_run_are_refused(
    tmp_path: Path, lines_: list[str], words: str
) -> None:
    journal = tmp_path / "rows.jsonl"
    journal.write_text("\n".join(lines_) + "\n")
    with pytest.raises(ConfigError) as caught:
        finished(journal, ["a", "b"], "x")
    assert words in str(caught.value)
    assert journal.read_text() == "\n".join(lines_) + "\n"


def test_a_disk_that_takes_no_more_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = written(tmp_path, SMALL, "check=false")

    def told(row: dict[str, Any], progress: object) -> None:
        (out / "rows.jsonl").unlink()
        (out / "rows.jsonl").mkdir()

    with pytest.raises(ConfigError, match="the rows before 'window' are there"):
        run(made, out, told)


Killed = Callable[[Path, random.Random], bool]


def kill_and_resume(kill: Killed, kills: int, tmp_path: Path, wanted: list[dict[str, Any]]) -> Path:
    """Kills runs of the same folder so many times; where one ended first, begins another folder."""
    draw, done, runs = random.Random(0), 0, 0
    while done < kills:
        out = tmp_path / f"out{runs}"
        if kill(out, draw):
            done += 1
        else:
            assert untimed(lines(out)) == wanted
            runs += 1
    return out


def test_killed_twenty_times_at_random(whole: Path, many: Experiment, tmp_path: Path) -> None:
    wanted = untimed(lines(whole))
    row_s = sum(row["seconds"] for row in lines(whole)) / len(wanted)

    def forked(out: Path, draw: random.Random) -> bool:
        """A copy of this process, which has torch at hand."""
        child = os.fork()
        if child == 0:
            try:
                run(many, out, resume=True)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0, 4) * row_s)
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    out = kill_and_resume(forked, 20, tmp_path, wanted)
    assert untimed(run(many, out, resume=True)) == untimed(lines(out)) == wanted


@pytest.mark.slow
def test_the_command_killed_twenty_times_at_random(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MANY)
    wanted = untimed(lines(whole))
    # With threads as the other run had them, or the environments differ.
    main = f"import torch; torch.set_num_threads({torch.get_num_threads()}); from flexsparse.cli import main; main()"

    def started(out: Path) -> subprocess.Popen[bytes]:
        arguments = ["run", str(tmp_path / "c.yaml"), "--resume", "--out", str(out)]
        null = subprocess.DEVNULL
        return subprocess.Popen([sys.executable, "-c", main, *arguments], stdout=null, stderr=null)

    shortest = 600.0

    def ran(out: Path, within: float) -> bool:
        """Whether it ended by itself within so many seconds; kills it where it did not."""
        nonlocal shortest
        begun, process = time.monotonic(), started(out)
        try:
            assert process.wait(within) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            # It may have ended between the two.
            if process.wait() != 0:
                assert process.returncode == -signal.SIGKILL
                return False
        shortest = min(shortest, time.monotonic() - begun)
        return True

    assert ran(tmp_path / "first", shortest)

    def killed(out: Path, draw: random.Random) -> bool:
        return not ran(out, draw.uniform(0.4, 0.95) * shortest)

    out = kill_and_resume(killed, 20, tmp_path, wanted)
    assert ran(out, 600)
    assert untimed(lines(out)) == untimed(lines(tmp_path / "first")) == wanted
