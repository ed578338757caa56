"""Evaluation: every token once, every depth from one pass, what is compared with what, and the record that stays.

    python -m pytest -q tests/test_eval.py
"""
import io
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from tiny import loud, some_ids, tiny
from toy import DENSE, SEQUENCE, flags, make_config, make_data, open_run, refusal

import eval as evaluation      # the word means something else in Python
import prepare
import train
from config import UserError
from eval import batches, bootstrap, difference, exit_depths, features_at, interval, loss_windows, row_nats, why_unpaired
from model import GPT, Recursion
from train import Split

DRAW, DRAW_EXIT = evaluation.draw, evaluation.draw_exit


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/gated (noisy, dropout), out/dense, out/sequence and out/wide (longer windows), trained for some steps,
    and out/fresh, for none."""
    folder, here = tmp_path_factory.mktemp("eval"), os.getcwd()
    make_data(folder)
    os.chdir(folder)
    for name, changes in {"dense": DENSE | dict(n_core=3), "sequence": SEQUENCE, "wide": DENSE | dict(block_size=48), "fresh": dict(max_iters=0),
                          "gated": dict(dropout=0.2, state_noise=0.5)}.items():
        make_config(folder, **{"max_iters": 8, "eval_tokens": 256, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        os.utime(f"out/{name}/ckpt.pt", (1e9, 1e9 + (name == "gated")))
    os.chdir(here)
    return folder


@pytest.fixture
def go(place, tmp_path, monkeypatch, capsys):
    """go(*words, **flags) -> (stdout's lines without the last, the record in the last, stderr), in a copy of `place`; no picture."""
    shutil.copytree(place, tmp_path / "eval")
    monkeypatch.chdir(tmp_path / "eval")
    for draw in ("draw", "draw_exit", "draw_steps", "draw_gate"):
        monkeypatch.setattr(evaluation, draw, lambda measured: None)

    def go(*words, **changes):
        capsys.readouterr()
        evaluation.main([*words, *flags(**{"device": "cpu", "exit_tokens": 0, "exit_thresholds": [0.1], **changes})])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last, parse_constant=refuse), err
    return go


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def edit(folder, **changes):
    """Change what a checkpoint says beside its tensors."""
    path = Path(folder) / "ckpt.pt"
    train.save_checkpoint(path, {**train.load_checkpoint(path), **changes})


def by_hand(run, T):
    """Nats of every validation token but the first, one number per window of T, written as plainly as possible."""
    ids = run.split.read(0, 10**9)
    nats = []
    for start in range(0, len(ids) - 1, T):
        row = ids[start : start + T + 1]
        logits_TV = run.model(torch.tensor(row[:-1])[None]).logits[0].double()
        nats.append(sum(-logits_TV.log_softmax(-1)[t, row[t + 1]].item() for t in range(len(row) - 1)))
    return nats, len(ids) - 1


# ---- what is predicted


@pytest.mark.parametrize("block_size", [32, 8, 223, 1784])                # 1,784 targets: with and without a short last window
def test_every_token_but_the_first_is_predicted_once(place, block_size):
    meta = prepare.load_meta(place / "data", "toy")
    split = Split(place / "data", "toy", "val", meta, block_size)
    every = torch.from_numpy(split.read(0, 10**9))
    for batch_size in (1, 8):
        run = SimpleNamespace(split=split, batch_size=batch_size, device="cpu", name="", meta=meta)
        rows = list(batches(run, loss_windows(run, True)))
        ids, targets = (torch.cat([row.flatten() for row in part]) for part in zip(*rows))
        assert torch.equal(ids, every[:-1]) and torch.equal(targets, every[1:]) and len(targets) == meta["val"]["tokens"] - 1
        assert {row.size(1) for row, _ in rows} == {block_size, 1784 % block_size} - {0} and max(len(row) for row, _ in rows) <= batch_size


def test_the_nats_of_a_row_are_the_sum_over_its_targets_that_count(monkeypatch):
    model, ids_BT, targets_BT = loud(tiny()), some_ids(3, 32), some_ids(3, 32, seed=2)
    targets_BT[1, 5:] = targets_BT[2] = -100
    (x_BTD,), logits_BTV = features_at(model, ids_BT, [1]), model(ids_BT).logits
    wanted = [sum(-logits_BTV[b, t].log_softmax(-1)[targets_BT[b, t]].item() for t in range(n)) for b, n in enumerate((32, 5, 0))]
    for logits in (2**24, 61 * 7):                                       # all at once; 7 tokens at a time, across rows
        monkeypatch.setattr(evaluation, "LOGITS", logits)
        nats_B, count_B = row_nats(model, x_BTD, targets_BT)
        assert nats_B.tolist() == pytest.approx(wanted, abs=1e-4) and count_B.tolist() == [32, 5, 0] and nats_B.dtype == torch.float64


def test_the_loss_is_that_of_a_plain_loop_over_the_whole_split(go):
    run = open_run("out/gated")
    nats, n_targets = by_hand(run, 32)
    numbers = go("loss")[1]["parts"]["loss"]
    assert (numbers["tokens"], numbers["windows"], numbers["block_size"]) == (n_targets, len(nats), 32)
    assert numbers["nats_per_token"] == pytest.approx(sum(nats) / n_targets, abs=1e-6)
    assert numbers["perplexity"] == pytest.approx(math.exp(sum(nats) / n_targets))


def test_of_a_long_split_the_loss_reads_the_same_whole_windows_every_time(go, monkeypatch):
    run, whole = open_run("out/gated"), go("loss", out_dir="out/gated")
    monkeypatch.setattr(evaluation, "MOST_BYTES", 500)
    lines, record, _ = go("loss")
    part, n = record["parts"]["loss"], 500 * run.meta["val"]["tokens"] // run.meta["val"]["bytes"] // 32
    starts = [int(start) for start in loss_windows(run, False)]
    assert starts[0] == 0 and starts[-1] == run.split.n_windows - 1 and len({*np.diff(starts)}) <= 2 and min(np.diff(starts)) >= 32           # evenly, to the end
    nats = []
    for start in starts:
        row = torch.from_numpy(run.split.read(start, 33))
        nats.append(torch.nn.functional.cross_entropy(run.model(row[None, :-1]).logits[0].double(), row[1:], reduction="sum").item())
    assert (part["windows"], part["tokens"], part["whole_split"]) == (n, 32 * n, False) == (len(starts), 32 * len(starts), False)
    assert part["nats_per_token"] == pytest.approx(sum(nats) / (32 * n), abs=1e-6) and "--full=true" in lines[0]
    assert go("loss")[:2] == (lines, record)
    assert whole[1]["parts"]["loss"]["whole_split"] is True and whole[0][0] == "loss: the whole validation split at full depth"
    again, asked = go("loss", full=True)[:2]
    mean = lambda record: record["parts"]["loss"]["nats_per_token"]  # noqa: E731
    assert again == whole[0] and mean(asked) == mean(whole[1]) != mean(record)


def test_full_may_stand_alone():
    words = lambda *argv: (evaluation.parse(list(argv)).full, evaluation.parse(list(argv)).words)  # noqa: E731
    assert words("--full", "loss") == words("loss", "--full") == words("--full=true", "loss") == words("--full", "true", "loss") == (True, ["loss"])
    assert words("--full", "--batch_size=2") == (True, []) and words("--full", "false") == words() == (False, [])
    assert "full takes true or false" in refusal(evaluation.parse, ["--full", "maybe"])


def test_bits_per_byte_are_nats_times_tokens_per_byte_over_ln_2(go):
    run, numbers = open_run("out/gated"), go("loss")[1]["parts"]["loss"]
    tokenizer, ids = prepare.get_tokenizer("bytes"), run.split.read(0, 10**9).tolist()
    text = tokenizer.decode_bytes([i for i in ids if i != tokenizer.eot_token])
    assert "🦊".encode() in text and any(text == path.read_bytes() for path in Path("corpus").iterdir())       # mixed text, whole
    assert numbers["bits_per_byte"] == pytest.approx(numbers["nats_per_token"] * len(ids) / len(text) / math.log(2), abs=1e-12)
    assert evaluation.bits_per_nat({"tokens": 30, "bytes": 120}) == 0.25 / math.log(2)


def test_a_model_that_has_learned_nothing_has_the_loss_of_guessing(go):
    run, numbers = open_run("out/fresh"), go("loss", out_dir="out/fresh")[1]["parts"]["loss"]
    assert numbers["nats_per_token"] == pytest.approx(math.log(run.model.cfg.vocab_size), rel=0.05)


@pytest.mark.slow
def test_the_same_numbers_come_twice_and_at_any_batch_size(go):
    first, one, eight = (go("loss", "depth", "exit", **changes) for changes in ({}, dict(batch_size=1), dict(batch_size=8)))
    one, eight = one[1]["parts"], eight[1]["parts"]
    assert first[:2] == go("loss", "depth", "exit")[:2]
    for name in ("nats_per_token", "bits_per_byte", "interval"):
        assert one["loss"][name] == pytest.approx(eight["loss"][name], abs=1e-6)
    for a, b in zip(one["depth"]["points"], eight["depth"]["points"]):
        assert a["nats_per_token"] == pytest.approx(b["nats_per_token"], abs=1e-6)


# ---- against train.py


@pytest.mark.parametrize("name", ["gated", "dense", "sequence"])
def test_the_stored_loss_comes_out_again(go, name):
    lines, record, _ = go("loss", out_dir=f"out/{name}")
    t = record["parts"]["loss"]["train"]
    assert t["agrees"] is True and t["nats_per_token"] == pytest.approx(t["stored"], abs=1e-6) and t["windows"] == 8
    assert t["stored"] == train.load_checkpoint(Path("out", name, "ckpt.pt"))["val_loss"] and any("they agree" in line for line in lines)


@pytest.mark.parametrize("name", ["gated", "dense", "sequence"])
def test_the_same_windows_give_the_number_of_train_py(place, monkeypatch, name):
    monkeypatch.chdir(place)
    run = open_run(f"out/{name}", batch_size=3)
    starts, depths = train.fixed_windows(run.split, 512), [1] if name == "dense" else exit_depths(run.model.cfg)
    wanted = train.evaluate(run.model, run.split, starts, depths, 4, "cpu")
    nats, counts = evaluation.window_nats(run, starts, depths)
    assert nats.sum(1) / counts.sum() == pytest.approx(list(wanted.values()), abs=1e-6) and len(counts) == 16


def test_a_stored_loss_that_differs_is_told_and_so_is_one_that_need_not_agree(go):
    stored = train.load_checkpoint(Path("out/gated/ckpt.pt"))["val_loss"]
    edit("out/gated", val_loss=stored + 1e-5)
    lines, record, _ = go("loss")
    assert record["parts"]["loss"]["train"]["agrees"] is False and any("they differ by -1.0e-05" in line for line in lines)
    edit("out/gated", val_loss=stored, val_step=4)
    lines, record, _ = go("loss")
    assert record["parts"]["loss"]["train"]["agrees"] is None and any("of step 4 and the weights are of step 8" in line for line in lines)
    shutil.copytree("data/toy", "data/other")
    edit("out/gated", val_step=8)
    lines, record, _ = go("loss", dataset="other")
    assert record["parts"]["loss"]["train"]["agrees"] is None and any("is of data set 'toy'" in line for line in lines)
    assert record["parts"]["loss"]["data"]["dataset"] == "other"


@pytest.mark.slow
def test_the_checkpoint_of_a_compiled_model_is_measured_like_any_other(go):
    before = go("loss")[1]["parts"]["loss"]
    model, state = open_run("out/gated").model, train.load_checkpoint(Path("out/gated/ckpt.pt"))
    train.compile_parts(model, backend="eager")
    model(torch.zeros(1, 4, dtype=torch.long))
    edit("out/gated", model=model.state_dict())
    assert list(model.state_dict()) == list(state["model"]) and go("loss")[1]["parts"]["loss"] == before


def test_half_precision_is_measured_as_such(go):
    parts, exact = (go("loss", "depth", dtype=dtype)[1]["parts"] for dtype in ("bfloat16", "float32"))
    assert parts["loss"]["dtype"] == "bfloat16" and parts["loss"]["nats_per_token"] != exact["loss"]["nats_per_token"]
    for a, b in zip(parts["depth"]["points"], exact["depth"]["points"]):
        assert a["nats_per_token"] == pytest.approx(b["nats_per_token"], rel=0.01)


# ---- intervals and comparisons


def test_the_interval_is_that_of_the_mean_over_windows():
    rng = np.random.default_rng(1)
    nats, counts = rng.normal(64, 8, 400), np.full(400, 32.0)             # nats of windows of 32 tokens
    low, high = interval(bootstrap(nats, counts))
    assert low < nats.mean() / 32 < high and high - low == pytest.approx(2 * 1.96 * 8 / 32 / 20, rel=0.1)
    assert interval(bootstrap(nats, counts)) == [low, high] and len(bootstrap(nats, counts)) == 1000
    assert interval(bootstrap(nats, counts, seed=1)) != [low, high]


def test_a_short_window_weighs_by_its_tokens_and_one_window_has_no_interval():
    assert bootstrap(np.array([64.0, 2.0]), np.array([32.0, 1.0])) == pytest.approx(2)                        # 2 nats per token in both
    assert interval(bootstrap(np.array([5.0]), np.array([2.0]))) is None
    assert set(bootstrap(np.array([30.0, 2.0]), np.array([10.0, 1.0])).round(6)) == {3.0, round(32 / 11, 6), 2.0}


@pytest.mark.parametrize("n_windows", [7, 400])
def test_windows_are_drawn_once_for_all_numbers_and_many_of_them_some_resamples_at_a_time(n_windows, monkeypatch):
    rng, made, default_rng = np.random.default_rng(3), [], np.random.default_rng
    nats, counts = rng.normal(64, 8, (3, n_windows)), np.full(n_windows, 32.0)
    wanted, slow = [], default_rng(2)
    for draw in (slow.integers(n_windows, size=n_windows) for _ in range(1000)):
        wanted.append([row[draw].sum() / counts[draw].sum() for row in nats])
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or default_rng(seed))
    evaluation.kept_draws.cache_clear()
    assert np.array([bootstrap(row, counts, seed=2) for row in nats]) == pytest.approx(np.array(wanted).T, rel=1e-12) and made == [2]
    monkeypatch.setattr(evaluation, "DRAWN", 900)                         # numbers at a time: 128 resamples, or 2
    assert {len(draw_RW) for draw_RW in evaluation.draws(n_windows, 2, 1000)} == ({128, 104} if n_windows == 7 else {2})
    assert bootstrap(nats[0], counts, seed=2) == pytest.approx(np.array(wanted)[:, 0], rel=1e-12) and made == [2, 2, 2]


def test_what_is_not_finite_has_no_interval():
    for odd in (math.nan, math.inf):
        assert interval(bootstrap(np.array([5.0, odd, 3.0]), np.ones(3))) is None
    assert interval(np.array([1.0, math.inf])) is None and interval(np.array([1.0, 1.0])) == [1, 1]


def test_runs_are_compared_window_by_window(go):
    lines, record, _ = go("loss", compare="out/dense")
    part = record["parts"]["loss"]
    (other,), d = part["compare"], part["compare"][0]["difference"]
    assert (other["folder"], d["paired"], d["unit"]) == ("out/dense", True, "nats/token")
    assert d["value"] == pytest.approx(other["nats_per_token"] - part["nats_per_token"], abs=1e-12) and d["interval"][0] <= d["value"] <= d["interval"][1]
    assert d["interval"][1] - d["interval"][0] < part["interval"][1] - part["interval"][0]           # what is hard for one is hard for both
    assert any(line.startswith(f"out/dense minus out/gated: {d['value']:+.4f} nats/token") and "paired over 56 windows" in line for line in lines)


def test_a_run_beside_itself_differs_by_nothing(go):
    d = go("loss", compare="out/gated")[1]["parts"]["loss"]["compare"][0]["difference"]
    assert (d["value"], d["interval"], d["paired"]) == (0, [0, 0], True)


def test_runs_that_read_other_windows_are_not_paired_and_the_reason_is_told(go):
    lines, record, _ = go("loss", compare="out/wide")
    part = record["parts"]["loss"]
    d = part["compare"][0]["difference"]
    assert (d["paired"], d["unit"], d["why"]) == (False, "bits/byte", "block_size is 32 here and 48 there") and any(d["why"] in line for line in lines)
    assert d["value"] == pytest.approx(part["compare"][0]["bits_per_byte"] - part["bits_per_byte"], abs=1e-12)
    run, data = open_run("out/gated"), lambda run, **changes: run._replace(meta={**run.meta, **changes})
    assert why_unpaired(run, run) == ""
    assert why_unpaired(run, data(run, val={**run.meta["val"], "sha256": "0"})) == "the validation texts differ"
    assert why_unpaired(run, data(run, fingerprint="0")) == "the tokenizers differ"
    assert why_unpaired(run, data(run, fingerprint="0", val={"bytes": 1})) == "the tokenizers differ, and so do the texts"


def test_an_unpaired_interval_draws_the_windows_of_each_run_on_their_own(go):
    run = open_run("out/gated")
    other = run._replace(meta={**run.meta, "fingerprint": "0"})
    nats, counts = np.random.default_rng(0).normal(64, 8, 400), np.full(400, 32.0)
    low, high = difference(run, nats, counts, other, nats, counts)["interval"]
    assert low < 0 < high and (high - low) / run.bits == pytest.approx(2 * 1.96 * 8 / 32 / 20 * math.sqrt(2), rel=0.1)


@pytest.mark.slow
def test_runs_with_other_tokenizers_are_compared_in_bits_per_byte(go, monkeypatch):
    pairs = tiktoken.Encoding("pairs", pat_str=r"[\s\S]{1,64}", special_tokens={"<|endoftext|>": 258},
                              mergeable_ranks={**{bytes([i]): i for i in range(256)}, b"se": 256, b"re": 257})
    real = prepare.get_tokenizer
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: pairs if name == "pairs" else real(name))
    prepare.prepare("corpus", name="pairs", tokenizer="pairs", quiet=True)
    make_config(Path(), max_iters=4, dataset="pairs", eval_tokens=256)
    train.main(["toy.py", "--out_dir=out/pairs"])
    lines, record, _ = go(out_dir="out/gated", compare="out/pairs")
    part, n_bytes = record["parts"]["loss"], open_run("out/gated").meta["val"]["bytes"]
    other = part["compare"][0]
    assert other["tokens"] < part["tokens"] and other["data"]["bytes"] == n_bytes                   # the same text in fewer tokens
    assert other["bits_per_byte"] == pytest.approx(other["nats_per_token"] * (other["tokens"] + 1) / n_bytes / math.log(2), abs=1e-12)
    assert (other["difference"]["unit"], other["difference"]["why"]) == ("bits/byte", "the tokenizers differ")
    assert any("compare bits/byte alone" in line for line in lines)
    assert "data set 'pairs' has tokenizer 'pairs'" in refusal(evaluation.main, ["--dataset=pairs", "--out_dir=out/gated"])


# ---- depth


@pytest.mark.parametrize("changes", [dict(n_prelude=1, n_recur=3, n_coda=1, update=update) for update in ("replace", "inject", "gate")]
                         + [dict(n_recur=2, block="llama"), dict(n_recur=1, update="gate"), dict(n_prelude=1, n_recur=2, sharing="middle_sequence")])
def test_one_pass_gives_what_a_forward_pass_to_each_depth_gives(changes, monkeypatch):
    model, ids_BT, targets_BT, steps = loud(tiny(**changes)), some_ids(2, 32), some_ids(2, 32, seed=2), []
    R, depths = model.cfg.n_recur, exit_depths(model.cfg)
    wanted = [model(ids_BT, targets_BT, depth=depth).losses["ce"].item() for depth in depths]
    step, finish = Recursion.step, GPT.finish
    monkeypatch.setattr(Recursion, "step", lambda *args: steps.append("step") or step(*args))
    monkeypatch.setattr(GPT, "finish", lambda *args: steps.append("finish") or finish(*args))
    found = [row_nats(model, x_BTD, targets_BT) for x_BTD in features_at(model, ids_BT, depths)]
    assert [(nats_B.sum() / count_B.sum()).item() for nats_B, count_B in found] == pytest.approx(wanted, abs=1e-6)
    assert len(set(wanted)) == len(depths)                               # every depth has its own loss, so a mix-up would show
    if model.cfg.any_depth:
        assert depths == list(range(2 * R + 1)) and (steps.count("step"), steps.count("finish")) == (2 * R, 2 * R + 1)
    else:
        assert depths == [R] and (steps.count("step"), steps.count("finish")) == (R, 1)


@pytest.mark.parametrize("changes", [{}, dict(n_prelude=1, n_coda=1), dict(block="llama", sharing="sequence"), dict(lora_rank=2), dict(loop_norm=True),
                                     dict(loop_norm=True, n_coda=1), dict(kv="share"), dict(kv="share_k")])
def test_a_dense_model_left_after_k_blocks_is_the_model_of_k_blocks(changes):
    cfg = tiny(n_core=3, **changes)
    model, ids_BT = loud(cfg), some_ids(2, 32)
    depths = exit_depths(cfg)
    assert depths == [0, 1 / 3, 2 / 3, 1]
    for k, (depth, x_BTD) in enumerate(zip(depths, features_at(model, ids_BT, depths))):
        if k:
            short = GPT(replace(cfg, n_core=k)).eval()
            weights = {name: w for name, w in model.state_dict().items() if not any(f".{j}." in name.removeprefix("coda.0") for j in range(k, 3))}
            short.load_state_dict(weights)
            assert torch.allclose(model.head(x_BTD), short(ids_BT).logits, atol=1e-5)
            assert cfg.flops_per_token(32, depth=depth) == pytest.approx(short.cfg.flops_per_token(32), rel=1e-12)
        else:
            assert torch.allclose(model.head(x_BTD), model(ids_BT, depth=0).logits if cfg.any_depth else model.head(model.norm(model.embed(ids_BT))), atol=1e-5)


def test_the_sweep_gives_the_loss_and_the_flops_of_every_depth(go):
    lines, record, _ = go("depth", compare="out/dense", eval_tokens=256)
    part, run = record["parts"]["depth"], open_run("out/gated")
    wanted = train.evaluate(run.model, run.split, train.fixed_windows(run.split, 256), range(9), 4, "cpu")
    assert [p["depth"] for p in part["points"]] == list(range(9)) and (part["windows"], part["tokens"]) == (8, 256)
    for p in part["points"]:
        assert p["nats_per_token"] == pytest.approx(wanted[p["depth"]], abs=1e-6) and p["bits_per_byte"] == pytest.approx(p["nats_per_token"] * run.bits)
        assert p["flops_per_token"] == run.model.cfg.flops_per_token(32, depth=p["depth"])
    assert [p["training"] for p in part["points"]] == ["never trained"] + 3 * ["trained"] + ["full depth"] + 4 * ["never trained"]
    dense, cells = part["compare"][0], [line.split() for line in lines]
    assert [p["depth"] for p in dense["points"]] == [0, 1 / 3, 2 / 3, 1] and dense["folder"] == "out/dense"
    assert [row[1] for row in cells if row[0] == "out/dense"] == ["0/3", "1/3", "2/3", "3/3"]
    assert [float(row[3]) for row in cells if row[0] == "out/gated"] == pytest.approx([p["nats_per_token"] for p in part["points"] + part["held"]], abs=1e-4)
    assert len({line.rstrip().find("full depth") for line in lines if "full depth" in line}) == 1                # aligned


def test_a_model_whose_steps_differ_has_one_depth_and_says_so(go):
    lines, record, _ = go("depth", out_dir="out/sequence")
    assert [p["depth"] for p in record["parts"]["depth"]["points"]] == [2] and any("one depth only, n_recur=2" in line for line in lines)


@pytest.mark.slow
def test_the_picture_has_a_line_for_every_run(go, monkeypatch):
    from matplotlib.figure import Figure
    monkeypatch.setattr(evaluation, "draw", DRAW)
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure) or savefig(figure, *args, **kwargs))
    record = go("depth", compare="out/dense")[1]
    part, (axes, _) = record["parts"]["depth"], drawn[0].axes
    assert Path(part["picture"]).read_bytes()[:4] == b"\x89PNG" and part["picture"] == "out/gated/depth.png"
    lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    assert list(lines) == ["1+1x4+1 gate (out/gated)", "0+3x1+0 replace (out/dense)"] == [text.get_text() for text in axes.get_legend().get_texts()]
    for line, points in zip(lines.values(), (part["points"], part["compare"][0]["points"])):
        assert list(line.get_xdata()) == [p["flops_per_token"] for p in points] and list(line.get_ydata()) == [p["nats_per_token"] for p in points]
    assert axes.get_xscale() == "log" and "FLOPs" in axes.get_xlabel() and "nats per token" in axes.get_ylabel()


def test_without_matplotlib_one_line_says_so_and_the_numbers_come(go, monkeypatch):
    monkeypatch.setattr(evaluation, "draw", DRAW)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    evaluation.no_pictures.cache_clear()
    lines, record, err = go("depth")
    assert record["parts"]["depth"]["picture"] is None and err.count("matplotlib") == 2 and not Path("out/gated/depth.png").exists()
    assert len([line for line in err.splitlines() if "matplotlib" in line]) == 1


# ---- the command and its record


def test_the_record_says_what_it_was_made_from(go):
    lines, record, err = go("loss")
    part, meta = record["parts"]["loss"], prepare.load_meta("data", "toy")
    assert (record["folder"], record["step"]) == ("out/gated", 8) and (part["device"], part["dtype"], part["commit"]) == ("cpu", "float32", train.commit())
    assert [part[name] for name in ("python", "torch", "numpy", "platform")] == [platform.python_version(), str(torch.__version__), np.__version__, platform.platform()]
    assert part["data"] == {"dataset": "toy", "path": "data/toy/val.bin", "fingerprint": meta["fingerprint"], **meta["val"]}
    settings = evaluation.parse(["loss", *flags(device="cpu", exit_tokens=0, exit_thresholds=[0.1])])
    assert part["settings"] == {"parts": ["loss"], **settings.values, "dtype": "auto"}
    assert part["used"] == {"depth": 4, "routing": None, "threshold": None, "exit": None, "exit_threshold": None}
    assert "1+1x4+1 update=gate, step 8" in err and json.loads(Path("out/gated/eval.json").read_text("utf-8")) == record
    (head, row), columns = lines[1:3], 8
    assert len(head.replace("95% interval", "95%interval").split()) == columns and row.split()[:3] == ["out/gated", "8", f"{part['nats_per_token']:.4f}"]


@pytest.mark.slow
def test_earlier_parts_stay_while_the_checkpoint_is_the_same(go):
    path = Path("out/gated/eval.json")
    first = go("loss")[1]
    second = go("depth")[1]
    assert list(second["parts"]) == ["depth"]
    kept = json.loads(path.read_text("utf-8"))
    assert kept["parts"] == {**first["parts"], **second["parts"]} and kept == {**second, "parts": kept["parts"]}
    os.utime("out/gated/ckpt.pt")                                       # touched, not changed
    go("depth")
    assert json.loads(path.read_text("utf-8")) == kept
    state = train.load_checkpoint(Path("out/gated/ckpt.pt"))
    edit("out/gated", model={name: w + 0.01 for name, w in state["model"].items()})
    third = go("depth")[1]
    assert json.loads(path.read_text("utf-8")) == third and third["checkpoint"] != first["checkpoint"] and third["step"] == first["step"]
    for damage in ("", "[]", "{}", '{"step": 8}'):
        path.write_text(damage)
        assert go("depth")[1] == json.loads(path.read_text("utf-8"))


def test_all_parts_run_for_the_newest_run_when_nothing_is_said(go):
    lines, record, err = go()
    has_none, by_name = {"router", "answers"}, {"benchmarks"}
    assert record["folder"] == "out/gated" and list(record["parts"]) == [name for name in evaluation.PARTS if name not in has_none | by_name]
    assert list(record["parts"])[:2] == ["loss", "depth"] and "exit" in record["parts"]
    assert err.count("note: left out: router (out/gated has no router), answers (data set 'toy' of out/gated asks for no answers)") == 1
    assert list(go("depth", "loss", "depth")[1]["parts"]) == ["depth", "loss"]


def test_parts_that_lack_something_are_refused_by_name_and_left_out_unnamed(place, monkeypatch):
    monkeypatch.chdir(place)
    part, run, asked = evaluation.Part, SimpleNamespace(name="out/x"), []
    table = {"one": part(None), "two": part(None, lambda run: f"{run.name} has no two"), "three": part(None, unnamed=lambda run: asked.append(run)),
             "four": part(None, lambda run: "")}
    monkeypatch.setattr(evaluation, "PARTS", table)
    assert evaluation.parts_for([], run) == ["one", "four"] and asked == [run]
    assert evaluation.parts_for(["four", "three", "four"], run) == ["four", "three"]
    assert refusal(evaluation.parts_for, ["one", "two"], run) == ("out/x has no two, so there is nothing for the part two; name another run with --out_dir=, "
                                                                   "or leave the part out")


class Terminal(io.StringIO):
    """What a terminal would show: carriage returns, line ends and the moves up of stacked bars, on a screen without width."""

    def isatty(self):
        return True

    def lines(self):
        screen, row, column, text = [""], 0, 0, self.getvalue().replace("\x1b[A", "\v")
        for c in text:
            if c == "\n":
                row, column = row + 1, 0
                screen += [""] * (row == len(screen))
            elif c in "\r\v":
                row, column = row - (c == "\v"), 0 if c == "\r" else column
            else:
                screen[row] = screen[row].ljust(column)[:column] + c + screen[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in screen]


def test_a_bar_over_the_whole_leaves_every_line_of_the_tables_whole(go, monkeypatch):
    plain, *_ = go("loss", "depth", eval_tokens=256)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    evaluation.main(["loss", "depth", "--eval_tokens=256", "--device=cpu"])
    shown = screen.lines()
    assert [line for line in shown if line in {text.rstrip() for text in plain}] == [text.rstrip() for text in plain]
    assert any("evaluation: 100%" in line and "2/2" in line for line in shown) and not any("out/gated:  " in line for line in shown)


def test_a_mistake_is_one_line(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "eval")
    monkeypatch.chdir(tmp_path / "eval")
    said = lambda *argv: refusal(evaluation.main, list(argv))  # noqa: E731
    assert "no part 'dept', did you mean 'depth'?" in said("dept")
    assert f"no part 'xyz'; its parts are {', '.join(evaluation.PARTS)}" in said("xyz")
    assert "out/gated has no router, so there is nothing for the part router" in said("router")
    assert "a run is --out_dir=out/gated" in said("out/gated")
    assert "--depth=2 is for the part benchmarks" in said("depth", "--depth=2") and "--limit=2 is for" in said("--limit=2")
    assert set(evaluation.OF_BENCHMARKS) == {key.name for key in fields(evaluation.EvalConfig) if key.metadata["help"].startswith("benchmarks")}
    Path("toy.py").touch()
    assert "no part 'toy.py'; its parts are" in said("toy.py")                   # a config, not a run
    assert "eval_tokens=0 is out of range" in said("--eval_tokens=0") and "batch_size=0" in said("--batch_size=0")
    Path("out/empty").mkdir()
    for name in ("out_dir", "compare"):
        line = said(f"--{name}=out/empty")
        assert "out/empty/ckpt.pt" in line.replace(os.sep, "/") and "python train.py config/grt_tiny.py" in line
    assert "no data set 'toi'" in said("--dataset=toi") and "toy" in said("--dataset=toi")
    os.rename("data", "moved")
    assert "no data set 'toy' in data/" in (line := said()) and "--data_dir=" in line
    evaluation.main(["loss", "--data_dir=moved"])
    meta = json.loads(Path("moved/toy/meta.json").read_text("utf-8"))
    Path("moved/toy/meta.json").write_text(json.dumps({**meta, "fingerprint": "0"}))
    assert "has tokenizer 'bytes' (0), but out/gated was trained with 'bytes'" in said("--data_dir=moved").replace(os.sep, "/")
    Path("moved/toy/meta.json").write_text(json.dumps({**meta, "val": {**meta["val"], "tokens": 32}}))
    Path("moved/toy/val.bin").write_bytes(bytes(64))
    assert "holds 32 tokens" in (line := said("--data_dir=moved")) and "--dataset=" in line
    edit("out/gated", settings={})
    assert "not a whole checkpoint" in said()


def test_a_folder_that_cannot_be_written_costs_no_result(go, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(evaluation, "draw", DRAW)
    monkeypatch.setattr(evaluation, "draw_exit", DRAW_EXIT)
    for name in ("eval.json", "depth.png", "exit.png"):
        Path(f"out/gated/{name}.tmp").mkdir()                            # write_whole's place
    evaluation.main(["loss", "depth", "exit", "--device=cpu", "--exit_tokens=0", "--exit_thresholds=0.1"])
    out, err = capsys.readouterr()
    assert {"loss", "depth", "exit"} <= set(json.loads(out.splitlines()[-1])["parts"])
    assert err.count("no picture: could not save") == 2 and err.count("note: could not save out/gated/eval.json") == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, UserError])
def test_parts_that_are_there_outlive_ctrl_c_and_a_mistake_in_a_later_one(go, monkeypatch, stop):
    monkeypatch.setitem(evaluation.PARTS, "depth", evaluation.Part(lambda runs, s: (_ for _ in ()).throw(stop("stop"))))
    with pytest.raises(stop):
        evaluation.main(["loss", "depth", "--device=cpu"])
    kept = json.loads(Path("out/gated/eval.json").read_text("utf-8"))
    assert list(kept["parts"]) == ["loss"] and kept["parts"]["loss"]["tokens"] == 1784 and kept["step"] == 8 and kept["parts"]["loss"]["commit"]
    Path("out/gated/eval.json").unlink()
    with pytest.raises(stop):
        evaluation.main(["depth", "--device=cpu"])
    assert not Path("out/gated/eval.json").exists()                      # of nothing there is no record


def test_a_kept_checkpoint_is_measured_by_its_own_name(go, capsys):
    Path("out/gated/ckpt-00000003.pt").write_bytes(Path("out/gated/ckpt.pt").read_bytes())
    records = []
    for out_dir in ("out/gated/ckpt-00000003.pt", "out/gated"):
        evaluation.main(["loss", f"--out_dir={out_dir}", "--device=cpu"])
        records.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [r["folder"] for r in records] == ["out/gated/ckpt-00000003.pt", "out/gated"] and Path("out/gated/eval.json").is_file()
    assert records[0]["parts"]["loss"]["nats_per_token"] == records[1]["parts"]["loss"]["nats_per_token"]


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(go, monkeypatch):
    load_run = evaluation.load_run
    monkeypatch.setattr(evaluation, "load_run", lambda *args: edit("out/gated", step=9) or load_run(*args))
    assert "saved anew while it was read" in refusal(evaluation.main, ["--device=cpu"])


@pytest.mark.slow
def test_it_runs_as_a_script_and_a_pipe_sees_no_bar(go):
    script = [sys.executable, str(Path(evaluation.__file__))]
    done = subprocess.run([*script, "loss", "--device=cpu"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "it/s" not in done.stderr and json.loads(done.stdout.splitlines()[-1])["parts"]["loss"]["tokens"] == 1784
    wrong = subprocess.run([*script, "los"], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)
