"""A run survives: kills inside a save, Ctrl-C, other budgets (cool-downs), other beginnings (fine-tuning), less memory.

    python -m pytest -q tests/test_nothing_lost.py
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny import loud, some_ids, tiny
from toy import DENSE, flags, make_config, make_data, refusal

import bench
import train
from model import GPT, GPTConfig
from train import learning_rate

pytestmark = pytest.mark.slow

ROOT = Path(train.__file__).resolve().parent
posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
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


def checkpoint(path):
    return torch.load(path / "ckpt.pt" if path.is_dir() else path, weights_only=True)


def curve(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return {r["step"]: (r["loss"], r["grad_norm"], r["depth"], r["lr"]) for r in records if r["event"] == "step"}


def assert_same_run(a, b):
    """Weights and optimizer bit for bit."""
    a, b = checkpoint(a), checkpoint(b)
    assert a["step"] == b["step"] and all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    for i, own in a["optimizer"]["state"].items():
        assert all(torch.equal(own[name], b["optimizer"]["state"][i][name]) for name in own)


# -------------------------------------------------------------------------------------------------- kills inside a save


class Dying:
    """A file that kills its process once `at` bytes have gone through."""

    def __init__(self, file, at):
        self.file, self.left = file, at

    def write(self, data):
        data = bytes(data)
        if len(data) >= self.left:
            self.file.write(data[: self.left])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= len(data)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def kill_in(where, rng, size):
    """Hook one place of a save, in this process, so that it dies there: at the n-th call of it, before or after its work."""
    if where == "write":
        at, save = rng.randrange(1, size), torch.save
        torch.save = lambda state, file: save(state, Dying(file, at))
        return
    after, work = rng.random() < 0.5, getattr(os, where)

    def dying(*args):
        if after:
            work(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, where, dying)


@posix
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_kill_inside_a_save_leaves_the_old_file_or_the_new_one(tmp_path, where):
    path = tmp_path / "ckpt.pt"
    state = lambda step: {"format": 1, "step": step, "model": {"w": torch.full((40, 50), float(step))}}  # noqa: E731
    train.save_checkpoint(tmp_path / "new.pt", state(2))
    new = (tmp_path / "new.pt").read_bytes()
    train.save_checkpoint(path, state(1))
    old, seen = path.read_bytes(), []
    for seed in range(20):
        path.write_bytes(old)
        child = os.fork()
        if child == 0:
            try:
                kill_in(where, random.Random(seed), len(new))
                train.save_checkpoint(path, state(2))
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert path.read_bytes() in (old, new)
        seen.append(path.read_bytes() == new)
        assert train.load_checkpoint(path)["step"] == 1 + seen[-1]
    assert set(seen) == ({False} if where in ("write", "fsync") else {False, True})
    train.save_checkpoint(path, state(3))                            # what a kill left aside is in nobody's way
    assert train.load_checkpoint(path)["step"] == 3 and sorted(os.listdir(tmp_path)) == ["ckpt.pt", "new.pt"]


@posix
def test_a_rename_is_on_the_disk_before_a_save_returns(tmp_path, monkeypatch):
    calls = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *args: calls.append("replace") or replace(*args))
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file") or fsync(handle))
    train.save_checkpoint(tmp_path / "ckpt.pt", {"format": 1})
    assert calls == ["file", "replace", "folder"] or not Path("/proc/self/fd").is_dir()


@posix
@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(go, tmp_path):
    whole = go(max_iters=12, eval_interval=3, out_dir="out/whole")
    command = [sys.executable, str(ROOT / "train.py"), "toy.py", *flags(max_iters=12, eval_interval=3, out_dir="out/killed")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step      7"):
            process.kill()
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL and checkpoint(Path("out/killed"))["step"] in (6, 9, 12)
    go(max_iters=12, eval_interval=3, out_dir="out/killed", init_from="resume")
    assert_same_run(Path("out/killed"), whole)
    assert curve(Path("out/killed")) == curve(whole)


# ---------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_at(monkeypatch, step):
    """A SIGINT between the gradient and the update of a step."""
    steps, clip = iter(range(1, 1000)), train.clip_gradients

    def clip_gradients(*args):
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return clip(*args)
    monkeypatch.setattr(train, "clip_gradients", clip_gradients)


@posix
@pytest.mark.parametrize("step, eval_interval", [(3, 0), (4, 4), (10, 0)])
def test_ctrl_c_finishes_the_step_saves_and_the_rest_can_follow(go, monkeypatch, capsys, step, eval_interval):
    whole = go(max_iters=10, out_dir="out/whole", eval_interval=eval_interval)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, step)
        go(max_iters=10, eval_interval=eval_interval)
    assert signal.getsignal(signal.SIGINT) is handler
    out, err = capsys.readouterr()
    assert "Ctrl-C again quits at once" in err and f"stopped after step {step}" in out and "--init_from=resume --out_dir=out/toy" in out
    state = checkpoint(Path("out/toy"))
    assert state["step"] == step and state["val_step"] == (step if eval_interval or step == 10 else 0)
    go(max_iters=10, eval_interval=eval_interval, init_from="resume")
    assert_same_run(Path("out/toy"), whole)


@posix
@pytest.mark.slow
def test_ctrl_c_as_a_user_sees_it(go, tmp_path):
    """One: exit code 130 and a checkpoint of the step at hand. Two: the end at once, with the last checkpoint whole."""
    slow = flags(max_iters=10**6, gradient_accumulation_steps=100, log_interval=1)
    for n, out_dir in ((1, "out/one"), (2, "out/two")):
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "toy.py", *slow, f"--out_dir={out_dir}"], cwd=tmp_path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith("step      1"):
                break
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() + process.stderr.readline() == "\nfinishing this step, then saving (Ctrl-C again quits at once)\n"
        if n == 2:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        state = train.load_checkpoint(tmp_path / out_dir / "ckpt.pt")
        assert (process.returncode, state["step"] >= 1) == ((130, True) if n == 1 else (-signal.SIGINT, False))
        assert ("stopped after step" in out) == (n == 1)


# ------------------------------------------------------------------------------------------------ trapezoid and cool-down


def wsd(**changes):
    return types.SimpleNamespace(**{"learning_rate": 1.0, "schedule": "wsd", "min_lr": None, "lr_decay_iters": None, "cooldown_iters": None,
                                    "warmup_iters": 10, "max_iters": 100, **changes})


def test_the_trapezoid_rises_stays_and_falls_to_zero_over_the_last_fifth():
    rates = [learning_rate(step, wsd()) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10:81] == [1] * 71 and rates[81:] == pytest.approx([1 - k / 20 for k in range(1, 21)]) and rates[99] > rates[100] == 0
    assert [learning_rate(step, wsd(cooldown_iters=50, min_lr=0.2)) for step in (50, 75, 100, 120)] == pytest.approx([1, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("max_iters", [1, 2, 10])
def test_every_trapezoid_moves_at_its_first_and_last_step(max_iters):
    for warmup_iters in (0, 1, max_iters, max_iters + 1):
        for cooldown_iters in (None, 0, 1, max_iters, max_iters + 5):
            rates = [learning_rate(step, wsd(max_iters=max_iters, warmup_iters=warmup_iters, cooldown_iters=cooldown_iters)) for step in range(max_iters)]
            assert all(0 < rate <= 1 for rate in rates), (warmup_iters, cooldown_iters)


def test_a_cool_down_from_a_stable_checkpoint_is_the_run_of_that_budget(go, capsys):
    """One long run serves several budgets: 10 steps, 8 of them stable, are the first 8 of 100 and a cool-down of 2."""
    long = go(schedule="wsd", max_iters=9, lr_decay_iters=100, warmup_iters=2, keep_interval=4)      # ended early: the rates are the long run's
    assert sorted(path.name for path in long.glob("ckpt*")) == ["ckpt-00000004.pt", "ckpt-00000008.pt", "ckpt.pt"]
    short = go(schedule="wsd", max_iters=10, warmup_iters=2, out_dir="out/short")
    assert (short / "ckpt-00000008.pt").exists()                      # the start of a cool-down is always kept
    capsys.readouterr()
    cooled = go(schedule="wsd", max_iters=100, warmup_iters=2, cooldown_from=long / "ckpt-00000008.pt", out_dir="out/cooled")
    assert "max_iters                   = 10           cooldown_from step 8" in re.sub(r" +=", "                   =", capsys.readouterr().out)
    assert_same_run(cooled, short)
    assert curve(cooled) == {step: curve(short)[step] for step in (9, 10)}
    again = go(schedule="wsd", warmup_iters=2, cooldown_from=long / "ckpt-00000004.pt", cooldown_iters=3, out_dir="out/other")
    assert checkpoint(again)["step"] == 7 and curve(again)[7][3] == pytest.approx(1e-2 / 3)
    train.main(["--init_from=resume", "--out_dir=out/other"])         # and such a run can itself be continued
    assert checkpoint(again)["step"] == 7


def test_without_a_config_a_cool_down_and_a_fine_tuning_take_that_of_their_run(go):
    long = go(schedule="wsd", max_iters=20, keep_interval=12, out_dir="out/long")
    train.main([f"--cooldown_from={long}/ckpt-00000012.pt"])
    assert checkpoint(Path("out/long-2"))["step"] == 15 and checkpoint(long)["step"] == 20                # 12 are four fifths of 15
    train.main([f"--init_from={long}", "--max_iters=1"])
    state = checkpoint(Path("out/long-3"))
    assert state["step"] == 1 and state["model_config"]["n_embd"] == 16 and checkpoint(long)["step"] == 20


def test_the_config_of_a_resumed_run_begins_a_new_run(go):
    folder = go(max_iters=1)
    go(max_iters=2, init_from="resume", out_dir="out/toy")
    before = (folder / "ckpt.pt").read_bytes()
    train.main([str(folder / "config.py"), "--max_iters=3"])
    assert (folder / "ckpt.pt").read_bytes() == before and checkpoint(Path("out/toy-2"))["step"] == 3
    assert checkpoint(folder)["settings"]["init_from"] == "scratch"


def test_a_larger_budget_keeps_its_own_start_of_a_cool_down(go):
    folder = go(schedule="wsd", max_iters=8, lr_decay_iters=100, warmup_iters=1)
    assert [path.name for path in folder.glob("ckpt-*")] == []
    go(schedule="wsd", max_iters=10, warmup_iters=1, init_from="resume")
    assert checkpoint(folder / "ckpt-00000008.pt")["step"] == 8


@pytest.mark.parametrize("changes, words", [
    (dict(cooldown_iters=3), "cooldown_iters=3 has no effect with schedule='cosine'"), (dict(parallel="fsdp"), "parallel='fsdp' has no effect on one process"),
    (dict(schedule="wsd", warmup_iters=100), "no stable phase: warm-up to step 100, cool-down from 3"),
    (dict(lr_decay_iters=2), "lr_decay_iters=2: from there to step 4 the rate stays at its lowest"),
    (dict(batch_size=600), "4.0 passes over the training tokens")])
def test_settings_that_do_nothing_or_too_much_are_noted(go, capsys, monkeypatch, changes, words):
    monkeypatch.setattr(train.Run, "train", lambda run: None)
    go(**changes)
    assert f"note: {words}" in capsys.readouterr().out
    go(out_dir="out/calm")
    assert words not in capsys.readouterr().out


@pytest.mark.parametrize("run, flag, words", [
    (dict(schedule="wsd", keep_interval=1), dict(schedule="wsd", cooldown_from="out/toy/ckpt-00000001.pt"), "step 1 is not in the stable phase of a trapezoid (steps 2 to 3)"),
    (dict(schedule="wsd", keep_interval=1), dict(schedule="wsd", cooldown_from="out/toy/ckpt-00000004.pt"), "step 4 is not in the stable phase"),
    (dict(schedule="wsd", keep_interval=1), dict(cooldown_from="out/toy/ckpt-00000003.pt"), "add --schedule=wsd"),
    (dict(keep_interval=1), dict(schedule="wsd", cooldown_from="out/toy/ckpt-00000003.pt"), "and that run, schedule='cosine', has none"),
    (dict(), dict(schedule="wsd", cooldown_from="out/none.pt"), "no checkpoint at out/none.pt"),
    (dict(), dict(schedule="wsd", cooldown_from="out/toy"), "'out/toy' cannot be read"),
    (dict(schedule="wsd", keep_interval=1), dict(schedule="wsd", cooldown_from="out/toy/ckpt-00000003.pt", n_recur=3), "n_recur=3, but the checkpoint has n_recur=4")])
def test_a_cool_down_that_makes_no_sense_is_one_line(go, run, flag, words):
    go(**run)
    assert words in refusal(go, **flag, out_dir="out/cooled") and not Path("out/cooled/ckpt.pt").exists()


# ------------------------------------------------------------------------------------------------- from another's weights


@pytest.mark.slow
def test_a_new_run_can_start_from_the_weights_of_another(go):
    first = go(out_dir="out/first")
    for source in (first, first / "ckpt.pt"):
        tuned = go(init_from=source, out_dir=f"out/from {source.name}", max_iters=0)
        state = checkpoint(tuned)
        assert state["step"] == 0 and all(torch.equal(p, checkpoint(first)["model"][name]) for name, p in state["model"].items())
        assert state["val_loss"] == pytest.approx(checkpoint(first)["val_loss"], abs=1e-6) and not state["optimizer"]["state"]
    assert checkpoint(go(init_from=first, out_dir="out/deeper", n_recur=6, max_iters=1))["model_config"]["n_recur"] == 6
    assert "init_from='first' is neither scratch, resume nor a checkpoint that exists" in refusal(go, init_from="first")
    assert "n_embd is 16 there and 32 here; give the model keys of that run" in refusal(go, init_from=first, n_embd=32, out_dir="out/wider")
    assert "give one of them" in refusal(go, init_from=first, cooldown_from=first)


def test_weights_alone_start_a_new_run_and_cannot_be_resumed(go):
    folder = go(max_iters=1)
    state = checkpoint(folder)
    torch.save({name: value for name, value in state.items() if name != "optimizer"}, folder / "ckpt.pt")
    assert "no optimizer; a new run can start from them: --init_from=PATH" in refusal(go, init_from="resume", max_iters=2)
    assert checkpoint(go(init_from=folder, out_dir="out/tuned"))["step"] == 4


@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_a_shorter_context_starts_from_the_first_positions(go, block):
    first = go(block=block, max_iters=1)
    short = checkpoint(go(block=block, init_from=first, block_size=16, max_iters=0, out_dir="out/short"))
    model, ids_BT = GPT(GPTConfig(**short["model_config"])).eval(), some_ids(2, 16)
    model.load_state_dict(short["model"])
    whole = GPT(GPTConfig(**checkpoint(first)["model_config"])).eval()
    whole.load_state_dict(checkpoint(first)["model"])
    torch.testing.assert_close(model(ids_BT).logits, whole(ids_BT).logits)
    assert "a run that goes on keeps its model keys" in refusal(go, block=block, init_from="resume", block_size=16)
    if block == "gpt2":
        assert "needs positions that it never learned; it has 32" in refusal(go, block=block, init_from=first, block_size=48, out_dir="out/long")


# ---------------------------------------------------------------------------------------------------------- less memory


def peak(cfg, depth, lean):
    """Bytes of the tensors alive at the fullest moment of a forward and backward pass, without what was there before."""
    torch.manual_seed(0)
    model, ids_BT = GPT(cfg).train(), some_ids(4, 32)
    if lean:
        train.checkpoint_activations(model)
    with bench.Live([*model.parameters(), ids_BT]) as live:
        before = live.peak
        model(ids_BT, ids_BT, depth=depth, seed=(1, 2)).loss.backward()
    return live.peak - before


@pytest.mark.slow
@pytest.mark.parametrize("update", ["gate", "replace"])
def test_with_recomputation_a_step_more_costs_one_state(update):
    cfg = tiny(n_embd=64, n_prelude=1, n_core=2, n_recur=10, n_coda=1, update=update, state_noise=0.1, gate_noise=0.1, fused_loss=True)
    state = 4 * 4 * 32 * 64                                          # float32, B, T, D
    lean, plain = ({depth: peak(cfg, depth, lean) for depth in (4, 7, 10)} for lean in (True, False))
    for a, b in ((4, 7), (7, 10)):
        assert (lean[b] - lean[a]) / 3 == pytest.approx(state, rel=0.05)
        assert (plain[b] - plain[a]) / 3 > 20 * state


def test_recomputation_helps_a_plain_transformer_block_by_block():
    small, large = (tiny(n_embd=64, n_core=n, fused_loss=True) for n in (4, 8))
    weights = 4 * (large.n_params() - small.n_params())              # their gradients are alive at the end too
    state = 4 * 4 * 32 * 64
    assert peak(large, 1, True) - peak(small, 1, True) < weights + 4 * 1.5 * state
    assert peak(large, 1, False) - peak(small, 1, False) > 4 * 12 * state


@pytest.mark.parametrize("keys", [dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate", state_noise=0.3, gate_noise=0.3), dict(n_core=3),
                                  dict(n_core=2, n_recur=2, sharing="sequence", block="llama")])
def test_what_is_computed_again_draws_the_same_noise_and_dropout(keys):
    cfg, grads = tiny(**keys, dropout=0.2, fused_loss=True), []
    for lean in (False, True):
        model = loud(cfg).train()
        if lean:
            train.checkpoint_activations(model)
        torch.manual_seed(5)
        loss = model(some_ids(2, 16), some_ids(2, 16, seed=2), seed=(1, 2)).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert list(model.state_dict()) == list(loud(cfg).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and grads[0][1].abs().sum() > 0


def test_a_run_with_recomputation_is_the_same_run(go):
    assert_same_run(go(checkpoint_activations=True, dropout=0.1, out_dir="out/lean"), go(dropout=0.1, out_dir="out/plain"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kilobytes there")
def test_resuming_needs_little_more_memory_than_starting(go, tmp_path):
    def peak_rss(*words):
        code = ("import sys, resource; sys.path.insert(0, sys.argv.pop(1)); import train; train.main(sys.argv[1:]); "
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
        done = subprocess.run([sys.executable, "-c", code, str(ROOT), "toy.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])
    big = flags(**DENSE | dict(n_core=4, n_embd=512, n_head=8, batch_size=1, max_iters=1))           # 13M parameters, 150 MB with AdamW's moments
    fresh = peak_rss(*big)
    assert peak_rss(*big, "--init_from=resume", "--max_iters=2") < 1.3 * fresh


# ----------------------------------------------------------------------------------------------------- losses, the log


@pytest.mark.parametrize("log_interval, eval_interval", [(100, 0), (100, 3), (1, 0)])
def test_the_step_at_which_the_loss_broke_is_named_whenever_it_is_found(go, monkeypatch, log_interval, eval_interval):
    steps, clip = iter(range(1, 100)), train.clip_gradients

    def clip_gradients(model, grad_clip):
        if next(steps) == 2:
            model.embed.weight.grad[3] = float("nan")
        return clip(model, grad_clip)
    monkeypatch.setattr(train, "clip_gradients", clip_gradients)
    message = refusal(go, max_iters=6, log_interval=log_interval, eval_interval=eval_interval, keep_interval=5)
    assert "not finite at step 2" in message and "out/toy" in message
    assert checkpoint(Path("out/toy"))["step"] == 0 and not list(Path("out/toy").glob("ckpt-*"))


def test_tensorboard_gets_the_numbers_of_the_log(go, monkeypatch):
    seen = []

    class SummaryWriter:
        def __init__(self, folder):
            seen.append(str(folder))

        def add_scalar(self, name, value, step):
            seen.append((name, value, step))

        def flush(self):
            pass
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    losses = curve(go(tensorboard=True))
    assert seen[0] == "out/toy/tensorboard" and {("step/loss", losses[step][0], step) for step in losses} <= set(seen)
    assert {name for name, *_ in seen[1:]} >= {"step/lr", "step/tokens_per_second", "eval/val_loss", "eval/bits_per_byte"}


def test_without_tensorboard_installed_it_is_one_line(go, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install tensorboard" in refusal(go, tensorboard=True)
