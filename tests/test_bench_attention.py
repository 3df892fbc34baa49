"""Rows of a bench that time attention: several backends, peers, uneven work, proof in the same run."""

from __future__ import annotations

import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import close
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexsparse as fs
from flexsparse.backends import Work, tiles
from flexsparse.bench.config import load
from flexsparse.bench.problems import problem
from flexsparse.bench.run import run
from flexsparse.cli import main
from flexsparse.device import clock
from flexsparse.errors import ArgumentError, ConfigError
from flexsparse.measure import attention_peers
from flexsparse.measure.attention_peers import causal_mask, fla_nsa, flashinfer, peer
from flexsparse.measure.conversion import Conversion, conversion
from flexsparse.measure.draws import lognormal_lengths, long_tailed, past_blocks
from flexsparse.measure.linear import line
from flexsparse.measure.patience import bounded
from flexsparse.measure.rival import Rival, rival
from flexsparse.measure.timed import sdpa

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = """
name: small
dtype: float32
head_dim: 16
baselines: []
peers: [flex dense, fla, attn_gym, flashinfer]
checked: 16
rows:
  - name: tail
    attention: true
    blocks: {length: 512, heads: 2, kv_heads: 1, keep: 1, q_block: 16, kv_block: 16,
             tail: {rows: 0.06, share: 0.3}, training: false}
  - name: nsa
    attention: true
    backend: [tiles, gather, dense, flash]
    nsa: {length: 128, heads: 4, kv_heads: 2, block: 16, keep: 3, shared: 2, training: true}
  - {name: decode, attention: true, decode: {batch: 2, length: 512, heads: 4, kv_heads: 2, keep: 3}}
  - name: ragged
    attention: true
    ragged: {total: 600, heads: 2, kv_heads: 1, smallest: 16, largest: 256, training: true}
  - name: line
    linear: {length: 512, heads: 2, kv_heads: 1, keeps: [1, 2, 4], q_block: 64, kv_block: 64, tile: 64}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call is timed instead of many."""
    monkeypatch.setattr(clock, "_median", clock._once)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def made(file: Path, row: int) -> Conversion:
    bench = load(file)
    config = bench.config
    given = problem(config.rows[row], bench.rules[row], config, CPU)
    return conversion(given, attention=True, seed=0)


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# ---- the verb


def test_from_yaml_to_records_and_tables(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "argv", ["flexsparse", "bench", "small.yaml"])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 0, said
    for word in ("Beside other attention", "A decode step", "Uneven work", "R²", "bits equal"):
        assert word in said.out
    assert "nsa by flash: backend 'flash' cannot run this" in said.out
    lines = (file.parent / "results" / "small" / "rows.jsonl").read_text().splitlines()
    records = [json.loads(text) for text in lines]
    named = [(r["name"], r["asked"], r["status"]) for r in records]
    assert named == [
        ("tail", "auto", "ok"),
        *(("nsa", name, "ok") for name in ("tiles", "gather", "dense")),
        ("nsa", "flash", "refused"),
        ("decode", "auto", "ok"), ("ragged", "auto", "ok"), ("line", "auto", "ok"),
    ]  # fmt: skip
    by = {(r["name"], r["asked"]): r for r in records if r["attention"]}
    for (name, asked), record in by.items():
        attention = record["attention"]
        assert attention["check"]["ok"] and attention["check"]["rows"] == (16, 1)[name == "decode"]
        chosen = "decode" if name == "decode" else "tiles"
        assert attention["backend"] == (chosen if asked == "auto" else asked)
        assert {p["name"]: p["reason"] for p in record["peers"]} == dict.fromkeys(
            attention_peers.PEERS, "it needs a CUDA device"
        )
        for mode in {"forward", "training"} & attention.keys():
            _times(attention[mode])
    gradients = by["nsa", "gather"]["attention"]["check"]["errors"]
    assert gradients.keys() == {"out", "lse", "dq", "dk", "dv"}
    # What stands beside a row's first backend is timed once.
    dense = {
        json.dumps(by["nsa", n]["attention"]["forward"]["dense_ms"]) for n in ("tiles", "gather")
    }
    assert len(dense) == 1
    _proven(by)
    steps = by["decode", "auto"]["attention"]["steps"]
    assert [s["what"] for s in steps][2:] == ["top-k + layout + attention", "dense, torch SDPA"]
    assert all(s["cost"]["eager_ms"] > 0 for s in steps)
    _uneven(by)
    points = records[-1]["linear"]["points"]
    assert [p["tiles"] for p in points] == sorted(p["tiles"] for p in points)
    assert all(p["check"]["ok"] and p["unlisted"]["equal"] for p in points)


def _times(found: dict[str, Any]) -> None:
    assert found["time_ms"].keys() == {"layout", "kernel", "total"}
    assert all(ms > 0 for ms in found["time_ms"].values())
    assert math.prod(found["factors"].values()) == pytest.approx(found["delivered"])


def _proven(by: dict[tuple[str, str], Any]) -> None:
    for (_, asked), record in by.items():
        hidden = record["attention"]["unlisted"]
        if asked == "dense":  # some query of the one row of tiles sees each
            assert hidden == {"tiles": 0, "equal": None}
        else:
            assert (hidden["tiles"] > 0 and hidden["equal"] is True) or asked != "auto"


def _uneven(by: dict[tuple[str, str], Any]) -> None:
    tail, ragged = by["tail", "auto"]["uneven"], by["ragged", "auto"]["uneven"]
    assert tail["forward"]["padded"]["by"] == "tiles" and "per_request" not in tail["forward"]
    assert abs(tail["pairs_of_even"] - 1) < 0.2 and abs(ragged["pairs_of_even"] - 1) < 0.1
    for mode in ("forward", "training"):
        assert ragged[mode]["over_uniform"]["kernel"] > 0
        for way in ("padded", "per_request"):
            assert ragged[mode][way]["ms"] > 0 and ragged[mode][way]["by"] == "torch SDPA"
        times = by["ragged", "auto"]["attention"][mode]["time_ms"]
        assert ragged[mode]["padded"]["times_ours"] == pytest.approx(
            ragged[mode]["padded"]["ms"] / times["total"]
        )


def test_a_kernel_that_reads_what_is_not_listed_is_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = tiles.run

    def curious(work: Work) -> tuple[Tensor, Tensor | None]:
        out, lse = true(work)
        return out + 0 * work.v.sum(), lse

    monkeypatch.setattr(tiles, "run", curious)
    given = ["rows.0.attention=false", "rows.1.backend=gather", "rows.2.backend=tiles"]
    records = run(load(file, given), tmp_path / "out")
    status = {record["name"]: record["status"] for record in records}
    assert status == {
        "tail [attention=false]": "ok",
        "nsa [backend=gather]": "ok",
        "decode [backend=tiles]": "wrong",
        "ragged": "wrong",
        "line": "wrong",
    }
    assert "not listed" in records[2]["error"]


def test_padding_that_does_not_fit_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsparse.measure import uneven
    from flexsparse.measure.delivery import attended, dense_ms

    monkeypatch.setattr(uneven, "free_bytes", lambda device: 1000)
    conv = made(file, 3)
    found = uneven.uneven(conv, attended(conv, dense_ms(conv)), 0, "auto", None)
    assert found["forward"]["padded"]["ms"] is None
    assert "are free" in found["forward"]["padded"]["reason"]


def test_the_configurations_that_come_along() -> None:
    for name in ("search", "cost_grid"):
        rows = load(ROOT / "configs" / "bench" / f"{name}.yaml").config.rows
        assert {row.ways for row in rows} == {"all" if name == "search" else "chosen"}
    assert len(rows) == 60
    for name in ("training", "prefill", "decode"):
        config = load(ROOT / "configs" / "bench" / f"{name}.yaml").config
        assert config.name == name and config.checked == 256
        assert all(row.attention or row.linear for row in config.rows)
        trained = [getattr(row.of, "training", False) for row in config.rows]
        assert all(trained) if name == "training" else not any(trained)


def test_the_rows_in_the_readme(tmp_path: Path) -> None:
    parts = (ROOT / "README.md").read_text().split("```yaml\n")[1:]
    shown = next(part.split("```")[0] for part in parts if "peers:" in part)
    (tmp_path / "c.yaml").write_text(shown)
    kinds = {row.kind for row in load(tmp_path / "c.yaml").config.rows}
    assert kinds == {"blocks", "nsa", "ragged", "decode", "linear"}


def test_mistakes_are_told(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            file,
            ["rows.1.nsa.shared=3", "rows.3.ragged.largest=8", "rows.4.linear.keeps=[1, 2]",
             "rows.0.blocks.tail.share=1.0", "rows.2.backend=fast"],
        )  # fmt: skip
    said = str(caught.value)
    for words in (
        "shared must divide block and length, got 3, 16 and 128",
        "smallest, largest and total must not fall, got 16, 8 and 600",
        "rows.4.linear.keeps", "rows.0.blocks.tail.share", "rows.2.backend",
    ):  # fmt: skip
        assert words in said


def test_single_keys_stand_beside_the_blocks_they_lie_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every key of each block both are the same work, and give the same."""
    row = "tokens: {length: 300, heads: 2, kv_heads: 1, keep: 256, blocks: 2, tile: 128, training: true}"
    text = (
        SMALL[: SMALL.index("rows:")]
        + f"rows: [{{name: keys, pack: identity, attention: true, {row}}}]"
    )
    (tmp_path / "keys.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flexsparse", "bench", "keys.yaml"])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 0 and "Single keys" in said.out, said
    (line,) = (tmp_path / "results" / "small" / "rows.jsonl").read_text().splitlines()
    record = json.loads(line)
    beside, attention = record["membership"], record["attention"]
    assert beside["by"] == "tiles" and len(set(beside["physical_pairs"])) == 1
    for mode in ("forward", "training"):
        kernel = attention[mode]["time_ms"]["kernel"]
        assert beside[mode]["over"] * beside[mode]["whole_ms"] == pytest.approx(kernel)
    config = load(tmp_path / "keys.yaml").config
    keys = problem(config.rows[0], None, config, CPU)
    assert keys.whole is not None
    outs = []
    for one in (keys, keys.whole):
        out = fs.attention(*one.qkv(0), rule=one.rule, select=one.select())
        outs.append(out)
    close(*outs)
    with pytest.raises(
        ConfigError, match="multiple of blocks, and at most 128 a block, got 9 and 2"
    ):
        load(tmp_path / "keys.yaml", ["rows.0.tokens.keep=9"])


# ---- what is drawn


def test_a_tail_holds_its_share() -> None:
    counts = long_tailed(4096, 2, (32, 32), 3, (0.02, 0.3), draw())
    long = counts > 3
    assert counts.shape == (2, 128) and int(long.sum()) == round(0.02 * 256)
    assert 0.29 < counts[long].sum() / counts.sum() < 0.32
    blocks = past_blocks(4096, 2, 32, 32, counts, draw())
    assert torch.equal((blocks >= 0).sum(-1)[0], counts)
    with pytest.raises(ArgumentError, match="each would keep"):
        long_tailed(1024, 2, (32, 32), 8, (0.02, 0.3), draw())


def test_tokens_of_nsa_choose_first_own_and_what_neighbours_choose(file: Path) -> None:
    indices = made(file, 1).problem.indices
    assert indices is not None and indices.shape == (1, 2, 128, 3)
    assert torch.equal(indices[:, :, ::2], indices[:, :, 1::2])
    for token in range(128):
        for kept in indices[0, :, token].tolist():
            assert {0, token // 16} <= set(kept) and max(kept) == token // 16


def test_lengths_are_lognormal_and_fill() -> None:
    lengths = torch.tensor(lognormal_lengths(2**20, 128, 65536, seed=1))
    assert lengths.sum() == 2**20 and lengths.min() >= 128 and lengths[:-1].max() <= 65536
    middle, half = math.log(128 * 65536) / 2, math.log(65536 / 128) / 4
    logs = lengths.double().log()
    assert abs(logs.mean() - middle) < 0.3 and 0.7 * half < logs.std() < 1.1 * half


def test_a_line_and_how_well_it_fits() -> None:
    exact = line([10, 20, 40], [2.0, 3.0, 5.0])
    assert exact["r2"] == pytest.approx(1) and exact["fixed_ms"] == pytest.approx(1)
    assert line([10, 20, 40], [2.0, 5.0, 3.0])["r2"] < 0.2


# ---- others


def test_the_causal_lists_are_those_of_torch() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    ours, theirs = causal_mask(384, CPU), create_block_mask(causal, None, None, 384, 384, "cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_a_rival_on_the_clock(file: Path) -> None:
    conv = made(file, 3)
    assert conv.qkv is not None
    q, k, v = (x.detach() for x in conv.qkv)
    attend = sdpa(True, conv.problem.heads)

    def dense(_: Conversion) -> Rival:
        return Rival((q, k, v), attend, attend, "dense", lambda out: out, "not here")

    found = rival("other", dense, conv, 30)
    assert found["difference"] > 0.1 and found["forward"].keys() == {"total", "kernel"}
    assert found["training"] == {"reason": "not here"} and found["note"] == "dense"

    def slow(_: Conversion) -> Rival:
        time.sleep(5)
        raise AssertionError

    assert rival("slow", slow, conv, 0.05)["reason"] == "its first call took more than 0.05 s"
    with bounded(0.05):
        pass
    time.sleep(0.1)  # nothing is left behind


def test_fla_is_called_in_its_own_form(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel_nsa(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_indices: Tensor,
        block_counts: int,
        block_size: int,
    ) -> Tensor:
        """By its documentation: q [B, T, HQ, K], k and v [B, T, H, K], indices [B, T, H, S]."""
        t, group = q.shape[1], q.shape[2] // k.shape[2]
        assert block_indices.shape == (1, t, k.shape[2], block_counts)
        blocks = torch.arange(t) // block_size
        seen = (block_indices[0, :, :, None] == blocks[:, None]).any(-1).permute(1, 0, 2)
        seen = (seen & torch.ones(t, t).tril().bool()).repeat_interleave(group, 0)
        k, v = (x[0].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = (q[0].transpose(0, 1) @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        out: Tensor = (scores.softmax(-1) @ v).transpose(0, 1)[None]
        return out

    module = ModuleType("fla.ops.nsa.parallel")
    monkeypatch.setattr(module, "parallel_nsa", parallel_nsa, raising=False)
    _pretend(monkeypatch, module)
    wide = file.read_text().replace("heads: 4, kv_heads: 2, block", "heads: 32, kv_heads: 2, block")
    file.write_text(wide)
    found = rival("fla", fla_nsa, made(file, 1), 60)
    assert found["reason"] is None and found["difference"] < 1e-5
    assert found["training"]["total"] > 0
    assert "at least 16 keys for each token" in peer("fla", made(file, 0), 60)["reason"]


def test_flashinfer_is_given_each_kv_head_as_a_request(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapper:
        def __init__(self, workspace: Tensor, use_tensor_cores: bool) -> None:
            assert use_tensor_cores

        def plan(
            self, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int,
            dim: int, page: int, **dtypes: torch.dtype,
        ) -> None:  # fmt: skip
            assert (heads, kv_heads, dim, page) == (2, 1, 16, 64) and bool((last == page).all())
            self.pages = [indices[a:b] for a, b in pairwise(indptr)]

        def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            k, v = ([x[at].flatten(0, 1)[:, 0] for at in self.pages] for x in cache)
            return torch.stack([
                (one @ keys.T / 4).softmax(-1) @ values
                for one, keys, values in zip(q, k, v, strict=True)
            ])  # fmt: skip

    module = ModuleType("flashinfer")
    monkeypatch.setattr(module, "BatchDecodeWithPagedKVCacheWrapper", Wrapper, raising=False)
    _pretend(monkeypatch, module)
    found = rival("flashinfer", flashinfer, made(file, 2), 60)
    assert found["reason"] is None and found["difference"] < 1e-5


def _pretend(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """The module is installed, and the CPU is good enough."""
    monkeypatch.setattr(attention_peers, "installed", lambda name, package: module)

    def anywhere(made: Conversion) -> Any:
        assert made.qkv is not None
        return made.problem, tuple(x.detach() for x in made.qkv)

    monkeypatch.setattr(attention_peers, "_on_cuda", anywhere)


@pytest.mark.gpu
def test_on_a_device_peers_run_or_say_why(file: Path, tmp_path: Path, device: torch.device) -> None:
    text = SMALL.replace("float32", "bfloat16").replace("head_dim: 16", "head_dim: 64")
    file.write_text(text.replace("[tiles, gather, dense, flash]", "[auto, flex, flash]"))
    for record in run(load(file, ["device=cuda"]), tmp_path / "out"):
        assert record["status"] in ("ok", "refused"), record["error"]
        for other in record["peers"]:
            assert (other["reason"] is None) == ("forward" in other)
            assert other["difference"] is None or other["difference"] < 0.05
            if other["name"] == "flex dense":
                assert other["reason"] is None, other["reason"]
        for step in (record["attention"] or {}).get("steps", []):
            assert step["reason"] or step["cost"]["graph_ms"], step
