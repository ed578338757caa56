"""What bench.py promises: interleaved measurements, honest ratios, counts without a model, a table and one line of JSON.

    python -m pytest -q tests/test_bench.py
"""
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toy import DENSE, SEQUENCE, flags, make_config, refusal

import bench
import model
from model import FLOPS, GPT, GPTConfig, RouterUnit, Seat, block_flops, stream
from sample import Engine, Shelves

pytestmark = pytest.mark.slow

CPU, PLAIN = torch.device("cpu"), contextlib.nullcontext()


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """go(mode, *files, **flags) -> (stdout's lines, the JSON record, stderr), with toy.py and dense.py (2 rows) here."""
    monkeypatch.chdir(tmp_path)
    make_config(tmp_path, **DENSE, batch_size=2)
    os.rename("toy.py", "dense.py")
    make_config(tmp_path)

    def go(*words, **changes):
        small = {name: value for name, value in {"repeats": 2, "new_tokens": 6}.items() if name in bench.KEYS[words[0]]}
        bench.main([*words, *flags(**{"vocab_size": 64, **small, **changes})])
        out, err = capsys.readouterr()
        lines = out.splitlines()
        return lines[:-1], json.loads(lines[-1]), err
    return go


def settings_of(path, **changes):
    return bench.settings_of(["train", path, *flags(vocab_size=64, **changes)])[1][Path(path).stem]


def config_of(path, **changes):
    return settings_of(path, **changes).build(GPTConfig)


def training(path, make=bench.ours, **changes):
    s = settings_of(path, **changes)
    cfg = s.build(GPTConfig)
    return bench.train_step(make, cfg, bench.depth_of(cfg, s), s, CPU, PLAIN, False)


def numbers(line):
    """The cells of a table row behind its name, n/a as None."""
    return [None if cell == "n/a" else float(cell.replace(",", "")) for cell in re.split(r"  +", line.strip())[1:]]


# ------------------------------------------------------------------------------------------------------- a table and a record

@pytest.mark.slow
def test_the_last_line_is_json_and_the_rest_a_table(go):
    (head, columns, *table), record, _ = go("train", "toy.py", "dense.py")
    assert "toy 1+1x4+1 (4 rows x 32 tokens x 1 accumulation), dense 0+2x1+0 (2 rows x 32" in head
    assert re.split(r"  +", columns.strip()) == ["ms", "spread", "tokens", "tokens/s", "MiB", "MFU", "setup s", "first s", "time", "FLOPs",
                                                 "time/FLOPs"]
    assert record["mode"] == "train" and [row["name"] for row in record["rows"]] == ["toy", "dense"] == [line.split()[0] for line in table]
    assert {"device", "dtype", "threads", "torch", "python", "commit", "repeats", "compiled"} <= set(record)
    for line, row in zip(table, record["rows"]):
        expected = [row[name] for name in ("ms", "spread_ms", "tokens_per_update", "tokens_per_second")] + [row["peak_bytes"] / 2**20, None]
        expected += [row[name] for name in ("setup_seconds", "first_seconds", "time_ratio", "flops_ratio", "time_over_flops")]
        assert [x for x in numbers(line) if x is not None] == pytest.approx([x for x in expected if x is not None], abs=0.6)
        assert numbers(line)[5] is None is row["utilisation"]


@pytest.mark.parametrize("mode", ["counts", "train", "generate"])
def test_the_first_line_names_torchs_own_thread_count(go, mode, monkeypatch):
    (head, *_), record, _ = go(mode, "toy.py", threads=2)
    assert ", 2 threads, torch" in head and record["threads"] == 2 == torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)       # a flag that nobody obeys is not what is printed
    assert go(mode, "toy.py", threads=1)[1]["threads"] == 2
    monkeypatch.undo()
    torch.set_num_threads(1)


def test_progress_and_notes_stay_off_stdout(go, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError
    monkeypatch.setattr(torch, "compile", no_compiler)
    lines, record, err = go("train", "toy.py", compile="true")
    assert len(lines) == 3 and record["compiled"] is False and "torch.compile does not work here" in err
    assert re.search("generate runs eagerly", go("generate", "toy.py", compile="true")[2])


@pytest.mark.parametrize("argv, words", [
    ([], "counts or train or generate or decode or steps or serve, got none"), (["race", "toy.py"], "got race"), (["counts", "config/ladder/rival"], "neither a config file (.py) nor a folder"), (["ladder", "rivals"], "config/ladder/rivals'?"), (["ladder"], "config/ladder/rivals"), (["train", "generate", "toy.py"], "got train generate"),
    (["train"], "needs config files"), (["train", "none.py"], "none.py: no such file"), (["train", "toy.py", "--n_heads=2"], "did you mean 'n_head'"),
    (["train", "toy.py", "--repeats=0"], "repeats=0"), (["train", "toy.py", "--threads=0"], "threads=0"),
    (["train", "toy.py", "--batch_size=0"], "batch_size=0"),
    (["train", "toy.py", "--seq_len=33"], "seq_len=33 is more than block_size=32"), (["train", "toy.py", "--seq_len=0"], "seq_len=0"),
    (["counts", "toy.py", "--seq_len=33"], "seq_len=33 is more than block_size=32"), (["train", "toy.py", "--grad_clip=-1"], "grad_clip=-1"),
    (["train", "toy.py", "--gradient_accumulation_steps=0"], "gradient_accumulation_steps=0"), (["counts", "toy.py", "--depth=-1"], "depth=-1"),
    (["counts", "sequence.py", "--depth=3"], "depth=3 cannot be run"), (["train", "sequence.py", "--depth=3"], "depth=3 cannot be run"),
    (["generate", "toy.py", "--against=transformers"], "goes with mode train or serve"),
    (["train", "toy.py", "dense.py", "--n_head=3"], "n_head=3 does not divide"),
    (["generate", "toy.py", "--new_tokens=33"], "together they may be 33"),
    (["generate", "toy.py", "--new_tokens=0"], "new_tokens=0"), (["generate", "toy.py", "--prompt_tokens=0"], "prompt_tokens=0"),
    (["generate", "toy.py", "--depth=-1"], "depth=-1"), (["generate", "toy.py", "--cache=none"], "cache has no choice"),
    (["train", "toy.py", "--against=torch"], "against has no choice 'torch'"),
    (["train", "toy.py", "--against=transformers", "--dropout=0.1"], "no counterpart to dropout=0.1"),
    (["train", "toy.py", "--against=transformers", "--checkpoint_activations=true"], "checkpoint_activations=True"),
    (["train", "toy.py", "--against=transformers", "--n_kv_head=1"], "counterpart to n_kv_head=1")])
def test_what_cannot_be_measured_is_one_line(go, tmp_path, argv, words):
    if "transformers" in str(argv):
        pytest.importorskip("transformers")
    os.rename("toy.py", "kept.py")
    make_config(tmp_path, **SEQUENCE)
    os.rename("toy.py", "sequence.py")
    os.rename("kept.py", "toy.py")
    assert words in refusal(bench.main, argv)


# ------------------------------------------------------------------------------------------------------- clocks and ratios

def measured(monkeypatch, work, **times):
    """The rows of runs that took these times; work: name -> (FLOPs, tokens)."""
    monkeypatch.setattr(bench, "interleave", lambda runs, repeats, device: (times, dict.fromkeys(runs, 9.0)))
    return bench.measure({name: bench.Run(None, *work[name], {}) for name in times}, len(times["a"]), CPU)[1]


def test_ratios_are_medians_over_pairs_of_the_same_repeat(monkeypatch):
    a, b = measured(monkeypatch, {"a": (10, 100), "b": (40, 100)}, a=[(1.0, None), (2.0, None), (4.0, None)],
                    b=[(3.0, None), (2.0, None), (4.0, None)])          # the machine slows down on the way
    assert (a["time_ratio"], b["time_ratio"], b["flops_ratio"], b["time_over_flops"]) == (1, 1, 4, 0.25)
    assert (b["ms"], b["spread_ms"], b["tokens_per_second"], b["first_seconds"], b["first_token_ms"]) == (3000, 2000, pytest.approx(100 / 3), 9, None)


def test_the_median_is_a_repeat_that_took_place(monkeypatch):
    row, = measured(monkeypatch, {"a": (1, 1)}, a=[(4.0, 1.0), (1.0, 0.5), (3.0, 0.25), (2.0, 0.125)])
    assert (row["ms"], row["first_token_ms"]) == (2000, 125)


def through(pieces):
    """What a step in pieces returns at its end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def test_measurements_take_turns_after_a_first_round_that_stands_apart():
    calls = []

    def run(name):
        def step():
            calls.append(name)
            if len(calls) <= 2:                                         # set-up and compilation
                end = time.process_time() + 0.05
                while time.process_time() < end:
                    pass
            return len(calls)
        return bench.Run(step, 1, 1, {})
    times, first = bench.interleave({name: run(name) for name in "ab"}, 3, CPU)
    assert calls == list("abababab") and [returned for _, returned in times["a"]] == [3, 5, 7]
    assert min(first.values()) >= 0.05 > max(took for name in "ab" for took, _ in times[name])


def test_steps_in_pieces_take_turns_and_each_has_its_own_time(monkeypatch):
    order, now = [], [0.0]

    def run(name, n, seconds):
        def step():
            for i in range(n):
                order.append(name)
                now[0] += seconds
                yield (i + 1) / n
            return name.upper()
        return bench.Run(step, 1, 1, {})
    monkeypatch.setattr(bench, "clock", lambda device: now[0])
    times, first = bench.interleave({"a": run("a", 4, 1.0), "b": run("b", 2, 10.0), "c": bench.Run(lambda: order.append("c"), 1, 1, {})}, 2, CPU)
    assert "".join(order) == "cabaaba" * 3                              # b's piece is half of its work, a's a quarter
    assert times == {"a": [(4.0, "A")] * 2, "b": [(20.0, "B")] * 2, "c": [(0.0, None)] * 2} and first == {"a": 4.0, "b": 20.0, "c": 0.0}


def test_utilisation_is_of_a_known_device_or_not_there(monkeypatch):
    assert bench.utilisation(1e12, CPU, "bfloat16") is None
    for name, dtype, expected in (("NVIDIA H100 PCIe", "bfloat16", 0.5), ("NVIDIA H100 PCIe", "float32", None),
                                  ("NVIDIA A100-SXM4-80GB", "bfloat16", 378 / 312),
                                  ("NVIDIA H100 PCIe MIG 1g.10gb", "bfloat16", None), ("Unheard Of", "bfloat16", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert bench.utilisation(378e12, torch.device("cuda"), dtype) == expected


# -------------------------------------------------------------------------------------------------------------- memory

def test_memory_counts_every_living_storage_once():
    held = torch.zeros(1000)                                            # 4,000 bytes
    with bench.Live([held, held[:10]]) as live:
        assert live.peak == 4000
        x = held + 1                                                    # 8,000
        x[5:].add_(1)                                                   # a view and a write in place: nothing
        assert live.peak == 8000
        y = x * 2                                                       # 12,000
        del x, y
        z = torch.zeros(500, dtype=torch.float64)                       # 8,000 again: the peak stays
        held.add_(z.sum())
    assert live.peak == 12_000
    assert bench.peak_bytes(bench.Run(lambda: held + 1, 1, 1, {}, lambda: [held]), CPU, False) == 8000
    assert bench.peak_bytes(bench.Run(lambda: None, 1, 1, {}), CPU, True) is None         # compiled code would be missed


def test_memory_counts_what_autograd_keeps():
    x = torch.ones(1000, requires_grad=True)
    with bench.Live([x]) as live:
        y = x.exp().exp().exp()                                         # each keeps its result for the backward pass
        assert live.peak == 4 * 4000
        y.sum().backward()
    assert 4 * 4000 < live.peak <= 7 * 4000


def test_a_training_steps_memory_holds_weights_moments_gradients_and_activations(go):
    run = training("dense.py")
    run.step()                                                          # AdamW makes its moments at the first step
    n = config_of("dense.py").n_params()
    peak = bench.peak_bytes(run, CPU, False)
    assert peak == bench.peak_bytes(run, CPU, False) >= 4 * 4 * n
    assert bench.Live(run.held()).peak == pytest.approx(3 * 4 * n + 8 * 2 * 33, abs=4 * 30)          # AdamW counts its steps, 4 bytes a tensor
    wide = training("dense.py", batch_size=8)
    wide.step()
    activations = (bench.peak_bytes(wide, CPU, False) - peak) / (6 * 32)         # bytes per token
    D, F, L = 16, 64, 2
    assert 4 * L * (6 * D + F) < activations < 4 * 3 * (L * (14 * D + 2 * F) + 64)
    deep = training("toy.py", depth=8), training("toy.py", depth=1)
    assert bench.peak_bytes(deep[0], CPU, False) > 2 * bench.peak_bytes(deep[1], CPU, False)


# --------------------------------------------------------------------------------------------------------------- train

def test_tokens_per_second_count_each_configs_own_tokens(go):
    rows = go("train", "toy.py", "dense.py")[1]["rows"]
    assert [row["tokens_per_second"] * row["ms"] / 1e3 for row in rows] == pytest.approx([4 * 32, 2 * 32])
    rows = go("generate", "toy.py", "dense.py", prompt_tokens=3)[1]["rows"]
    assert [row["name"] for row in rows] == ["toy cached", "toy uncached", "dense cached", "dense uncached"]
    assert [row["tokens_per_second"] * row["ms"] / 1e3 for row in rows] == pytest.approx([24, 24, 12, 12])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_update_counts_the_tokens_of_all_its_micro_batches(go, monkeypatch, accumulation):
    seen, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, ids_BT, *args, **kwargs: seen.append(ids_BT.numel()) or forward(self, ids_BT, *args, **kwargs))
    (head, *_), record, _ = go("train", "dense.py", gradient_accumulation_steps=accumulation)
    row, calls = record["rows"][0], 1 + 2 + 1                           # a first round, two repeats, one for the memory
    assert f"2 rows x 32 tokens x {accumulation} accumulation" in head
    assert sum(seen) / calls == row["tokens_per_update"] == accumulation * 2 * 32
    assert row["tokens_per_second"] == pytest.approx(sum(seen) / calls / row["ms"] * 1e3)


def test_the_flops_of_training_are_three_forwards(go):
    cfg, dense = config_of("toy.py"), config_of("dense.py")
    for accumulation in (1, 4):
        run = training("toy.py", gradient_accumulation_steps=accumulation)
        assert (run.flops, run.tokens) == (accumulation * 3 * 4 * 32 * cfg.flops_per_token(32), accumulation * 4 * 32)
    ratio = go("train", "toy.py", "dense.py")[1]["rows"][1]["flops_ratio"]
    assert ratio == pytest.approx(2 * dense.flops_per_token(32) / (4 * cfg.flops_per_token(32)))
    shallow = go("train", "toy.py", "toy.py", depth=2, seq_len=16)[1]["rows"]
    assert shallow[1]["flops_ratio"] == 1 and [row["name"] for row in shallow] == ["toy", "toy'"]


@pytest.mark.slow
def test_checkpointed_activations_are_measured_as_such(go):
    kept, again = (go("train", "toy.py", depth=8, checkpoint_activations=choice)[1]["rows"][0] for choice in (False, True))
    assert again["peak_bytes"] < 0.7 * kept["peak_bytes"]


def test_a_training_step_runs_at_the_depth_that_was_asked_for(go, monkeypatch):
    depths, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda *args, **kwargs: depths.append(kwargs["depth"]) or forward(*args, **kwargs))
    for depth in (None, 2):
        training("toy.py", depth=depth).step()
    assert depths == [4, 2]                                             # n_recur, also where training would draw one


def test_a_training_step_trains_with_the_loss_of_training(go):
    torch.manual_seed(0)
    run = training("toy.py")
    net = next(cell.cell_contents for cell in run.step.__closure__ if isinstance(cell.cell_contents, GPT))
    before = {name: p.clone() for name, p in net.named_parameters()}
    run.step()
    assert all(not torch.equal(p, before[name]) and p.grad is None for name, p in net.named_parameters())
    assert net.cfg.fused_loss and not config_of("toy.py", fused_loss=False).fused_loss


# --------------------------------------------------------------------------------------------------- train --against=transformers

@pytest.fixture
def transformers():
    """For models of other people: the package, or no test."""
    return pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(block="gpt2", n_ffn=40), dict(block="llama", n_kv_head=1, rope_theta=500.0)], ids=["gpt2", "llama"])
def test_their_model_has_the_shape_of_ours(go, transformers, changes):
    cfg = config_of("dense.py", n_embd=16, **changes)
    net, call = bench.theirs(cfg, 1, settings_of("dense.py"), CPU, False)
    biases = sum(p.numel() for name, p in net.named_parameters() if name.endswith("bias"))
    assert biases == (16 + 2 * (2 * 16 + 3 * 16 + 16 + 40 + 16) if cfg.block == "gpt2" else 0)      # last norm; per block: norms, q k v, o, up, down
    assert sum(p.numel() for p in net.parameters()) - biases == cfg.n_params()            # tied: the head is the token table
    assert net.config._attn_implementation == "sdpa" and net.training and net.config.vocab_size == 64
    up = torch.linspace(-3, 3, 100)
    if cfg.block == "gpt2":
        assert torch.allclose(net.transformer.h[0].mlp.act(up), torch.nn.functional.gelu(up), atol=1e-6)
    else:
        assert torch.allclose(net.model.layers[0].mlp.act_fn(up), torch.nn.functional.silu(up), atol=1e-6)
    assert net.config.to_dict().get("rope_parameters", {"rope_theta": 500})["rope_theta"] == 500
    ids_BT = torch.randint(64, (2, 32))
    logits_BTV, loss = net(ids_BT).logits, call(ids_BT, None, None).loss
    assert torch.equal(net(ids_BT).logits, logits_BTV)                                    # no dropout although it trains
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).item(), rel=1e-5)


@pytest.mark.slow
def test_theirs_stands_beside_each_config_as_the_dense_model_of_as_many_blocks(go, transformers, monkeypatch):
    built, theirs = [], bench.theirs
    monkeypatch.setattr(bench, "theirs", lambda cfg, *rest: built.append(cfg) or theirs(cfg, *rest))
    lines, record, err = go("train", "dense.py", "toy.py", against="transformers", repeats=3)
    names = ["dense", "dense transformers", "toy", "toy transformers, dense 0+6x1+0"]
    assert [row["name"] for row in record["rows"]] == names and [cfg.layout for cfg in built] == ["0+2x1+0", "0+6x1+0"]
    assert [row["tokens_per_update"] for row in record["rows"]] == [64, 64, 128, 128] and err == ""
    assert record["rows"][1]["flops_ratio"] == 1 and record["rows"][3]["flops_ratio"] < record["rows"][2]["flops_ratio"]
    assert all(row["peak_bytes"] > 0 for row in record["rows"])
    for name, line in zip(["dense", "toy"], lines[-2:]):
        assert f"time of transformers / {name}: {record['theirs_over_ours'][name]:.3f} ({name} transformers" in line and "with biases" in line
    assert "dense 0+6x1+0, with biases" in lines[-1] and bench.dense_twin(config_of("toy.py"), 2).layout == "0+4x1+0"


@pytest.mark.slow
def test_their_time_over_ours_is_above_one_where_ours_is_faster(go, transformers, monkeypatch):
    slow = lambda name: [(3.0, None), (6.0, None)] if "transformers" in name else [(1.0, None), (2.0, None)]
    monkeypatch.setattr(bench, "interleave", lambda runs, *rest: ({name: slow(name) for name in runs}, dict.fromkeys(runs, 1.0)))
    lines, record, _ = go("train", "dense.py", against="transformers")
    assert record["theirs_over_ours"] == {"dense": 3} and "time of transformers / dense: 3.000" in lines[-1]


def test_their_step_trains_as_ours_does(go, transformers):
    run = training("dense.py", bench.theirs, gradient_accumulation_steps=2)
    net = next(cell.cell_contents for cell in run.step.__closure__ if isinstance(cell.cell_contents, torch.nn.Module))
    before = net.state_dict()["transformer.h.1.mlp.c_fc.weight"].clone()
    run.step()
    assert not torch.equal(net.state_dict()["transformer.h.1.mlp.c_fc.weight"], before) and run.tokens == 128
    assert bench.Live(run.held()).peak >= 3 * 4 * sum(p.numel() for p in net.parameters())


def test_without_transformers_the_comparison_is_refused_in_one_line(go, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refusal(bench.main, ["train", "dense.py", "--against=transformers"])


# ------------------------------------------------------------------------------------------------------------- generate

def test_generating_states_batch_prompt_prefill_decode_and_the_time_to_the_first_token(go):
    (head, columns, *table), record, _ = go("generate", "toy.py", prompt_tokens=5, new_tokens=7)
    assert "depth 4, cache full" in head and re.split(r"  +", columns.strip())[:8] == [
        "rows", "prompt", "new", "ms", "spread", "first ms", "prefill tok/s", "decode tok/s"]
    for line, row in zip(table, record["rows"]):
        assert (row["batch_size"], row["prompt_tokens"], row["new_tokens"]) == (4, 5, 7) == tuple(numbers(line)[:3])
        assert row["first_token_ms"] > 0 and row["decode_ms"] > 0 and row["first_token_ms"] + row["decode_ms"] == pytest.approx(row["ms"])
        assert row["prefill_tokens_per_second"] == pytest.approx(4 * 5 / row["first_token_ms"] * 1e3)
        assert row["decode_tokens_per_second"] == pytest.approx(4 * 6 / row["decode_ms"] * 1e3)
        rates = [row[name] for name in ("first_token_ms", "prefill_tokens_per_second", "decode_tokens_per_second")]
        assert numbers(line)[5:8] == pytest.approx(rates, abs=0.6)
    assert go("generate", "toy.py", new_tokens=1)[1]["rows"][0]["decode_tokens_per_second"] is None


def test_the_first_token_comes_after_the_prompt_and_before_the_others(go, monkeypatch):
    ticks, feed = [], GPT.feed
    monkeypatch.setattr(GPT, "feed", lambda net, ids_BT, *args, **kwargs: ticks.append(ids_BT.shape[1]) or feed(net, ids_BT, *args, **kwargs))
    monkeypatch.setattr(bench, "clock", lambda device: float(len(ticks)))                 # one second per pass
    row = go("generate", "toy.py", prompt_tokens=5, new_tokens=7, repeats=1)[1]["rows"][0]
    assert (row["ms"], row["first_token_ms"], row["decode_ms"]) == (7000, 1000, 6000)


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


def test_a_speed_up_comes_apart_into_fewer_steps_a_smaller_cache_and_batching(go, tmp_path, monkeypatch):
    """One line more in a config file for each cause, side by side with a base of as many FLOPs and one of as many parameters."""
    base, caches, feed = Path("toy.py").read_text(), [], GPT.feed
    for name, line in {"shallow": "depth = 2", "small": 'cache = "mean"', "batched": "batch_size = 16"}.items():
        Path(f"{name}.py").write_text("\n".join([*(old for old in base.splitlines() if old.split(" =")[0] != line.split(" =")[0]), line]))
    monkeypatch.setattr(GPT, "feed", lambda net, ids_BT, cache, *rest: caches.append(type(cache).__name__) or feed(net, ids_BT, cache, *rest))
    (head, *_), record, _ = go("generate", "toy.py", "shallow.py", "small.py", "batched.py", repeats=1)
    rows, cfg = {row["name"]: row for row in record["rows"]}, config_of("toy.py")
    assert "shallow 1+1x4+1 (depth 2, cache full), small 1+1x4+1 (depth 4, cache mean)" in head and "CompressedCache" in caches
    assert rows["shallow cached"]["flops_ratio"] < rows["small cached"]["flops_ratio"] == 1 and rows["batched cached"]["flops_ratio"] == 4
    assert [rows[f"{name} cached"]["batch_size"] for name in ("toy", "batched")] == [4, 16]
    same = go("counts", "toy.py", "dense.py")[1]["rows"]
    assert same[0]["blocks executed"] == cfg.executed_blocks() and same[1]["blocks owned"] == 2


# ---------------------------------------------------------------------------------------------------------------- steps

ROUTED = dict(update="replace", router="expert", n_recur=3, depth_sampling="fixed", new_tokens=9)
MODELS = {"expert": {}, "shared": dict(kv="share"), "aux": dict(aux_router=True), "mlp": dict(router_kind="mlp"), "gated": dict(update="gate"),
          "token": dict(router="token"), "biased": dict(router="token", router_balance="bias"), "bold": dict(threshold=0.0)}


def routed(**changes):
    return tiny(**{"n_prelude": 1, "n_recur": 3, "n_coda": 1, "router": "expert", **changes})


@pytest.mark.parametrize("name", MODELS)
def test_tokens_take_the_steps_that_are_imposed_and_the_routers_are_asked_all_the_same(name, monkeypatch):
    cfg, asked, forward = routed(**MODELS[name]), [], RouterUnit.forward
    monkeypatch.setattr(RouterUnit, "forward", lambda unit, x: asked.append(x.shape[0] * x.shape[1]) or forward(unit, x))
    model = GPT(cfg).eval()
    if cfg.router == "token":
        model.recursion.router.bias_R[0] = 0.9 * (cfg.router_balance == "bias")     # a balancing bias does not overrule the script
    script = bench.impose(model)
    for rule in (bench.on_average(1.75, 3), lambda row, i: 1 + (row + 2 * i) % 3):
        asked.clear()
        script.begin(rule, 3)
        taken = [[], [], []]
        for _ in stream(model, some_ids(3, 4).tolist(), 8, temperature=0, threshold=0.5, taken=taken):
            pass
        assert taken == [[rule(row, i) for i in range(11)] for row in range(3)]
        assert len(asked) >= (8 if cfg.router == "token" else 8 * 2) and asked[0] == 12


@pytest.mark.parametrize("mean", [1, 1.5, 2, 2.75, 3])
def test_imposed_steps_are_whole_average_to_the_mean_and_stop_at_different_rows(mean):
    rule = bench.on_average(mean, 4)
    taken = [[rule(row, i) for i in range(40)] for row in range(4)]
    assert {sum(row) / 40 for row in taken} == {mean} and {n for row in taken for n in row} <= {math.floor(mean), math.ceil(mean)}
    assert any(len(set(tick)) > 1 for tick in zip(*taken)) == (mean != int(mean))


def test_only_rows_that_go_on_are_in_a_step():
    model = GPT(routed(n_prelude=0, n_coda=0)).eval()
    script, rule, rows = bench.impose(model), lambda row, i: 1 + (row + i) % 3, []
    script.begin(rule, 4)
    model.recursion.core[0].register_forward_hook(lambda block, args, out: rows.append(len(out)))
    for _ in stream(model, some_ids(4, 1).tolist(), 7, temperature=0, threshold=0.5):
        pass
    assert rows == [n for i in range(7) for n in bench.rows_in_steps([rule(row, i) for row in range(4)])]


def test_a_step_of_some_rows_counts_as_a_pass_of_the_core_with_so_many():
    assert bench.rows_in_steps([3, 1, 2, 2]) == [4, 3, 1] and bench.rows_in_steps([1, 1]) == [2]
    assert bench.mean_passes([[1, 3], [1, 1]], {2: 4.0, 1: 3.0}) == (1 + (1 + 2 * 3 / 4)) / 2


def test_the_line_through_the_mean_depths_is_found_and_stands_beside_the_core():
    rows = [{"passes": x, "ms": 2.0 + 3.0 * x} for x in (1, 1.5, 2, 2.5, 3)]
    found = bench.fit(rows, {1: 2.5}, 3)
    assert [found[name] for name in ("a_ms", "b_ms", "r2", "core_ms", "b_over_core")] == pytest.approx([2, 3, 1, 2.5, 1.2])
    found = bench.fit([*rows, {"passes": 1.5, "ms": 5.0 + 2 * 4.0}], {4: 3.0, 2: 2.9, 1: 2.0}, 3)
    assert [found[name] for name in ("b_over_core", "lone_ms", "lone_core_ms", "lone_over_core")] == pytest.approx([1, 4, 2, 2])
    rows[2]["ms"] += 4
    assert bench.fit(rows, {1: 3.0}, 3)["r2"] < 0.9


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_shows_a_line_for_each_imposed_depth_and_for_the_core(go, tmp_path, rows):
    make_config(tmp_path, **ROUTED, threshold=0.0)                       # by itself nobody would stop
    lines, record, _ = go("steps", "toy.py", batch_size=rows, prompt_tokens=3, new_tokens=9)
    names = [f"toy at {x}" for x in ("1", "1.5", "2", "2.5", "3")] + ["toy at 3 in one row, else 1"] * (rows > 1)
    plain = [f"toy without router, {n} of {rows} rows at {depth}" for n in (rows, *range(rows - 1, 0, -1)) for depth in (1, 3)]
    assert lines[0].startswith(f"steps: toy 1+1x3+1 ({rows} rows, 3 prompt and 9 new tokens)")
    assert [row["name"] for row in record["rows"]] == names + plain == [re.split(r"  +", line)[0] for line in lines[2 : 2 + len(names + plain)]]
    assert [row["steps"] for row in record["rows"]] == [1, 1.5, 2, 2.5, 3] + [(3 + 2) / 3] * (rows > 1) + [1, 3] * rows
    assert [row["passes"] for row in record["rows"]][: 5 : 4] == pytest.approx([1, 3]) and all(row["ms"] > 0 for row in record["rows"])
    fit = record["fits"]["toy"]
    assert set(fit) == {"a_ms", "b_ms", "r2", "core_ms", "b_over_core"} | ({"lone_ms", "lone_core_ms", "lone_over_core"} if rows > 1 else set())
    assert f"ms per token = {fit['a_ms']:.3f} + " in lines[-1 - (rows > 1)] and (rows == 1 or f"ratio {fit['lone_over_core']:.3f}" in lines[-1])


@pytest.mark.slow
def test_what_is_timed_is_decoding_alone_and_a_pass_is_one_step_more(go, tmp_path, monkeypatch):
    """A clock that ticks once for every row in a call of a block."""
    make_config(tmp_path, **ROUTED, n_core=2)
    calls, forward = [], model.Block.forward
    monkeypatch.setattr(model.Block, "forward", lambda block, x, *rest: calls.append(x.shape) or forward(block, x, *rest))
    monkeypatch.setattr(bench, "clock", lambda device: float(sum(B for B, _, _ in calls)))
    record = go("steps", "toy.py", batch_size=1, prompt_tokens=5, new_tokens=9)[1]
    assert [row["ms"] for row in record["rows"]] == [1e3 * (2 + 2 * steps) for steps in (1, 1.5, 2, 2.5, 3, 1, 3)]
    fit = record["fits"]["toy"]
    assert (fit["a_ms"], fit["b_ms"], fit["r2"], fit["b_over_core"]) == pytest.approx((2000, 2000, 1, 1))
    record = go("steps", "toy.py", batch_size=3, prompt_tokens=5, new_tokens=9)[1]
    assert [row["ms"] for row in record["rows"][6:]] == [1e3 * n * (2 + 2 * steps) for n in (3, 2, 1) for steps in (1, 3)]
    fit = record["fits"]["toy"]
    assert (fit["core_ms"], fit["lone_core_ms"], fit["lone_over_core"]) == pytest.approx((6000, 2000, 1))


@pytest.mark.parametrize("changes, words", [
    (dict(router="none"), "has no router"), (dict(n_recur=1), "has no router"), (dict(depth=2), "cannot be cut to depth=2"), (dict(cache="mean"), "cache='mean'"),
    (dict(new_tokens=1), "new_tokens of at least 2"), (dict(new_tokens=33), "together they may be 33"), (dict(router_choice="random"), "chooses by lot"),
    (dict(capacity=[1.0, 1.0, 0.5]), "the first must be 1"), (dict(capacity=[0.9, 0.5, 0.2]), "the first must be 1")], ids=str)
def test_what_cannot_be_imposed_is_one_line(go, tmp_path, changes, words):
    make_config(tmp_path, **{**ROUTED, **changes})
    message = refusal(bench.main, ["steps", "toy.py"])
    assert words in message


# --------------------------------------------------------------------------------------------------------------- decode

def test_decode_gives_latency_and_rates_of_a_batch_and_the_memory_below(go):
    lines, record, _ = go("decode", "toy.py", "dense.py", prompt_tokens=10, new_tokens=7)
    assert lines[0].startswith("decode: toy 1+1x4+1 (batch 4, 10 prompt and 7 new tokens, depth 4, cache full), dense 0+2x1+0 (batch 4")
    assert [row["name"] for row in record["rows"]] == ["toy eager", "dense eager"] and record["compiled"] is False
    for line, row in zip(lines[2:4], record["rows"]):
        assert numbers(line)[:3] == [4, 10, 7] and row["ms"] > 0 and row["peak_bytes"] > 0 and row["setup_seconds"] > 0 and row["first_seconds"] > 0
        assert row["decode_tokens_per_second"] == pytest.approx(4 / row["ms"] * 1e3)
        assert row["prefill_tokens_per_second"] == pytest.approx(4 * 10 / row["first_token_ms"] * 1e3)
    toy, dense = config_of("toy.py"), config_of("dense.py")             # tokens at 10 to 15 see 13 keys on average, as the rule of halves counts 26
    assert record["rows"][1]["flops_ratio"] == pytest.approx(dense.flops_per_token(26) / toy.flops_per_token(26))
    assert record["rows"][1]["time_over_flops"] == pytest.approx(record["rows"][1]["time_ratio"] / record["rows"][1]["flops_ratio"])
    assert len(lines) == 4 + 2 + 2 * (4 + 1) and [row["name"] for row in record["memory"]][-1] == "dense, cache full"


def test_decode_counts_no_flops_where_a_router_of_random_weights_says_how_far_tokens_go(go, tmp_path):
    os.rename("toy.py", "gated.py")
    make_config(tmp_path, **ROUTED)
    lines, record, _ = go("decode", "gated.py", "toy.py", "dense.py", prompt_tokens=4)
    assert [row["flops_ratio"] is None for row in record["rows"]] == [False, True, False] and record["rows"][1]["time_over_flops"] is None
    assert numbers(lines[3])[-3] > 0 and numbers(lines[3])[-2:] == [None, None]
    assert [row["flops_ratio"] for row in go("decode", "toy.py", "dense.py", prompt_tokens=4)[1]["rows"]] == [None, None]


def test_decode_times_the_tokens_after_the_first(go, monkeypatch):
    ticks, feed = [], GPT.feed
    monkeypatch.setattr(GPT, "feed", lambda net, ids_BT, *args, **kwargs: ticks.append(ids_BT.shape[1]) or feed(net, ids_BT, *args, **kwargs))
    monkeypatch.setattr(bench, "clock", lambda device: float(sum(ticks)))                 # a second for each token that is read
    row, same = go("decode", "toy.py", "toy.py", prompt_tokens=10, new_tokens=7, repeats=3)[1]["rows"]
    assert (row["first_token_ms"], row["ms"], row["spread_ms"]) == (10_000, 1000, 0) and same["time_ratio"] == 1


def test_decode_compares_compiled_rows_with_the_first_compiled_one(go, monkeypatch):
    parts = []
    monkeypatch.setattr(bench, "want_compile", lambda choice, device: True)
    monkeypatch.setattr(bench, "compile_parts", lambda model, **options: parts.append((model.cfg.layout, options)))
    monkeypatch.setattr(bench, "interleave", lambda runs, *rest: ({name: [(took, 1.0)] for name, took in zip(runs, (7.0, 4.0, 13.0, 10.0))}, dict.fromkeys(runs, 1.0)))
    record = go("decode", "toy.py", "dense.py", prompt_tokens=2)[1]
    assert [row["name"] for row in record["rows"]] == ["toy eager", "toy compiled", "dense eager", "dense compiled"] and record["compiled"] is True
    assert [row["time_ratio"] for row in record["rows"]] == [1, 1, 2, 3] and [row["peak_bytes"] is None for row in record["rows"]] == [False, True] * 2
    assert parts == [(layout, {"dynamic": True}) for layout in ("1+1x4+1", "0+2x1+0")]


def test_decode_without_a_compiler_says_so_and_shows_eager_rows(go, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError
    monkeypatch.setattr(torch, "compile", no_compiler)
    _, record, err = go("decode", "toy.py", prompt_tokens=2, compile="true")
    assert [row["name"] for row in record["rows"]] == ["toy eager"] and err.count("torch.compile does not work here") == 1


def test_decode_memory_is_what_serving_would_allocate(go):
    record = go("decode", "toy.py", "dense.py", prompt_tokens=10, new_tokens=6, repeats=1)[1]
    toy = config_of("toy.py")
    model = GPT(toy)
    for row in record["memory"][:8]:
        cache = row["name"].split()[-1]
        assert row["kv_bytes"] == Shelves(model, row["rows"], 16, row["rows"], 4, None, cache).nbytes() == toy.kv_bytes(16, row["rows"], torch.float32, cache)
        assert row["weights_bytes"] == 4 * toy.n_params() and row["total_bytes"] == row["weights_bytes"] + row["kv_bytes"]
    assert [row["rows"] for row in record["memory"]] == [1] * 4 + [32] * 4 + [1, 32] and record["memory"][0]["ratio"] == record["memory"][4]["ratio"] == 1
    assert record["memory"][-1]["ratio"] == record["memory"][-1]["total_bytes"] / record["memory"][4]["total_bytes"]
    assert bench.allocated(toy, 2, 17, "bfloat16") == 2 * (2 + 4) * 2 * 32 * 16 * 2       # windows are cut by 16 places


def test_decode_memory_of_grt_medium_is_the_published_ratio(monkeypatch, capsys):
    files = [str(bench.file_of(name)) for name in ("gpt2_medium", "grt_medium")]
    mode, all_settings = bench.settings_of(["decode", *files, "--paper=true"])
    s = all_settings["grt_medium"]
    assert (mode, s.batch_size, s.prompt_tokens, s.new_tokens, s.block_size, s.vocab_size) == ("decode", 4, 1024, 128, 1152, 50304)
    cfgs = {name: one.build(GPTConfig, vocab_size=one.vocab_size) for name, one in all_settings.items()}
    rows = {(row["name"], row["rows"]): row for row in bench.show_memory(all_settings, cfgs, "float32")}
    mean = rows["grt_medium, cache mean", 32]
    assert mean["kv_bytes"] == mean["kv_bytes_by_formula"] and 0.39 < mean["ratio"] < 0.395 and "1,024 tokens a row, bfloat16" in capsys.readouterr().out


def test_decode_against_the_context_reads_a_filled_cache_and_draws_a_line(go, monkeypatch):
    fed, feed = [], GPT.feed
    monkeypatch.setattr(GPT, "feed", lambda net, ids_BT, cache, *rest, **more: fed.append((ids_BT.shape[1], cache.length_B[0])) or feed(net, ids_BT, cache, *rest, **more))
    monkeypatch.setattr(bench, "clock", lambda device: float(sum(start + 1 for n, start in fed if n == 1)))             # a second for each key
    lines, record, err = go("decode", "toy.py", contexts="64,8", new_tokens=3)            # beyond block_size, which is 32
    assert fed == [(8, 0), (64, 0), *[(1, start + i) for _ in range(3) for start in (8, 64) for i in range(3)]]
    assert [(row["name"], row["context"], row["ms"]) for row in record["rows"]] == [("toy at 8", 8, 10_000), ("toy at 64", 64, 66_000)]
    fit = record["fits"]["toy"]
    assert (fit["a_ms"], fit["b_ms"], fit["r2"]) == pytest.approx((2000, 1000, 1)) and "8 times the context, 6.60 times the time; it grows as a line" in lines[-1]
    assert record["picture"] == "out/bench/decode.png" and Path(record["picture"]).read_bytes()[:4] == b"\x89PNG" and "picture: out/bench/decode.png" in err


def test_the_queue_of_a_bare_serve_is_long_enough_for_each_of_its_rows():
    """Blocks of eight features: how many tokens come in the steady state is a matter of lengths and rows."""
    all_settings = bench.settings_of(["serve", "--n_embd=8", "--n_head=1", "--n_core=1", "--vocab_size=16"])[1]
    s = all_settings["vanilla_14"]
    cfgs = {name: one.build(GPTConfig, vocab_size=16) for name, one in all_settings.items()}
    lengths = bench.queue_of(s, cfgs, s.requests)
    plans, _ = bench.plans_of(cfgs, lengths, s, "float32")
    for plan in [plan for plan in plans if plan.slots == max(plan.slots for plan in plans)]:
        run = bench.serving(GPT(cfgs[plan.config]), plan, lengths, s, CPU)
        through(run.step())
        assert bench.between(*through(run.step())[1:3])[1] > 4 * plan.slots


@pytest.mark.parametrize("mode, files", [("decode", ["gpt_12", "grt_12"]), ("serve", ["vanilla_14", "mor3_14"])])
def test_a_mode_without_configs_has_its_own(mode, files):
    assert list(bench.settings_of([mode])[1]) == files
    for paper in (False, True):
        assert all(bench.file_of(name).is_file() for name in bench.FILES[mode, paper])
    assert mode == "decode" or [bench.settings_of([mode, f"--paper={paper}"])[1][files[0] if not paper else "vanilla_360m"].unwritten for paper in (False, True)] == [False, True]


def test_what_a_mode_is_shaped_to_yields_to_flags_and_to_a_files_own_measuring_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_config(tmp_path, new_tokens=9, batch_size=7)
    s = bench.settings_of(["decode", "toy.py", "--prompt_tokens=5"])[1]["toy"]
    assert (s.prompt_tokens, s.new_tokens, s.batch_size) == (5, 9, 4)   # 7 rows are those of a training step
    assert bench.settings_of(["decode", "toy.py", "--batch_size=6"])[1]["toy"].batch_size == 6


# ---------------------------------------------------------------------------------------------------------------- serve

SERVED = dict(slots=3, requests=18, length_mean=5, length_std=1, warmup=2, unwritten=True)


@pytest.fixture
def mor(tmp_path, go):
    """toy.py is a routed model of three steps; dense.py stays."""
    make_config(tmp_path, **{name: value for name, value in ROUTED.items() if name != "new_tokens"})


def dense_of(**changes):
    return GPT(tiny(**{"n_core": 2, **changes})).eval()


def test_serve_shows_the_baseline_and_each_way_to_serve_depth_wise(go, mor):
    lines, record, _ = go("serve", "dense.py", "toy.py", repeats=1, **SERVED)
    rows, N = record["rows"], 3
    fits = record["fits"]["toy"]
    assert [(row["config"], row["kind"]) for row in rows] == [("dense", "baseline")] * len({3, 5, fits, 8}) + [("toy", kind) for kind in ("a", "long", "b", "c", "d")]
    assert [row["in_flight"] for row in rows] == [*[3, *sorted({5, fits, 8} - {3})], 3, 3, 3 + math.ceil(2 * 3 / (N + 1)), fits, 3 + math.ceil(2 * 3 / (N + 1)) + 3]
    assert "exits balanced: imposed" in lines[0] and "18 requests" in lines[0] and lines[2].startswith("dense, 3 in flight")
    by = {row["kind"]: row for row in rows[::-1]}
    assert by["baseline"]["ratio"] == by["baseline"]["share"] == by["baseline"]["ceiling"] == 1 and by["b"]["core_mean"] <= 3 < by["b"]["in_flight"]
    for row in rows:
        assert row["ratio"] > 0 and row["share"] == pytest.approx(row["ratio"] / row["ceiling"]) and row["ratio_same"] > 0
        assert row["whole_tokens_per_second"] > 0 and row["unwritten_per_second"] > 0 and row["kv_bytes"] > 0
    assert by["long"]["kv_bytes"] >= by["a"]["kv_bytes"] and by["long"]["flops_per_token"] > by["a"]["flops_per_token"]
    gains = record["gains"]["toy"]
    steps, windows, both, core, passes, fit = gains.values()
    assert both is None and steps * windows * core * passes == pytest.approx(by["d"]["ratio"]) and steps * windows * fit == pytest.approx(by["c"]["ratio"])
    assert by["d"]["finish_mean"] > by["b"]["finish_mean"]
    _, record, _ = go("serve", "dense.py", "toy.py", **SERVED, repeats=1, rows=["d"])
    assert [(row["kind"], row["in_flight"]) for row in record["rows"]] == [("baseline", 3), ("baseline", 8), ("d", 8)]
    assert f"holds {fits} requests" in lines[-1] and "(3 x 2N/(N+1) is 4)" in lines[-1]


def test_windows_as_long_as_the_text_are_not_cut_to_what_a_step_takes():
    model, s = GPT(routed(block_size=64)).eval(), bench.settings_of(["serve"])[1]["vanilla_14"]
    a, long = (bench.serving(model, bench.Plan("toy", 2, kind, options), [60], s, CPU).facts["kv_bytes"] for kind, options in (("a", {}), ("long", {"by_arrival": False})))
    entry = 2 * 16 * 4                                                  # of a place: K and V of 16 features
    assert (a, long) == tuple(2 * entry * (2 * 64 + 2 * core) for core in (64 + 48 + 32, 3 * 64))


def test_serve_keeps_32_core_rows_full_with_as_many_more_in_flight_as_are_outside_the_core():
    cfgs = {name: config.build(GPTConfig, vocab_size=320) for name, config in bench.settings_of(["serve", *(str(bench.file_of(f"bench/{name}")) for name in (
        "vanilla_32", "mor2_32", "mor3_32", "vanilla_34", "mor4_34"))])[1].items()}
    s = bench.settings_of(["serve"])[1]["vanilla_14"]
    assert {name: bench.with_full_core(cfg, s) for name, cfg in cfgs.items() if cfg.n_recur > 1} == {"mor2_32": 54, "mor3_32": 48, "mor4_34": 45}
    assert bench.baselines_of(cfgs) == {"mor2_32": "vanilla_32", "mor3_32": "vanilla_32", "mor4_34": "vanilla_34"}
    plans, fits = bench.plans_of(cfgs, [256], s, "float32")             # prelude and coda keep every token: a little below 42, 48, 51
    assert fits == {"mor2_32": 41, "mor3_32": 45, "mor4_34": 49}
    assert [plan.slots for plan in plans if plan.config == "vanilla_34"] == [32, 45, 49, 77]
    for name, n in fits.items():
        base = bench.allocated(cfgs[bench.baselines_of(cfgs)[name]], 32, 256, "float32")
        assert bench.allocated(cfgs[name], n, 256, "float32") <= base < bench.allocated(cfgs[name], n + 1, 256, "float32")


@pytest.mark.parametrize("changes", [{}, dict(update="gate", n_recur=3, n_prelude=1, n_coda=1), dict(kv="share", n_recur=2, n_prelude=1),
                                     dict(block="llama", n_kv_head=2)], ids=str)
def test_serve_counts_the_flops_of_what_was_served_as_exact_does(changes):
    model = dense_of(**changes)
    engine = Engine(model, 1, depthwise=False)
    engine.submit([0], 9)
    for _ in engine.run():
        pass
    assert bench.served_flops(model.cfg, engine.counts) == pytest.approx(9 * model.cfg.flops_per_token(10), rel=1e-12)   # token i sees i + 1 keys, 5 on average


def test_serve_counts_the_flops_of_balanced_exits():
    """Nine tokens, three of each depth: by hand."""
    cfg = routed()
    engine = Engine(GPT(cfg), 1, steps=bench.balanced(cfg))
    engine.submit([0], 9)
    for _ in engine.run():
        pass
    taken = [1 + i % 3 for i in range(9)]
    keys = [sum(range(1, sum(n > step for n in taken) + 1)) for step in range(3)]         # the n-th to arrive at a step sees n
    core = cfg.n_core * (sum(taken) * block_flops(cfg, 0) + 4 * cfg.n_embd * sum(keys))
    outer = 9 * (2 * block_flops(cfg, 0) + 2 * cfg.vocab_size * cfg.n_embd) + 4 * cfg.n_embd * 2 * 45
    routers = 2 * cfg.n_embd * (9 + 3 * sum(taken))                     # at the start one, after a step of rows at different depths all three
    assert bench.served_flops(cfg, engine.counts) == core + outer + routers


RECOUNTED = {"dense": tiny(), "groups": tiny(block="llama", n_kv_head=2), "gate": tiny(update="gate", n_recur=3, n_prelude=1, n_coda=1), "inject": tiny(update="inject", n_recur=2),
             "expert": routed(), "four": routed(n_recur=4), "mlp": routed(router_kind="mlp"), "aux": routed(aux_router=True), "token": routed(router="token"), "shared": routed(kv="share"),
             "keys": routed(kv="share_k"), "gated": routed(update="gate"), "llama": routed(block="llama", n_kv_head=1)}


@pytest.mark.parametrize("name", RECOUNTED)
def test_serve_counts_the_flops_of_every_matrix_product_that_is_run(name):
    """Recounted operation by operation: rows at steps of their own, and attention to as many keys as there are."""
    cfg = RECOUNTED[name]
    engine = Engine(GPT(cfg), 4, core_rows=3, finish_rows=2, steps=bench.balanced(cfg) if cfg.router != "none" else None)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        through(bench.serve_queue(engine, [7, 1, 9, 4, 6, 2, 8], 1, CPU))
    assert counter.get_total_flops() == bench.served_flops(cfg, engine.counts)


@pytest.mark.parametrize("name", RECOUNTED)
def test_serve_shows_the_bytes_of_keys_and_values_that_are_allocated(name):
    """Recounted by storage: making an engine makes nothing else."""
    model, s = GPT(RECOUNTED[name]).eval(), bench.settings_of(["serve"])[1]["vanilla_14"]
    shown = bench.serving(model, bench.Plan(name, 3, "baseline" if model.cfg.router == "none" else "a"), [20, 9], s, CPU).facts["kv_bytes"]
    with bench.Live([]) as live:
        Engine(model, 3, n_places=20)
    assert shown == live.peak == bench.allocated(model.cfg, 3, 20, "float32")


def test_balanced_exits_give_each_number_of_steps_once_in_a_row_and_shift_with_the_request():
    rule = bench.balanced(routed(n_recur=4))
    for number in range(5):
        steps = [rule(number, position) for position in range(12)]
        assert all(sorted(steps[i : i + 4]) == [1, 2, 3, 4] for i in range(9)) and steps[0] == 1 + number % 4


def test_serve_takes_time_between_the_warm_up_and_the_end_of_the_queue(monkeypatch):
    engine, seen = Engine(dense_of(), 2), []
    tick = engine.tick
    engine.tick = lambda: seen.append(tick()) or seen[-1]
    monkeypatch.setattr(bench, "clock", lambda device: float(len(seen)))
    marks = through(bench.serve_queue(engine, [4] * 6, 5, CPU))
    written = lambda n: sum(map(len, seen[:n]))
    times, tokens = [int(mark[0]) for mark in marks], [mark[1] for mark in marks]
    assert tokens == [written(n) for n in times] and times[0] == 0 and times[3] == len(seen) and tokens[3] == 24
    assert tokens[1] >= 5 > written(times[1] - 1)
    assert 16 <= tokens[2] < 24                                         # the last two have begun, the four before are done
    assert marks[3][2]["finish_rows"] == 24 and bench.between(marks[1], marks[2])[2]["finish_rows"] == tokens[2] - tokens[1]


def test_serve_without_writes_makes_keys_and_values_and_stores_none():
    model, made = dense_of(), []
    model.recursion.core[0].attention.key.register_forward_hook(lambda *args: made.append(args))
    write, run = Seat.write, []
    for context in (bench.without_writes, contextlib.nullcontext):
        with context():
            engine = Engine(model, 1)
            engine.submit([0], 5)
            text = [token for _, token in engine.run()]
        run.append((len(made), len(text), engine.shelves.spaces["core"].stores[0].abs().sum().item() > 0))
    assert run == [(5, 5, False), (10, 5, True)] and Seat.write is write


def test_serve_leaves_writes_out_of_runs_of_their_own_and_not_of_the_others(go, monkeypatch):
    written, write = [], Seat.write
    monkeypatch.setattr(Seat, "write", lambda *args: written.append(1) or write(*args))
    inside = bench.without_writes
    quiet = []

    @contextlib.contextmanager
    def watched():
        before = len(written)
        with inside():
            yield
        quiet.append(len(written) - before)
    monkeypatch.setattr(bench, "without_writes", watched)
    row, = go("serve", "dense.py", repeats=1, **SERVED)[1]["rows"]
    ticks = row["counts"]["finish_calls"]
    assert quiet and not any(quiet) and len(written) > 2 * ticks           # of two blocks each tick


def test_serve_with_learned_exits_asks_the_routers_and_has_no_run_without_writes(go, mor):
    lines, record, _ = go("serve", "dense.py", "toy.py", exits="learned", threshold=1.0, repeats=1, **SERVED)           # nobody goes on
    routed_rows = [row for row in record["rows"] if row["config"] == "toy"]
    assert "exits by the routers, whose weights are random" in lines[0] and all(row["unwritten_per_second"] is None for row in routed_rows)
    assert {row["counts"]["core_rows"] - row["counts"]["finish_rows"] in range(-6, 7) for row in routed_rows} == {True}      # one step for each token
    assert record["rows"][0]["unwritten_per_second"] > 0 and numbers(lines[-3])[11:13] == [None, None]


def test_serve_with_learned_exits_has_no_row_whose_texts_are_others(go, mor):
    lines, record, _ = go("serve", "dense.py", "toy.py", exits="learned", repeats=1, **SERVED)
    gains = record["gains"]["toy"]
    assert [row["kind"] for row in record["rows"] if row["config"] == "toy"] == ["a", "b", "c", "d"] and gains["fewer steps"] is gains["smaller windows"] is None
    assert gains["fewer steps and smaller windows"] == next(row["ratio"] for row in record["rows"] if row["kind"] == "a") and "toy: fewer steps and smaller windows" in lines[-1]
    lines, record, _ = go("serve", "dense.py", "toy.py", rows=["b"], repeats=1, **SERVED)
    assert lines[-1].startswith("toy: the K/V memory of dense at 3 holds")              # nothing to tell apart


def test_serve_begins_every_request_with_another_token(go, mor, monkeypatch):
    begun, submit = [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda engine, prompt, n, **how: begun.append(prompt) or submit(engine, prompt, n, **how))
    go("serve", "dense.py", **{**SERVED, "repeats": 1, "unwritten": False})
    assert begun == [[i] for i in [*range(3), *range(18)]] and bench.first_token(70, tiny(vocab_size=64)) == [6]


def test_serve_gives_up_a_queue_that_is_too_short_in_the_first_repeat(go, mor, monkeypatch):
    served, serve = [], bench.serve_queue
    monkeypatch.setattr(bench, "serve_queue", lambda engine, lengths, *rest: served.append(len(lengths)) or serve(engine, lengths, *rest))
    short = {**SERVED, "requests": 8, "repeats": 5}                     # enough for three at a time, and not for eight
    assert len(go("serve", "dense.py", **short)[1]["rows"]) == 1 and served.count(8) == 10
    served.clear()
    message = refusal(bench.main, ["serve", "dense.py", "toy.py", *flags(vocab_size=64, **short)])
    assert "requests=8 are too few for a steady state of dense, 8 in flight: 0 tokens come between" in message and served.count(8) <= 22


def test_serve_counts_the_steps_of_the_core_per_token(go, mor):
    lines, record, _ = go("serve", "dense.py", "toy.py", repeats=1, rows="b", **{**SERVED, "unwritten": False, "requests": 40})
    assert [row["steps"] for row in record["rows"]] == pytest.approx([1 if row["config"] == "dense" else 2 for row in record["rows"]], rel=0.05)
    assert [round(row["steps"], 2) for row in record["rows"]] == [numbers(line)[3] for line in lines[2 : 2 + len(record["rows"])]]


def test_serve_takes_turns_with_and_without_writes_and_gives_medians_of_pairs(go, mor, monkeypatch):
    turns, interleave = [], bench.interleave

    def watched(runs, repeats, device):
        turns.append(list(runs))
        return interleave(runs, repeats, device)
    monkeypatch.setattr(bench, "interleave", watched)
    _, record, _ = go("serve", "dense.py", "toy.py", rows="a", repeats=3, **SERVED)
    titles = ["dense, 3 in flight", "toy, a: 3 in flight"]
    dense, toy = record["rows"]
    assert turns == [[*titles, *(f"{title}, unwritten" for title in titles)]] and toy["setup_seconds"] > 0 and toy["first_seconds"] > 0
    assert toy["unwritten_per_second"] == sorted(toy["unwritten_rates"])[1] and toy["steady_seconds"] == pytest.approx(toy["steady_tokens"] / toy["tokens_per_second"])
    assert toy["unwritten_ratio"] == sorted(a / b for a, b in zip(toy["unwritten_rates"], dense["unwritten_rates"]))[1]
    without = go("serve", "dense.py", "toy.py", rows="a", **{**SERVED, "repeats": 1, "unwritten": False})[1]["rows"]
    assert len(turns[1]) == 2 and [row["unwritten_per_second"] for row in without] == [row["unwritten_ratio"] for row in without] == [None, None]


def test_serve_puts_a_run_beside_a_dense_model_of_its_shape(tmp_path, monkeypatch, capsys):
    model = GPT(routed()).eval()
    monkeypatch.setattr(bench, "load_run", lambda run, device: (model, SimpleNamespace(eot_token=7), {"folder": Path(run)}))
    begun, submit = set(), Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda engine, prompt, n, **how: begun.add((*prompt, how["temperature"], how["seed"])) or submit(engine, prompt, n, **how))
    bench.main(["serve", *flags(run="out/mine", exits="learned", repeats=1, **SERVED)])
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert list(dict.fromkeys(row["config"] for row in record["rows"])) == ["dense 0+8x1+0", "mine"] and lines[0].startswith("serve: dense 0+8x1+0 0+8x1+0, mine 1+2x3+1")
    assert "exits by the routers;" in lines[0] and "drawn after end-of-text" in lines[0] and begun == {(7, 1.0, i) for i in range(18)}          # texts that differ
    model.cfg = tiny()
    make_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "has no router" in refusal(bench.main, ["serve", "--run=out/mine"])
    assert "leave out toy.py --n_embd --against" in refusal(bench.main, ["serve", "toy.py", "--run=out/mine", "--n_embd=8", "--against=transformers"])


def test_serve_against_the_number_in_flight_fits_the_time_of_a_round_and_draws_it(go, mor, monkeypatch):
    ticks, tick = [], Engine.tick
    monkeypatch.setattr(Engine, "tick", lambda engine: ticks.append(2 + engine.slots) or tick(engine))
    monkeypatch.setattr(bench, "clock", lambda device: float(sum(ticks)))                 # a tick takes 2 + B seconds, and a token of a dense model 2 ticks
    served, serve = [], bench.serve_queue
    monkeypatch.setattr(bench, "serve_queue", lambda engine, lengths, *rest: served.append((engine.depthwise, engine.slots, len(lengths))) or serve(engine, lengths, *rest))
    lines, record, _ = go("serve", "dense.py", "toy.py", batches="4,1,2", length_mean=20, length_std=0, repeats=1)
    assert [(row["config"], row["in_flight"]) for row in record["rows"]] == [(name, B) for name in ("dense", "toy") for B in (1, 2, 4)]
    assert served[6:] == [(depthwise, B, 4 * B) for depthwise in (False, True) for B in (1, 2, 4)]
    fit = record["fits"]["dense"]
    assert fit["r2"] > 0.99 and fit["b_ms"] == pytest.approx(2000, rel=0.1) and fit["a_ms"] == pytest.approx(4000, rel=0.1)
    assert "4 times the requests" in lines[-2] and Path(record["picture"]).read_bytes()[:4] == b"\x89PNG" and record["picture"] == "out/bench/serve.png"


@pytest.mark.parametrize("argv, words", [
    (["serve", "toy.py", "dense.py"], "toy has a router (router='expert'); name a config without one first"),
    (["serve", "dense.py", "--requests=3"], "too few for a steady state"), (["serve", "dense.py", "--slots=0"], "slots=0"), (["serve", "dense.py", "--batch_size=8"], "serve counts requests in flight: --slots"),
    (["serve", "dense.py", "--exits=lot"], "exits has no choice"),
    (["serve", "dense.py", "--batches=4"], "batches=[4] makes no curve"), (["decode", "dense.py", "--contexts=0,4"], "makes no curve"),
    (["train", "dense.py", "--slots=3"], "goes with mode serve"),
    (["decode", "dense.py", "--new_tokens=1", "--prompt_tokens=2"], "give at least 2"), (["decode", "dense.py", "--prompt_tokens=30"], "do not fit block_size=32"),
    (["decode", "dense.py", "--cache=mean", "--prompt_tokens=2", "--router=expert", "--new_tokens=4"], "cache='mean'"),
    (["serve", "dense.py", "--paper=true", "--contexts=1,2"], "goes with mode decode"),
    (["serve", "dense.py", "toy.py", "--rows=a", "--rows=e"], "rows=['a', 'e'] are not rows"), (["serve", "dense.py", "--rows=[]"], "rows=[] are not rows"), (["serve", "dense.py", "--batches=1,2", "--slots=3"], "slots=3 has no part in a curve over batches"),
    (["serve", "dense.py", "--batches=1,2", "--rows=d"], "no part in a curve over batches"), (["decode", "dense.py", "--contexts=4,8", "--prompt_tokens=3"], "no part in a curve over contexts")])
def test_what_cannot_be_served_or_decoded_is_one_line(go, mor, argv, words):
    assert words in refusal(bench.main, [*argv, "--vocab_size=64"])


# ------------------------------------------------------------------------------------------------- serve --against=transformers

@pytest.mark.parametrize("changes", [dict(block="gpt2"), dict(block="gpt2", bias=True, n_ffn=40), dict(block="llama", n_kv_head=2, rope_theta=500.0)], ids=str)
def test_their_model_with_our_weights_gives_our_logits(transformers, changes):
    model = loud(tiny(**changes))
    ids_BT = some_ids(2, 20)
    with torch.no_grad():
        assert torch.allclose(bench.as_hugging_face(model)(ids_BT).logits, model(ids_BT).logits, atol=1e-4)
    assert bench.first_difference(model, [7, 3, 5], CPU) is None


def test_their_logits_tell_weights_apart_that_write_one_text(transformers, monkeypatch):
    model, copy = GPT(tiny()).eval(), bench.as_hugging_face
    assert bench.logits_apart(model, CPU) < 1e-6
    other = GPT(tiny()).eval()
    other.load_state_dict({name: x * (1.01 if "attention.value" in name else 1) for name, x in model.state_dict().items()})
    monkeypatch.setattr(bench, "as_hugging_face", lambda model: copy(other))
    assert bench.first_difference(model, [6, 6], CPU) is None and bench.logits_apart(model, CPU) > 1e-5


def test_no_id_ends_their_text(transformers):
    torch.manual_seed(0)
    model = GPT(tiny()).eval()                                          # at its start values a model repeats its prompt, and id 0 is their end of text
    with torch.no_grad():
        model.embed.weight[0] *= 5
    net = bench.as_hugging_face(model)
    assert bench.write_batch(net, [[0], [0]], 6, CPU).tolist() == [[0] * 6] * 2 and bench.first_difference(model, [6, 4], CPU) is None
    net.generation_config.eos_token_id = 0                              # or it would
    assert bench.write_batch(net, [[0], [0]], 6, CPU).shape == (2, 1)


def test_a_text_that_differs_is_found(transformers, monkeypatch):
    model, copy = loud(tiny()), bench.as_hugging_face
    monkeypatch.setattr(bench, "as_hugging_face", lambda model: copy(loud(tiny(), seed=1)))
    assert bench.first_difference(model, [6, 6], CPU)[0] == 0
    monkeypatch.setattr(bench, "as_hugging_face", copy)
    assert bench.first_difference(model, [6, 6], CPU) is None
    monkeypatch.setattr(bench, "write_batch", lambda *args: torch.zeros(2, 0))            # or ends too early
    assert bench.first_difference(model, [6, 6], CPU) == (0, 0)


def test_serve_stands_beside_static_batches_of_the_same_lengths(go, mor, transformers, monkeypatch):
    batches, firsts, taken, write, interleave = [], [], {}, bench.write_batch, bench.interleave
    monkeypatch.setattr(bench, "write_batch", lambda net, first_B1, n_new, device: firsts.append(first_B1) or batches.append((len(first_B1), n_new)) or write(
        net, first_B1, n_new, device))
    monkeypatch.setattr(bench, "interleave", lambda *args: taken.update(found := interleave(*args)[0]) or (found, dict.fromkeys(found, 1.0)))
    lines, record, _ = go("serve", "dense.py", "toy.py", against="transformers", repeats=1, **{**SERVED, "requests": 25, "length_std": 2})
    s = bench.settings_of(["serve", "dense.py", *flags(vocab_size=64, **{**SERVED, "requests": 25, "length_std": 2})])[1]["dense"]
    lengths = bench.queue_of(s, {"dense": config_of("dense.py")}, 25)
    static = [(len(batch), max(batch)) for i in range(0, 25, 3) for batch in [lengths[i : i + 3]]]
    assert batches == [(3, 2), *static, (4, max(lengths[:4]))]          # a first one to warm up, the queue, and the texts that are compared
    theirs, mine = record["theirs"]["dense"], record["rows"][0]
    assert theirs["padding_avoided"] == sum(n * longest for n, longest in static) / sum(lengths) > 1 and theirs["differs"] is None
    assert theirs["computed_per_second"] == pytest.approx(theirs["wanted_per_second"] * theirs["padding_avoided"])
    assert sum(firsts[1:-1], []) == [[i] for i in range(25)]            # they begin as ours do
    assert theirs["ours_over_theirs"] == taken["dense, transformers"][0][0] / taken[mine["name"]][0][0]           # all of it
    assert theirs["logits_apart"] < 1e-5
    assert "their first texts are equal" in next(line for line in lines if line.startswith("transformers"))


def test_serve_compares_with_transformers_what_has_a_counterpart(transformers):
    with pytest.raises(ValueError, match="has no counterpart to 0\\+2x3\\+0"):
        bench.as_hugging_face(dense_of(n_recur=3))


# --------------------------------------------------------------------------------------------------------------- counts

def test_a_routed_model_stores_and_reads_what_its_capacities_let_through(go, tmp_path):
    make_config(tmp_path, **ROUTED)
    row, dense = go("counts", "toy.py", "dense.py", seq_len=30)[1]["rows"]
    cfg = config_of("toy.py")
    assert row["K/V entries read per new token"] == cfg.kv_io(30) and dense["K/V entries read per new token"] == 2 * 30
    assert row["K/V bytes per token, cache full"] * 30 == cfg.kv_bytes(30, 1, torch.bfloat16)


def test_counts_are_those_of_the_config_in_every_convention(go):
    (head, names, *table), record, _ = go("counts", "toy.py", "dense.py", depth=3, seq_len=16)
    assert "toy 1+1x4+1 (context 16, vocabulary 64)" in head and names.split() == ["toy", "dense"]
    for row, cfg in zip(record["rows"], (config_of("toy.py"), config_of("dense.py"))):
        assert (row["parameters"], row["parameters without tables"]) == (cfg.n_params(), cfg.n_params(embeddings=False))
        assert (row["blocks executed"], row["blocks owned"]) == (cfg.executed_blocks(3), cfg.n_prelude + cfg.n_core + cfg.n_coda)
        assert {name: row[f"FLOPs per token, {name}"] for name in FLOPS} == {name: cfg.flops_per_token(16, name, 3) for name in FLOPS}
        assert row["K/V bytes per token, cache full"] * 16 == cfg.kv_bytes(16, 1, torch.bfloat16, depth=3)
        assert (row["weights MiB, float32"], row["weights MiB, bfloat16"]) == (cfg.n_params() / 2**18, cfg.n_params() / 2**19)
    toy, dense = record["rows"]
    assert [row["exact FLOPs, ratio to the first"] for row in (toy, dense)] == [1, dense["FLOPs per token, exact"] / toy["FLOPs per token, exact"]]
    assert [toy[f"K/V bytes per token, cache {name}"] for name in ("first", "last", "mean")] == [2 * 3 * 16 * 2] * 3      # no scratch entries
    assert dense["K/V bytes per token, cache last"] is None
    lines = {re.split(r"  +", line)[0]: numbers(line) for line in table}
    assert len(lines) == len(toy) - 1 and set(lines) == set(toy) - {"name"}
    for quantity, cells in lines.items():
        assert [x if x is None else pytest.approx(x, abs=0.6) for x in (toy[quantity], dense[quantity])] == cells


@pytest.mark.slow
def test_counting_allocates_no_model_needs_no_data_and_takes_any_size(go, monkeypatch):
    monkeypatch.setattr(model.GPT, "forward", None)
    record = go("counts", "toy.py", n_embd=4096, n_head=32, n_core=100, vocab_size="None", device="cuda:99", data_dir="nowhere")[1]
    assert record["rows"][0]["parameters"] > 1e10                       # 80 GB of weights
    assert record["rows"][0]["parameters"] - record["rows"][0]["parameters without tables"] == (50304 + 32) * 4096


def published(config, table, quantity, value, unit, ours, agrees, **more):
    return dict(config=config, paper="X", setting=table, system="s", quantity=quantity, value=value, unit=unit, ours=ours, agrees=agrees, **more)


PUBLISHED = {"rows": [
    published("toy", "table 1", "parameters", 1.5, "M", "n_params", False),
    published("toy", "table 2", "validation NLL", 2.5, "nats/token", None, None),
    published("toy", "table 3", "weights", 3, "parameters", "n_params_of_tables", True, vocab_size=100),
    published("other/toy", "table 4", "parameters", 4, "M", "n_params", True),
    published(None, "table 5", "parameters", 5, "M", None, None),
    published("toy", "table 6", "training steps", 6, "steps", "steps_paper", True)]}


def test_counts_stand_beside_the_published_ones_of_the_same_config(go, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    os.rename("toy.py", "config/toy.py")
    monkeypatch.setattr(bench, "HERE", tmp_path)
    assert not any("published" in line for line in go("counts", "config/toy.py")[0])      # no such file: nothing is said
    (tmp_path / "config" / "published.json").write_text(json.dumps(PUBLISHED))
    lines, record, _ = go("counts", "config/toy.py", "dense.py")
    n = config_of("config/toy.py").n_params()
    assert [line for line in lines if line.startswith("  toy")] == [
        f"  toy: parameters (X, table 1) 1.5 M, counted {n / 1e6:.10g}: does not agree",
        "  toy: validation NLL (X, table 2) 2.5 nats/token",
        f"  toy: weights (X, table 3) 3 parameters, counted {(100 + 32) * 16:,}: agrees",
        "  toy: training steps (X, table 6) 6 steps, counted by tests/test_published.py: agrees"]
    assert [row["counted"] for row in record["published"]] == [n / 1e6, None, 132 * 16, None]
    os.rename("config/toy.py", "toy.py")                                # the same name elsewhere is another config
    assert go("counts", "toy.py")[1]["published"] == []


def test_decode_has_a_row_for_the_engine_in_fixed_passes(go):
    _, record, _ = go("decode", "toy.py", prompt_tokens=3, new_tokens=4, repeats=1, fixed=True)
    eager, fixed = record["rows"]
    assert (eager["name"], fixed["name"]) == ("toy eager", "toy fixed") and fixed["ms"] > 0 and 0 < fixed["first_token_ms"]
    assert fixed["time_ratio"] == fixed["flops_ratio"] == 1 and fixed["peak_bytes"] > 0


# ----------------------------------------------------------------------------------------------------------------- on a GPU

SCRIPT = bench.HERE / "config" / "bench" / "gpu.sh"
SMALL = dict(n_embd=16, n_head=2, n_kv_head=1, n_ffn=32, n_core=1, block_size=32, vocab_size=64, repeats=1, device="cpu")
SMALL_OF = {"decode": dict(prompt_tokens=8, new_tokens=4), "serve": dict(slots=2, requests=20, length_mean=5, length_std=1, warmup=1), "train": dict(batch_size=2)}


@pytest.fixture
def gpu_commands(tmp_path):
    """[(name, what python is given)] of gpu.sh, which runs as it stands: python alone is another."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nprintf '%s\\t' \"$@\" >> {tmp_path}/argv; echo >> {tmp_path}/argv; echo a table; echo '{{}}'\n")
    stand_in.chmod(0o755)
    done = subprocess.run(["sh", str(SCRIPT), "results"], cwd=tmp_path, env={**os.environ, "PYTHON": str(stand_in)}, capture_output=True, text=True, timeout=60)
    argvs = [line.split("\t")[:-1] for line in (tmp_path / "argv").read_text().splitlines()]
    files = {path.stem: path.read_text().splitlines() for path in sorted((tmp_path / "results").glob("*.txt"))}
    names = re.findall(r"^try (\w+) ", SCRIPT.read_text(), re.M)
    assert done.returncode == 0 and set(files) == set(names) and done.stdout.count("a table") == len(names) and "{" not in done.stdout, done
    for name, argv in zip(names, argvs):
        assert files[name][0].startswith("commit ") and files[name][0].endswith("python " + " ".join(argv)) and files[name][1:] == ["a table", "{}"]
    return list(zip(names, argvs))


def test_the_script_for_a_gpu_takes_nine_minutes_at_most_and_writes_down_command_and_commit(gpu_commands):
    assert sum(map(int, re.findall(r"^try \w+ (\d+) ", SCRIPT.read_text(), re.M))) <= 9 * 60 and len(gpu_commands) >= 5
    tests = next(argv for _, argv in gpu_commands if argv[:2] == ["-m", "pytest"])
    assert tests[3:5] == ["tests/test_bench.py", "-k"] and sum(tests[5] in name for name in globals() if name.startswith("test_")) >= 2


def test_every_command_of_the_script_for_a_gpu_runs_here_in_small(gpu_commands, monkeypatch, capsys):
    monkeypatch.chdir(bench.HERE)
    ran = [argv for _, argv in gpu_commands if argv[0] == "bench.py"]
    for _, mode, *rest in ran:
        bench.main([mode, *rest, *flags(**SMALL, **SMALL_OF[mode])])
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert record["mode"] == mode and all(row.get("ms", 1) > 0 and row.get("tokens_per_second", 1) > 0 for row in record["rows"])
    assert {mode for _, mode, *_ in ran} == set(SMALL_OF)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
WIDE = dict(n_embd=64, block_size=64, n_core=2)                         # heads of 16: kernels for half precision want a multiple of 8


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, dict(block="llama", n_kv_head=2), dict(update="gate", n_prelude=1, n_recur=3, n_coda=1), dict(n_prelude=1, n_recur=3, router="expert", block="llama")], ids=str)
def test_on_cuda_the_logits_of_replayed_passes_are_those_of_a_whole_forward(changes, dtype):
    model, seen = loud(tiny(**WIDE, **changes)).to("cuda", getattr(torch, dtype)), {}
    engine = Engine(model, 3)
    for i in range(7):
        request = engine.submit(range(1, 2 + i % 3), 5 + 4 * i)
        request.greedy, request.draw = False, lambda z_1V, logits=seen.setdefault(request, []): (logits.append(z_1V[0]), z_1V.argmax(-1))[1]
    for request, token in engine.run():
        assert token is not None, request.error
    far = 0
    for request, logits in seen.items():
        with torch.inference_mode():
            want_TV = model(torch.tensor([request.ids[:-1]], device="cuda")).logits[0, request.n_prompt - 1 :].float()
        far += ((torch.stack(logits).float() - want_TV).abs().amax(-1) > (1e-3 if dtype == "float32" else 0.05) * want_TV.abs().max()).sum().item()
    routed = model.cfg.router != "none"                                 # rounded, a router near its threshold may say the other thing
    assert far <= (10 if routed and dtype == "bfloat16" else 0) and engine.passes["core"].graphs


@needs_cuda
def test_on_cuda_bench_decodes_in_three_ways_and_serves_by_graphs(go, mor):
    _, record, _ = go("decode", "dense.py", prompt_tokens=4, device="cuda", compile="true", repeats=1)
    assert [row["name"] for row in record["rows"]] == ["dense eager", "dense compiled", "dense graphs, compiled"] and torch.cuda.get_device_name() in record["device"]
    _, record, _ = go("serve", "dense.py", "toy.py", device="cuda", repeats=1, **SERVED)
    assert all(row["ratio"] > 0 for row in record["rows"])
