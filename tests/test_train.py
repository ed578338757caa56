"""Training, in the order in which a run meets it: data, schedule, gradients, evaluation, a whole run, its folder, its end.

    python -m pytest -q tests/test_train.py
"""
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny
from toy import DENSE, flags, make_config, make_data, refusal

import config
import prepare
import train
from config import UserError
from model import GPT, GPTConfig, fold_in, param_groups
from train import Split, TrainConfig, compile_parts, evaluate, fixed_windows, get_batch, learning_rate, step_gradients

ROOT = Path(train.__file__).resolve().parent
NO_AUTOCAST = torch.autocast("cpu", enabled=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data/toy."""
    folder = tmp_path_factory.mktemp("train")
    make_data(folder)
    return folder


@pytest.fixture
def go(place, tmp_path, monkeypatch):
    """go(**flags) -> the folder of a finished run, in a current folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(place / "data")
    make_config(tmp_path)

    def go(**changes):
        train.main(["toy.py", *flags(**changes)])
        return Path(changes.get("out_dir", "out/toy"))
    return go


def events(folder, kind=None):
    """The records of log.jsonl, each strictly JSON."""
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")
    records = [json.loads(line, parse_constant=refuse) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [r for r in records if kind in (None, r["event"])]


def checkpoint(folder):
    return torch.load(folder / "ckpt.pt", weights_only=True)


def toy_split(place, name="val", block_size=32):
    return Split(place / "data", "toy", name, prepare.load_meta(place / "data", "toy"), block_size)


def make_bin(folder, ids, block_size):
    """A Split over the given ids."""
    (folder / "x").mkdir(exist_ok=True)
    np.asarray(ids, dtype="<u2").tofile(folder / "x" / "val.bin")
    return Split(folder, "x", "val", {"dtype": "uint16"}, block_size)


# ------------------------------------------------------------------------------------------------------------------ data


def test_a_window_is_a_context_and_the_same_one_token_on_up_to_the_last_token(tmp_path):
    split = make_bin(tmp_path, range(100), block_size=8)
    assert split.n_windows == 92
    ids_BT, targets_BT = split.batch([0, split.n_windows - 1])
    assert ids_BT.tolist() == [list(range(8)), list(range(91, 99))] and ids_BT.dtype == torch.int64
    assert targets_BT.tolist() == [list(range(1, 9)), list(range(92, 100))]       # not a token is out of reach


@pytest.mark.parametrize("n", [0, 7, 8])
def test_a_split_shorter_than_one_window_is_refused_with_its_name_and_the_need(tmp_path, n):
    message = refusal(make_bin, tmp_path, range(n), 8)
    assert "val.bin" in message and f"holds {n} tokens" in message and "needs 9" in message


def test_block_size_and_one_more_token_is_exactly_one_window(tmp_path):
    split = make_bin(tmp_path, range(9), block_size=8)
    assert split.n_windows == 1 and fixed_windows(split, 65536).tolist() == [0]
    assert get_batch(split, 3, seed=5)[1].tolist() == [list(range(1, 9))] * 3


def test_a_batch_is_a_function_of_its_seed(place):
    split, before = toy_split(place, "train"), torch.get_rng_state()
    a, same, other = (get_batch(split, 4, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(a, same) and not torch.equal(a, other) and torch.equal(before, torch.get_rng_state())


def test_every_window_can_be_drawn(tmp_path):
    split = make_bin(tmp_path, range(12), block_size=8)
    assert {int(row[0]) for seed in range(20) for row in get_batch(split, 4, seed)[0]} == {0, 1, 2, 3}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from /proc")
def test_memory_does_not_grow_with_the_data_that_was_read(tmp_path):
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    split = make_bin(tmp_path, range(2000), block_size=1024)
    os.truncate(split.path, 500_000_000)                              # sparse: it takes no room on the disk
    split = Split(tmp_path, "x", "val", {"dtype": "uint16"}, 1024)
    get_batch(split, 8, 0)
    before = resident()
    for seed in range(2000):
        get_batch(split, 8, seed)
    assert resident() - before < 50e6


def test_evaluation_windows_are_the_same_each_time_spread_out_and_apart(place):
    split = toy_split(place)
    starts = fixed_windows(split, 10 * 32).tolist()
    assert starts == fixed_windows(split, 10 * 32).tolist() and starts[0] == 0 and starts[-1] == split.n_windows - 1
    assert len(starts) == 10 and min(b - a for a, b in itertools.pairwise(starts)) >= 32
    assert len(fixed_windows(split, 10**9)) == split.n_tokens // 32           # all of it, once


def test_an_id_outside_the_vocabulary_is_named_before_training(tmp_path):
    split = make_bin(tmp_path, [3] * 50 + [400] + [3] * 50, block_size=8)
    message = refusal(split.check_ids, 320)
    assert "vocab_size=400" in refusal(split.check_ids, 400)
    assert "val.bin" in message and "400" in message and "vocab_size=320" in message
    split.check_ids(401)


@pytest.mark.parametrize("given, data, padded", [(None, 257, 320), (None, 320, 320), (None, 50257, 50304), (257, 257, 257), (999, 257, 999)])
def test_the_vocabulary_is_the_datas_up_to_a_multiple_of_64_or_a_larger_one(given, data, padded):
    assert train.padded_vocab(given, {"vocab_size": data}) == padded


def test_a_vocabulary_smaller_than_the_datas_is_refused_with_both():
    message = refusal(train.padded_vocab, 256, {"vocab_size": 257})
    assert "256" in message and "257" in message


@pytest.mark.parametrize("changes, words", [
    (dict(dataset="other"), "python prepare.py SOURCE --name=other"), (dict(data_dir="elsewhere"), "no data set 'toy' in elsewhere/"),
    (dict(block_size=5000), "val.bin"), (dict(vocab_size=64), "vocab_size=64"), (dict(dataset="../toy"), "'../toy'")])
def test_data_that_cannot_be_used_is_one_line_and_no_folder_is_made(go, changes, words):
    assert words in refusal(go, **changes) and not Path("out").exists()


# -------------------------------------------------------------------------------------------------------------- schedule


def schedule(**changes):
    return SimpleNamespace(**{"learning_rate": 1.0, "schedule": "cosine", "min_lr": None, "lr_decay_iters": None, "cooldown_iters": None, **changes})


@pytest.mark.parametrize("max_iters, extra", list(itertools.product([1, 2, 10], [None, 0, 1, 100])))
def test_every_length_of_warm_up_gives_finite_rates_and_a_first_step_that_moves(max_iters, extra):
    for warmup_iters in (0, 1, max_iters, max_iters + 1):
        s = schedule(max_iters=max_iters, warmup_iters=warmup_iters, lr_decay_iters=extra)
        rates = [learning_rate(step, s) for step in range(max_iters + 3)]
        assert rates[0] > 0 and all(0 < rate <= 1 for rate in rates)


def test_the_rate_rises_to_its_peak_and_falls_along_a_cosine_to_a_tenth():
    s = schedule(max_iters=110, warmup_iters=10)
    rates = [learning_rate(step, s) for step in range(111)]
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)]) and max(rates) == rates[10] == 1
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)       # half way, end
    assert learning_rate(110, schedule(max_iters=110, warmup_iters=10, min_lr=0.0)) == 0
    early = schedule(max_iters=110, warmup_iters=10, lr_decay_iters=60)
    assert [learning_rate(step, early) for step in (60, 110)] == pytest.approx([0.1, 0.1])     # and stays there


def test_the_first_step_changes_every_tensor(go):
    before, after = (checkpoint(go(out_dir=f"out/{n}", max_iters=n, warmup_iters=100))["model"] for n in (0, 1))
    assert all(not torch.equal(before[name], after[name]) for name in before)


# ------------------------------------------------------------------------------------------- gradients and their groups


def gradients(model, batches):
    model.zero_grad()
    loss, _ = step_gradients(model, batches, [(i, i) for i in range(len(batches))], NO_AUTOCAST)
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters()}


def masked_rows(keep_B, T=16):
    """ids and targets of len(keep_B) rows, of which row b has keep_B[b] targets that count."""
    generator = torch.Generator().manual_seed(0)
    ids_BT, targets_BT = (torch.randint(61, (len(keep_B), T), generator=generator) for _ in range(2))
    for row, keep in zip(targets_BT, keep_B):
        row[keep:] = -100
    return ids_BT, targets_BT


@pytest.mark.parametrize("rows", [2, 1])
def test_the_update_does_not_depend_on_how_a_batch_is_cut(rows):
    torch.manual_seed(0)
    model = GPT(tiny(n_prelude=1, n_core=1, n_recur=2, update="gate")).train()
    ids_BT, targets_BT = masked_rows([16, 1, 0, 7, 16, 3, 2, 0])
    loss, whole = gradients(model, [(ids_BT, targets_BT)])
    cut_loss, cut = gradients(model, list(zip(ids_BT.split(rows), targets_BT.split(rows))))
    assert loss == pytest.approx(cut_loss, abs=1e-6)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-6, rtol=0)
    assert loss == pytest.approx(model.eval()(ids_BT, targets_BT).losses["ce"].item(), abs=1e-6)


def test_a_batch_in_which_no_target_counts_changes_nothing():
    model = GPT(tiny()).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    loss, grads = gradients(model, [masked_rows([0, 0]), masked_rows([0])])
    train.clip_gradients(model, 1.0)
    torch.optim.AdamW(param_groups(model, 0.0)).step()
    assert loss == 0 and all(not grad.any() for grad in grads.values())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_gradients_are_clipped_to_a_norm_and_zero_means_never():
    norm = lambda model: math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))  # noqa: E731
    model = GPT(tiny()).train()
    gradients(model, [masked_rows([16])])
    whole = norm(model)
    assert float(train.clip_gradients(model, 0.0)) == pytest.approx(whole) and norm(model) == pytest.approx(whole)
    assert float(train.clip_gradients(model, 0.01)) == pytest.approx(whole) and norm(model) == pytest.approx(0.01, rel=1e-3)


def test_every_parameter_is_in_one_group_and_only_matrices_and_tables_decay():
    model = GPT(tiny(n_prelude=1, n_core=1, n_recur=3, update="gate", bias=True))
    decayed, free = ({id(p) for p in group["params"]} for group in param_groups(model, 0.1))
    assert [group["weight_decay"] for group in param_groups(model, 0.1)] == [0.1, 0.0]
    assert not decayed & free and len(decayed | free) == sum(len(group["params"]) for group in param_groups(model, 0.1))
    for name, p in model.named_parameters():
        assert id(p) in (free if name.endswith("bias") or "norm" in name else decayed), name


# ------------------------------------------------------------------------------------------------------------ evaluation


def test_the_validation_loss_is_the_same_twice_at_any_batch_size_and_with_any_dropout(place):
    split, cfg = toy_split(place), dict(vocab_size=320, n_prelude=1, n_core=1, n_recur=2, update="gate", state_noise=0.5, gate_noise=0.5)
    torch.manual_seed(0)
    model = GPT(tiny(**cfg, dropout=0.5)).train()
    calm = GPT(tiny(**cfg))
    calm.load_state_dict(model.state_dict())
    losses = [evaluate(m, split, fixed_windows(split, 400), [1, 2], batch_size, "cpu")
              for m, batch_size in ((model, 8), (model, 8), (model, 1), (calm, 8))]
    assert losses[0] == losses[1] == losses[3] and set(losses[0]) == {1, 2} and losses[0][1] != losses[0][2]
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("changes, depths", [(dict(n_recur=10), [1, 5, 10]), (dict(n_recur=2), [1, 2]), (dict(), [1]),
                                             (dict(n_recur=3, sharing="sequence"), [3])])
def test_depths_of_evaluation_are_1_half_and_all(changes, depths):
    assert train.eval_depths(tiny(**changes)) == depths


def test_a_run_begins_near_the_loss_of_knowing_nothing(go):
    first = events(go(max_iters=0, n_embd=128), "eval")[0]
    assert first["step"] == 0 and first["val_loss"] == pytest.approx(math.log(320), rel=0.05)
    assert set(first["by_depth"]) == {"1", "2", "4"} and first["by_depth"]["4"] == first["val_loss"]


def test_bits_per_byte_are_nats_per_token_in_the_texts_own_unit(go):
    record, val = events(go(max_iters=0), "eval")[0], prepare.load_meta("data", "toy")["val"]
    assert record["bits_per_byte"] == pytest.approx(record["val_loss"] * val["tokens"] / math.log(2) / val["bytes"])


@pytest.mark.parametrize("bias, gate", [(0.0, 0.5), (4.0, 0.982)])
def test_the_mean_gate_is_the_gates_mean(bias, gate):
    model = GPT(tiny(n_recur=3, update="gate", gate_bias=bias, n_embd=64)).train()
    ids_BT = torch.randint(61, (1, 16))
    assert train.mean_gate(model, ids_BT) == train.mean_gate(model, ids_BT) == pytest.approx(gate, abs=0.02) and model.training
    assert train.mean_gate(GPT(tiny()), ids_BT) is None


# ----------------------------------------------------------------------------------------------------- exact continuation


def test_ten_steps_are_five_and_five_more_bit_for_bit(go, capsys):
    same = dict(dropout=0.1, gradient_accumulation_steps=2, lr_decay_iters=10)
    whole = go(**same, out_dir="out/whole", max_iters=10, eval_interval=3)      # evaluation leaves no trace either
    broken = go(**same, out_dir="out/broken", max_iters=5)
    go(**same, out_dir="out/broken", max_iters=10, init_from="resume")
    assert "resume: max_iters was 5, now 10" in capsys.readouterr().out
    a, b = checkpoint(whole), checkpoint(broken)
    assert a["step"] == b["step"] == 10 and a["val_loss"] == b["val_loss"]
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for i, state in a["optimizer"]["state"].items():
        assert all(torch.equal(state[name], b["optimizer"]["state"][i][name]) for name in state)
    log = [[{k: v for k, v in r.items() if k not in ("tokens_per_second", "ms_per_update")} for r in events(folder, "step")] for folder in (whole, broken)]
    assert log[0] == log[1] and [r["step"] for r in log[0]] == list(range(1, 11))
    assert len({r["depth"] for r in log[0]}) > 1 and len({r["loss"] for r in log[0]}) == 10


def test_randomness_differs_between_steps_micro_batches_and_purposes():
    seeds = [fold_in(1337, purpose, step, i) for purpose in ("data", "shared", "own") for step in range(50) for i in range(4)]
    assert len(set(seeds)) == len(seeds) and len({fold_in(seed, "data", 0, 0) for seed in range(50)}) == 50


def test_model_keys_and_tokenizer_may_not_change_on_resume(go, place, tmp_path):
    folder = go(max_iters=1)
    before = (folder / "ckpt.pt").read_bytes()
    assert refusal(go, init_from="resume", n_recur=3).startswith("n_recur=3, but the checkpoint has n_recur=4")
    state = torch.load(folder / "ckpt.pt")
    torch.save({**state, "model_config": {k: v for k, v in state["model_config"].items() if k != "loop_norm"}}, folder / "ckpt.pt")     # an older one
    assert refusal(go, init_from="resume", loop_norm=True).startswith("loop_norm=True, but the checkpoint has loop_norm=False")
    torch.save(state, folder / "ckpt.pt")
    before = (folder / "ckpt.pt").read_bytes()
    meta = json.loads((place / "data/toy/meta.json").read_text("utf-8"))
    Path("data").unlink()
    Path("data/toy").mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (tmp_path / "data/toy" / name).symlink_to(place / "data/toy" / name)
    Path("data/toy/meta.json").write_text(json.dumps({**meta, "tokenizer": "gpt2", "fingerprint": "beef"}), encoding="utf-8")
    message = refusal(go, init_from="resume", max_iters=2)
    assert "'bytes'" in message and "'gpt2'" in message and meta["fingerprint"] in message and "beef" in message
    assert (folder / "ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("max_iters", [0, 2, 3])
def test_resume_at_or_after_the_end_evaluates_and_ends_well(go, capsys, max_iters):
    folder = go(max_iters=3)
    weights = checkpoint(folder)["model"]
    go(init_from="resume", max_iters=max_iters)
    assert "the run is at step 3" in capsys.readouterr().out and checkpoint(folder)["step"] == 3
    assert [r["step"] for r in events(folder, "eval")] == [0, 3, 3]
    assert all(torch.equal(weights[name], p) for name, p in checkpoint(folder)["model"].items())


def test_resume_without_a_config_file_takes_the_runs_own_with_its_origins(go):
    folder = go(max_iters=1, beta1=0.8)
    train.main(["--init_from=resume", f"--out_dir={folder}", "--max_iters=2"])
    lines = (folder / "config.py").read_text("utf-8").splitlines()
    assert "n_embd = 16  # toy.py:5" in lines and "max_iters = 2  # command line" in lines and "weight_decay = 0.1  # default" in lines
    assert "beta1 = 0.8  # command line" in lines and checkpoint(folder)["step"] == 2


# ------------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("max_iters, eval_interval, evaluated", [
    (0, 0, [0]), (1, 0, [0, 1]), (3, -1, [0, 3]), (3, 10**6, [0, 3]), (4, 2, [0, 2, 4]), (3, 2, [0, 2, 3])])
def test_the_last_step_is_always_evaluated_and_saved(go, max_iters, eval_interval, evaluated):
    folder = go(max_iters=max_iters, eval_interval=eval_interval)
    assert [r["step"] for r in events(folder, "eval")] == evaluated
    assert checkpoint(folder)["step"] == max_iters and checkpoint(folder)["val_loss"] == events(folder, "eval")[-1]["val_loss"]


def test_a_warm_up_longer_than_the_run_is_legal_and_the_rate_that_is_logged_is_used(go):
    folder = go(max_iters=2, warmup_iters=9)
    assert [r["lr"] for r in events(folder, "step")] == pytest.approx([1e-3, 2e-3])
    assert [group["lr"] for group in checkpoint(folder)["optimizer"]["param_groups"]] == pytest.approx([2e-3, 2e-3])


def test_the_start_page_counts_the_tokens_of_a_step_as_the_log_does(go, capsys, monkeypatch):
    now, drawn, draw = [0.0], [0], train.get_batch

    def one_second_each(*args):
        now[0], batch = now[0] + 1, draw(*args)
        drawn[0] += batch[0].numel()
        return batch
    monkeypatch.setattr(train, "get_batch", one_second_each)
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    folder = go(max_iters=2, gradient_accumulation_steps=3)
    out = capsys.readouterr().out
    factors = re.search(r"(\d+) rows x (\d+) tokens x (\d+) accumulation = (\d+) tokens; 2 steps", out)
    B, T, A, product = map(int, factors.groups())
    assert (B, T, A) == (4, 32, 3) and B * T * A == product == drawn[0] / 2
    assert [r["tokens_per_second"] for r in events(folder, "step")] == [product / A] * 2       # A seconds a step
    assert re.findall(r"(\d+) seconds left", out) == ["3", "0"]


def test_the_start_page_says_what_will_run_and_from_where(go, capsys):
    go(max_iters=1, beta2=0.9)
    page = capsys.readouterr().out
    for words in ("n_embd         = 16           toy.py:5", "beta2          = 0.9          command line", "1+1x4+1", "unique parameters",
                  "6 blocks executed from 3", "uniform 1..4, evaluation 1, 2, 4", "cpu float32", "tokenizer bytes", "unigram", "xz",
                  "vocabulary 257 (model 320)", "time       about"):
        assert words in page, words
    assert page.index("time  ") < page.index("step      0") < page.index("step      1")


def test_a_run_of_days_on_a_cpu_is_foretold_with_a_smaller_one(go, capsys, monkeypatch):
    monkeypatch.setattr(train, "estimate_seconds", lambda *args: 9e5)
    go(max_iters=1)
    assert "about 10 days, try config/grt_tiny.py" in capsys.readouterr().out


def test_the_estimate_grows_with_the_work_that_is_left(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))        # every measured pass takes a second
    model = GPT(tiny(n_recur=2)).train()
    estimate = lambda first=0, **changes: train.estimate_seconds(model, SimpleNamespace(**{  # noqa: E731
        **dict(batch_size=2, gradient_accumulation_steps=1, max_iters=10, eval_interval=0, eval_tokens=1), **changes}), "cpu", NO_AUTOCAST, first)
    assert estimate() == pytest.approx(10, rel=0.05) and estimate(first=5) == pytest.approx(5, rel=0.05)
    assert estimate(gradient_accumulation_steps=3) == pytest.approx(30, rel=0.05)
    assert estimate(eval_tokens=64, eval_interval=1) > 11


@pytest.mark.parametrize("seconds, text", [(5, "5 seconds"), (600, "10 minutes"), (7200, "2 hours"), (864000, "10 days"), (1234 * 86400, "1,234 days")])
def test_times_are_told_in_a_unit_that_fits(seconds, text):
    assert train.human(seconds) == text


def test_bfloat16_and_float32_train_alike_and_say_which(go, capsys):
    single, half = (events(go(max_iters=2, out_dir=f"out/{dtype}", dtype=dtype), "step")[-1]["loss"] for dtype in ("float32", "bfloat16"))
    assert single != half and single == pytest.approx(half, rel=0.01) and "cpu bfloat16" in capsys.readouterr().out


def test_what_it_writes_is_shown_at_the_end_even_on_an_ascii_terminal(go, capsys, monkeypatch):
    go(max_iters=1, sample_tokens=40)
    assert "what it writes (more: python sample.py --out_dir=out/toy)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    go(max_iters=1, sample_tokens=40)
    sys.stdout.flush()
    assert b"what it writes" in sys.stdout.buffer.getvalue() and b"?" in sys.stdout.buffer.getvalue()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(go):
    message = refusal(go, learning_rate=1e30, max_iters=9, eval_interval=1, grad_clip=0)
    assert "is nan" in message or "is inf" in message
    state = checkpoint(Path("out/toy"))
    assert math.isfinite(state["val_loss"]) and all(p.isfinite().all() for p in state["model"].values()) and events(Path("out/toy"))


# --------------------------------------------------------------------------------------------------- device and compiling


@pytest.mark.parametrize("device", ["nonsense", "meta", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one"))])
def test_a_device_that_cannot_be_used_is_one_line(go, device):
    assert f"device='{device}' cannot be used here" in refusal(go, device=device)


def test_compiling_that_cannot_work_is_one_line_and_the_run_goes_on(go, capsys, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("no C++ compiler")
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert checkpoint(go(max_iters=1, compile="true"))["step"] == 1
    assert capsys.readouterr().err == "note: torch.compile does not work here (RuntimeError); running eagerly\n"
    assert train.want_compile("auto", torch.device("cpu")) is False and train.want_compile(False, torch.device("cuda")) is False


def test_compiled_parts_keep_the_names_of_their_weights():
    cfg = tiny(n_prelude=1, n_core=1, n_recur=2, update="gate")
    eager, compiled = GPT(cfg), GPT(cfg)
    train.compile_parts(compiled, backend="eager")
    assert list(compiled.state_dict()) == list(eager.state_dict())
    eager.load_state_dict(compiled.state_dict()), compiled.load_state_dict(eager.state_dict())


# ------------------------------------------------------------------------------------------------------------- checkpoint


def test_a_checkpoint_holds_plain_types_and_each_tensor_once(go):
    folder = go(max_iters=1, n_embd=64, n_recur=8)
    state = checkpoint(folder)                                        # weights_only: nothing that runs code
    assert set(state) >= {"model", "optimizer", "step", "val_loss", "best_val_loss", "model_config", "settings", "tokenizer", "fingerprint", "commit"}
    n_params = GPTConfig(**state["model_config"]).n_params()
    assert sum(p.numel() for p in state["model"].values()) == n_params and "_orig_mod" not in str(list(state["model"]))
    assert 1 < (folder / "ckpt.pt").stat().st_size / (3 * 4 * n_params) < 1.2              # weights and AdamW's two moments
    json.dumps({**state, "model": None, "optimizer": None})


@pytest.mark.parametrize("broken", ["torch.save", "os.replace", "os.fsync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0\nin the zip writer")])
def test_a_failed_save_is_one_line_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, broken, error):
    path = tmp_path / "ckpt.pt"
    train.save_checkpoint(path, {"format": 1, "step": 1})
    before = path.read_bytes()

    def fail(*args):
        if broken == "torch.save":
            args[1].write(b"half a file")
        raise error
    monkeypatch.setattr(torch if broken == "torch.save" else os, broken.split(".")[1], fail)
    message = refusal(train.save_checkpoint, path, {"format": 1, "step": 2})
    assert str(path) in message and ("No space left on device" in message or "is the disk full?" in message)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_full_disk_while_logging_is_one_line(tmp_path, monkeypatch):
    log = train.Log(tmp_path / "log.jsonl")
    log.write("", step=1)
    monkeypatch.setattr(json, "dumps", lambda record: (_ for _ in ()).throw(OSError(28, "No space left on device"))
                        if isinstance(record, dict) and record.get("step") == "2" else '{"step": "2"}')
    assert "No space left on device" in refusal(log.write, "", step=2)


def damage(state, path, how):
    whole = path.read_bytes()
    if how == "weights alone":
        torch.save(state["model"], path)
    elif how == "other shapes":
        torch.save({**state, "model": {k: v[:1] for k, v in state["model"].items()}}, path)
    elif how == "another format":
        torch.save({**state, "format": 99}, path)
    else:
        at = len(whole) // 2
        flipped = bytes([whole[at] ^ 1])
        path.write_bytes({"empty": b"", "cut": whole[:at], "short": whole[:-3], "text": b"hello",
                          "a bit flipped": whole[:at] + flipped + whole[at + 1:]}[how])


@pytest.mark.parametrize("how", ["empty", "cut", "short", "text", "a bit flipped", "weights alone", "other shapes", "another format"])
def test_a_damaged_or_foreign_checkpoint_is_named(go, how):
    folder = go(max_iters=1)
    damage(checkpoint(folder), folder / "ckpt.pt", how)
    assert refusal(go, init_from="resume", max_iters=2).startswith("out/toy/ckpt.pt is ")


def test_resume_is_not_confused_by_what_else_lies_there(go):
    folder = go(max_iters=1)
    for name in ("ckpt_copy_of_000.pt", "ckpt.pt.tmp", "ckpt-9.pt"):
        (folder / name).write_bytes(b"junk")
    (folder / "ckpt").mkdir()
    go(init_from="resume", max_iters=2)
    assert checkpoint(folder)["step"] == 2


def test_resume_without_a_run_says_so(go):
    assert "out/toy/ckpt.pt does not exist" in refusal(go, init_from="resume")


# ----------------------------------------------------------------------------------------------------- the run's folder


def test_the_config_in_the_folder_gives_the_same_settings(go):
    folder = go(max_iters=1, min_lr=1e-4, out_dir="out/a b é")
    again = config.parse([str(folder / "config.py")], [GPTConfig, TrainConfig], "")
    assert again.values == train.parse(["toy.py", *flags(max_iters=1, min_lr=1e-4, out_dir="out/a b é")]).values
    assert again.values == checkpoint(folder)["settings"] == events(folder)[0]["settings"]


def test_a_new_run_never_enters_the_folder_of_another(go, capsys):
    first = go(max_iters=1)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    go(max_iters=2)
    assert "out/toy holds a run already: this one goes to out/toy-2" in capsys.readouterr().out
    go(max_iters=3)
    assert [checkpoint(Path("out") / name)["step"] for name in ("toy", "toy-2", "toy-3")] == [1, 2, 3]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_a_folder_in_use_is_passed_over_where_a_name_is_free_to_choose(go):
    pytest.importorskip("fcntl")
    go(max_iters=1)
    lock = train.hold(Path("out/toy-2"))
    go(max_iters=1)
    assert checkpoint(Path("out/toy-3"))["step"] == 1 and not Path("out/toy-2/ckpt.pt").exists()
    lock.close()


@pytest.mark.parametrize("error, works", [(OSError(38, "Function not implemented"), True), (BlockingIOError(11, "busy"), False)])
def test_a_disk_without_locks_is_trained_on(go, monkeypatch, error, works):
    fcntl = pytest.importorskip("fcntl")

    def flock(*args):
        raise error
    monkeypatch.setattr(fcntl, "flock", flock)
    if works:
        assert checkpoint(go(max_iters=1))["step"] == 1
    else:
        assert "another process is training in out/toy" in refusal(go)


def test_a_full_disk_at_the_lock_is_one_line(go, monkeypatch):
    def launch():
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(train, "launch", launch)
    assert "cannot be written (No space left on device)" in refusal(go)


def test_several_processes_share_no_one_device():
    world = SimpleNamespace(size=2, local_rank=1)
    message = refusal(train.pick_device, SimpleNamespace(device="cuda:1", dtype="auto"), world)
    assert "device='cuda:1' cannot be shared by 2 processes" in message
    assert train.pick_device(SimpleNamespace(device="cpu", dtype="auto"), world)[0] == torch.device("cpu")


def test_training_and_evaluation_of_a_compiled_run_make_graphs_of_fixed_shapes(go, monkeypatch):
    shapes = []

    def backend(graph, inputs):
        shapes.append([int(x) for x in inputs if isinstance(x, torch.SymInt)])
        return graph.forward
    monkeypatch.setattr(train, "want_compile", lambda *args: True)
    monkeypatch.setattr(train, "compile_parts", lambda model, **options: compile_parts(model, backend=backend, **options))
    torch._dynamo.reset()
    go(eval_tokens=160, max_iters=3, eval_interval=1)                  # 5 windows: the last evaluation batch is short
    assert not any(shapes) and len(shapes) == 6                        # block, read and write, each with and without gradients


def test_a_launch_that_is_started_again_finds_its_own_run_and_no_other(go, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    go(max_iters=1, out_dir="out/old")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    go(max_iters=1, out_dir="out/old")
    settings = train.parse(["toy.py", "--out_dir=out/old"])
    assert Path("out/old-2/ckpt.pt").exists() and train.interrupted(settings) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train.interrupted(settings) == "out/old-2"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "three")
    assert train.interrupted(settings) is None


def test_a_stopped_run_counts_as_a_run(go):
    Path("out/toy").mkdir(parents=True)
    Path("out/toy/log.jsonl").write_text('{"event": "start"}\n', encoding="utf-8")
    go(max_iters=1)
    assert Path("out/toy-2/ckpt.pt").exists() and not Path("out/toy/ckpt.pt").exists()


def test_a_folder_in_which_a_process_trains_is_refused(go):
    pytest.importorskip("fcntl")
    lock = train.hold(Path("out/toy"))
    for changes in (dict(), dict(out_dir="out/toy/")):
        assert "another process is training in out/toy" in refusal(go, **changes)
    lock.close()
    go(max_iters=1)


@pytest.mark.parametrize("out_dir, words", [("taken", "cannot be written"), ("taken/sub", "cannot be written"), (".", "no folder of the run's own"),
                                            ("..", "no folder of the run's own")])
def test_a_folder_that_cannot_be_used_is_one_line_before_training(go, out_dir, words, monkeypatch):
    Path("taken").write_text("a file", encoding="utf-8")
    monkeypatch.setattr(train.Run, "train", None)
    assert words in refusal(go, out_dir=out_dir) and sorted(os.listdir()) == ["data", "taken", "toy.py"]


@pytest.mark.parametrize("out_dir", ["with space/é 🦊", "back\\slash", "trailing/"])
def test_odd_paths_work(go, out_dir):
    assert checkpoint(go(out_dir=out_dir, max_iters=1))["step"] == 1


def test_a_line_that_was_cut_short_does_not_spoil_the_log(go):
    folder = go(max_iters=1)
    n = len(events(folder))
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "st')
    go(max_iters=2, init_from="resume")
    assert [r["event"] for r in events(folder)][n:] == ["start", "step", "eval"]


def test_the_log_has_no_words_that_json_has_not(tmp_path, capsys):
    train.Log(tmp_path / "log.jsonl").write("a line", event="step", loss=math.nan, norm=math.inf, lr=0.5)
    assert events(tmp_path) == [{"event": "step", "loss": "NaN", "norm": "Infinity", "lr": 0.5}] and capsys.readouterr().out == "a line\n"


def test_the_commit_is_unknown_without_git_or_its_folder(tmp_path, monkeypatch):
    commit = train.commit.__wrapped__
    assert re.fullmatch(r"[0-9a-f]{4,40}\+?|unknown", commit())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown"
    monkeypatch.undo()
    monkeypatch.setattr(train, "HERE", tmp_path)
    assert commit() == "unknown"


# ---------------------------------------------------------------------------------------------------- every key matters


@pytest.mark.parametrize("flag", ["learning_rate=nan", "learning_rate=-1", "learning_rate=inf", "min_lr=-1", "lr_decay_iters=-1", "beta1=1", "beta2=-0.1",
                                  "weight_decay=-1", "grad_clip=nan", "seed=-1", "seed=2**63", "batch_size=0", "gradient_accumulation_steps=0",
                                  "max_iters=-1", "warmup_iters=-1", "eval_tokens=0", "log_interval=0", "sample_tokens=-1"])
def test_a_number_out_of_range_is_refused_before_any_data_is_touched(flag):
    message = refusal(train.main, [f"--{flag}", "--dataset=none"])
    assert message.startswith(f"command line: {flag.split('=')[0]}=") and "must be at least" in message


# A value for each model key, beside which other keys, that must change parameters, an answer or a training loss, or be called unused.
MODEL_KEYS = {
    "block": ("llama", {}), "vocab_size": (80, {}), "block_size": (16, {}), "n_embd": (24, {}), "n_head": (4, {}), "n_kv_head": (1, {}),
    "n_ffn": (20, {}), "bias": (True, {}), "gelu": ("tanh", {}), "dropout": (0.5, {}), "n_prelude": (2, {}), "n_core": (2, {}), "n_recur": (3, {}), "n_coda": (2, {}),
    "sharing": ("middle_sequence", dict(update="replace", n_core=2, depth_sampling="fixed")), "update": ("inject", {}), "router": ("expert", {}),
    "kv": ("share", {}), "router_kind": ("mlp", dict(router="expert")), "router_width": (8, dict(router="expert", router_kind="mlp")),
    "router_score": ("tanh", dict(router="expert")), "router_alpha": (0.5, dict(router="expert")), "capacity": ([1.0, 1.0, 1.0, 0.25], dict(router="expert")),
    "threshold": (0.1, dict(router="expert")), "router_loss": (1.0, dict(router="expert")),
    "router_choice": ("random", dict(router="expert")), "aux_router": (True, dict(router="expert")), "router_z_loss": (1.0, dict(router="expert")),
    "router_balance": ("bias", dict(router="token", update="replace", depth_sampling="fixed")),
    "depth_sampling": ("fixed", {}), "min_depth": (4, {}), "loss": ("every", {}), "fused_loss": (True, {}), "state_noise": (0.5, {}), "gate_noise": (0.5, {}),
    "gate_bias": (2.0, {}), "gate_temperature": (3.0, {}), "proj_init": ("identity", {}), "lora_rank": (2, {}), "state_init": ("random", {}), "state_std": (0.5, dict(state_init="random")),
    "state_seed": (1, dict(state_init="random")), "poisson_mean": (9.0, dict(depth_sampling="poisson")), "bptt": (1, dict(depth_sampling="fixed")),
    "exit_entropy": (1.0, dict(loss="every")), "sandwich_norm": (True, {}), "loop_norm": (True, {}), "rope_theta": (100.0, dict(block="llama")), "norm_eps": (0.1, {})}
GRT = dict(vocab_size=64, block_size=32, n_embd=16, n_head=2, n_prelude=1, n_core=1, n_recur=4, n_coda=1, update="gate", gate_bias=0.0,
           depth_sampling="uniform", state_noise=0.1, gate_noise=0.1)


def portrait(**changes):
    """What can be seen of a model: its size, an answer and some training losses; or the sentence that refuses it."""
    try:
        cfg = GPTConfig(**{**GRT, **changes})
        torch.manual_seed(0)
        model, ids_BT = GPT(cfg), torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
        answer = model.eval()(ids_BT).logits.double().sum().item()
        losses = [model.train()(ids_BT, ids_BT, seed=(seed, seed)).loss for seed in range(2)]
        losses[0].backward()
        slope = model.embed.weight.grad.double().abs().sum().item()
        return cfg.n_params(), cfg.block_size, answer, [loss.item() for loss in losses], slope, model(ids_BT, ids_BT).logits is None
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_every_model_key_changes_something_or_is_refused():
    assert set(MODEL_KEYS) >= {f.name for f in fields(GPTConfig)}, "a new key needs a row in MODEL_KEYS"
    plain = portrait()
    assert plain == portrait()
    for name, (value, beside) in MODEL_KEYS.items():
        without = portrait(**beside) if beside else plain
        assert not isinstance(without, str) and portrait(**{**beside, name: value}) != without, f"{name}={value} changed nothing"


RUN_KEYS = {
    "out_dir": "out/elsewhere", "init_from": "resume", "dataset": "other", "data_dir": "other", "vocab_size": 384, "seed": 7, "device": "meta",
    "dtype": "bfloat16", "compile": True, "batch_size": 3, "gradient_accumulation_steps": 2, "max_iters": 5, "learning_rate": 1e-3, "min_lr": 5e-3,
    "warmup_iters": 1, "lr_decay_iters": 100, "weight_decay": 10.0, "beta1": 0.5, "beta2": 0.5, "grad_clip": 0.1, "eval_interval": 1,
    "eval_tokens": 32, "log_interval": 3, "sample_tokens": 5, "schedule": "wsd", "cooldown_from": "none.pt", "keep_interval": 1, "tensorboard": True,
    "parallel": "fsdp", "cooldown_iters": 1, "aux_router_lr_scale": 10.0, "router_bias_rate": 0.0, "capacity_warmup_iters": 9}
BESIDE = {"cooldown_iters": {"schedule": "wsd", "max_iters": 20}, "aux_router_lr_scale": {"router": "expert", "aux_router": True, "eval_tokens": 1024},
          "router_bias_rate": {"router": "token", "update": "replace", "router_balance": "bias", "depth_sampling": "fixed"},
          "capacity_warmup_iters": {"router": "expert"}}                    # settings without which a key can do nothing
THE_SAME_BY_DESIGN = {"checkpoint_activations", "fused_loss"}               # memory alone: their tests are below and in test_model.py


@pytest.mark.slow
def test_every_training_key_changes_something_or_is_refused(go, capsys, monkeypatch):
    """Seen of a run: where it went, what it said on stderr and wrote, its weights, and which steps it logged with which losses."""
    def no_compiler(*args, **kwargs):
        raise RuntimeError
    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    def seen(i, **changes):
        Path(str(i)).mkdir()
        try:
            train.main(["toy.py", *flags(**{"out_dir": f"{i}/run", **changes})])
        except UserError as error:
            return str(error)
        folder, out = Path(changes.get("out_dir", f"{i}/run")), capsys.readouterr()
        log = [(r["event"], r["step"], r.get("loss"), r.get("val_loss"), r.get("lr")) for r in events(folder)]
        notes = [line for line in out.out.splitlines() if line.startswith("note:")]
        return (str(folder).replace(str(i), ""), log, out.err, "what it writes" in out.out, checkpoint(folder)["model"]["norm.weight"].tolist(), notes,
                sorted(path.name for path in folder.iterdir()))
    make_config(Path("."), max_iters=2, warmup_iters=0, eval_tokens=64)
    plain = seen("plain")
    assert plain == seen("again")
    assert set(RUN_KEYS) | THE_SAME_BY_DESIGN >= {f.name for f in fields(TrainConfig)}, "a new key needs a row in RUN_KEYS"
    for i, (name, value) in enumerate(RUN_KEYS.items()):
        beside = BESIDE.get(name, {})
        assert seen(i, **beside, **{name: value}) != (seen(f"beside{i}", **beside) if beside else plain), f"{name}={value} changed nothing"


def test_a_key_without_effect_is_announced(go, capsys):
    go(max_iters=0, **DENSE)
    assert "note: gate_bias=0.0 has no effect: update is not gate" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ as a command


def test_without_a_config_it_is_grt_tiny(monkeypatch):
    assert [Path(path).name for path in train.parse([]).files] == ["grt_tiny.py"]
    assert train.parse(["--batch_size=5"]).values == train.parse([str(ROOT / "config/grt_tiny.py"), "--batch_size=5"]).values


@pytest.mark.slow
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--learnig_rate=1"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "command line: unknown key 'learnig_rate', did you mean 'learning_rate'?\n")
    assert not os.listdir(tmp_path)
