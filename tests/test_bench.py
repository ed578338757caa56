"""What bench.py promises: interleaved measurements, honest ratios, a table and one line of JSON.

    python -m pytest -q tests/test_bench.py
"""
import json
import os
import re
from pathlib import Path

import pytest
import torch
from toy import DENSE, flags, make_config

import bench
from config import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """go(mode, *files, **flags) -> (stdout's lines, the JSON record, stderr), with toy.py and dense.py (2 rows) here."""
    monkeypatch.chdir(tmp_path)
    make_config(tmp_path, **DENSE, batch_size=2)
    os.rename("toy.py", "dense.py")
    make_config(tmp_path)

    def go(*words, **changes):
        bench.main([*words, *flags(**{"repeats": 2, "vocab_size": 64, "new_tokens": 6, **changes})])
        out, err = capsys.readouterr()
        lines = out.splitlines()
        return lines[:-1], json.loads(lines[-1]), err
    return go


def refusal(*argv):
    with pytest.raises(UserError) as error:
        bench.main(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


def config_of(path, **changes):
    return bench.settings_of(["train", path, *flags(vocab_size=64, **changes)])[1][Path(path).stem].build(GPTConfig)


def test_the_last_line_is_json_and_the_rest_a_table(go):
    (head, columns, *table), record, _ = go("train", "toy.py", "dense.py")
    assert "toy 1+1x4+1 (4 rows), dense 0+2x1+0 (2 rows)" in head and "cpu float32, 1 threads" in head
    assert columns.split() == ["ms", "spread", "tokens/s", "time", "FLOPs", "time/FLOPs"] and [line.split()[0] for line in table] == ["toy", "dense"]
    assert record["mode"] == "train" and [row["name"] for row in record["rows"]] == ["toy", "dense"]
    assert {"device", "dtype", "threads", "torch", "python", "commit", "repeats", "first_round_seconds", "compiled"} <= set(record)
    for line, row in zip(table, record["rows"]):
        assert [float(cell.replace(",", "")) for cell in line.split()[1:]] == pytest.approx(
            [row[name] for name in ("ms", "spread_ms", "tokens_per_second", "time_ratio", "flops_ratio", "time_over_flops")], abs=0.6)


def test_tokens_per_second_count_each_configs_own_tokens(go):
    rows = go("train", "toy.py", "dense.py")[1]["rows"]
    assert [row["tokens_per_second"] * row["ms"] / 1e3 for row in rows] == pytest.approx([4 * 32, 2 * 32])
    rows = go("generate", "toy.py", "dense.py", prompt_tokens=3)[1]["rows"]
    assert [row["name"] for row in rows] == ["toy cached", "toy uncached", "dense cached", "dense uncached"]
    assert [row["tokens_per_second"] * row["ms"] / 1e3 for row in rows] == pytest.approx([24, 24, 12, 12])


def test_ratios_are_medians_over_pairs_of_the_same_repeat(capsys):
    seconds = {"a": [1.0, 2.0, 4.0], "b": [3.0, 2.0, 4.0]}              # the machine slows down fourfold on the way
    a, b = bench.table(["a", "b"], seconds, {"a": 10, "b": 40}, {"a": 100, "b": 100})
    assert (a["time_ratio"], b["time_ratio"], b["flops_ratio"], b["time_over_flops"]) == (1, 1, 4, 0.25)
    assert (b["ms"], b["spread_ms"], b["tokens_per_second"]) == (3000, 2000, pytest.approx(100 / 3))


def test_measurements_take_turns_after_a_first_round_that_does_not_count():
    calls = []
    seconds, warm = bench.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, 3, CPU)
    assert calls == list("abababab") and {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3} and set(warm) == {"a", "b"}


def test_the_flops_of_training_are_three_forwards(go):
    cfg, dense, s = config_of("toy.py"), config_of("dense.py"), bench.settings_of(["train", "toy.py"])[1]["toy"]
    assert bench.train_step(cfg, s, CPU, None, False)[1:] == (3 * 4 * 32 * cfg.flops_per_token(32), 4 * 32)
    ratio = go("train", "toy.py", "dense.py")[1]["rows"][1]["flops_ratio"]
    assert ratio == pytest.approx(2 * dense.flops_per_token(32) / (4 * cfg.flops_per_token(32)))
    shallow = go("train", "toy.py", "toy.py", depth=2, seq_len=16)[1]["rows"]
    assert shallow[1]["flops_ratio"] == 1 and [row["name"] for row in shallow] == ["toy", "toy'"]


def test_the_flops_of_generating_are_those_of_the_passes_that_are_made(go, monkeypatch):
    passes, feed = [], GPT.feed
    monkeypatch.setattr(GPT, "feed", lambda model, ids_BT, cache, *args, **kwargs: passes.append((type(cache).__name__, ids_BT.shape[1])) or feed(
        model, ids_BT, cache, *args, **kwargs))
    rows = go("generate", "toy.py", prompt_tokens=3, new_tokens=5, repeats=1)[1]["rows"]
    assert passes[:10] == [("KVCache", 3)] + [("KVCache", 1)] * 4 + [("NoCache", n) for n in range(3, 8)]
    cfg, head = config_of("toy.py"), 2 * 64 * 16
    cached = 7 * (cfg.flops_per_token(7) - head) + 5 * head
    uncached = sum(n * (cfg.flops_per_token(n) - head) for n in range(3, 8)) + 5 * head
    assert rows[1]["flops_ratio"] == pytest.approx(uncached / cached)


def test_a_training_step_runs_at_the_depth_that_was_asked_for(go, monkeypatch):
    cfg, depths, forward = config_of("toy.py"), [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda *args, **kwargs: depths.append(kwargs["depth"]) or forward(*args, **kwargs))
    for depth in (None, 2):
        s = bench.settings_of(["train", "toy.py", *flags(depth=depth)])[1]["toy"]
        bench.train_step(cfg, s, CPU, torch.autocast("cpu", enabled=False), False)[0]()
    assert depths == [4, 2]                                             # n_recur, also where training would draw one


def test_a_training_step_trains(go):
    s = bench.settings_of(["train", "toy.py", *flags(vocab_size=64)])[1]["toy"]
    torch.manual_seed(0)
    step, *_ = bench.train_step(config_of("toy.py"), s, CPU, torch.autocast("cpu", enabled=False), False)
    model = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, GPT))
    before = {name: p.clone() for name, p in model.named_parameters()}
    step()
    assert all(not torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@pytest.mark.parametrize("argv, words", [
    ([], "train or generate, got none"), (["race", "toy.py"], "got race"), (["train", "generate", "toy.py"], "got train generate"),
    (["train"], "needs config files"), (["train", "none.py"], "none.py: no such file"), (["train", "toy.py", "--n_heads=2"], "did you mean 'n_head'"),
    (["train", "toy.py", "--repeats=0"], "repeats=0"), (["train", "toy.py", "--threads=0"], "threads=0"), (["train", "toy.py", "--batch_size=0"], "batch_size=0"),
    (["train", "toy.py", "--seq_len=33"], "seq_len=33 is more than block_size=32"), (["train", "toy.py", "--seq_len=0"], "seq_len=0"),
    (["train", "toy.py", "dense.py", "--n_head=3"], "n_head=3 does not divide"), (["generate", "toy.py", "--new_tokens=33"], "together they may be 33"),
    (["generate", "toy.py", "--new_tokens=0"], "new_tokens=0"), (["generate", "toy.py", "--prompt_tokens=0"], "prompt_tokens=0"),
    (["generate", "toy.py", "--depth=-1"], "depth=-1"), (["generate", "toy.py", "--cache=none"], "cache has no choice")])
def test_what_cannot_be_measured_is_one_line(go, argv, words):
    assert words in refusal(*argv)


def test_progress_and_notes_stay_off_stdout(go, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError
    monkeypatch.setattr(torch, "compile", no_compiler)
    lines, record, err = go("train", "toy.py", compile="true")
    assert len(lines) == 3 and record["compiled"] is False and "torch.compile does not work here" in err
    assert re.search("generate runs eagerly", go("generate", "toy.py", compile="true")[2])
