"""Several processes: two ranks are one process with the same batch, whatever holds the weights and whoever dies.

    python -m pytest -q tests/test_parallel.py
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import RIVALS, RUNS, with_gaps
from toy import flags, make_config, make_data, refusal

import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available() or os.name != "posix", reason="needs gloo and torchrun")]
HERE = Path(__file__).resolve().parent


def torchrun(folder, n, *names, restarts=0):
    """tests/ranks.py on n processes; what each rank left, {(name, rank): seen}."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", f"--max-restarts={restarts}",
                           str(HERE / "ranks.py"), str(folder), *names], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(name, rank): torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for name in names for rank in range(n)}, done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    make_data(folder)
    make_config(folder)
    return folder


@pytest.fixture(scope="module")
def two(place):
    """Every run on two ranks, one after the other in one launch."""
    return torchrun(place, 2, *(name for name in RUNS if name not in ("on 4", "broken")))[0]


@pytest.fixture(scope="module")
def one(place):
    """The same run without noise in one process."""
    return alone(place, **RUNS["ddp"], out_dir="out/one")


def alone(place, gaps=False, **changes):
    """A run in this process, in float64, with its gradients at the first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        clip, grads = train.clip_gradients, []

        def look(model, grad_clip):
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
            return clip(model, grad_clip)
        patch.setattr(train, "clip_gradients", look)
        if gaps:
            step = train.step_gradients
            patch.setattr(train, "step_gradients", lambda net, batches, *args: step(net, with_gaps(batches), *args))
        torch.set_default_dtype(torch.float64)
        try:
            train.main(["toy.py", *flags(**changes)])
        finally:
            torch.set_default_dtype(torch.float32)
    return SimpleNamespace(gradients=grads[0], **vars(saved(place / changes["out_dir"])))


def saved(folder):
    state = torch.load(folder / "ckpt.pt", weights_only=True)
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    curve = {r["step"]: (r["loss"], r["grad_norm"], r["depth"], r["lr"]) for r in records if r["event"] == "step"}
    return SimpleNamespace(state=state, curve=curve, records=records)


def assert_equal(a, b, atol=1e-9):
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023


def curves_equal(a, b):
    assert list(a) == list(b) and all(a[step] == pytest.approx(b[step], abs=1e-9) for step in a)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_and_ten_steps_of_two_ranks_are_those_of_one_process(place, two, one, parallel):
    for rank in (0, 1):
        assert_equal(two[parallel, rank]["gradients"], one.gradients)
        assert_equal(two[parallel, rank]["weights"], one.state["model"])
    run = saved(place / "out" / parallel)
    curves_equal(run.curve, one.curve)                                # losses and gradient norms before clipping
    assert run.state["val_loss"] == pytest.approx(one.state["val_loss"], abs=1e-9)
    assert len(one.curve) == 10 and one.curve[10][0] < one.curve[1][0]


def test_a_target_weighs_the_same_whichever_rank_reads_it(place, two):
    whole = alone(place, gaps=True, **RUNS["uneven"], out_dir="out/uneven one")
    assert_equal(two["uneven", 0]["gradients"], whole.gradients)
    curves_equal(saved(place / "out/uneven").curve, whole.curve)
    assert not two["uneven", 0]["gradients"]["embed.weight"].equal(two["ddp", 0]["gradients"]["embed.weight"])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_with_noise_and_random_depth_both_ranks_take_the_same_depth_and_end_with_equal_weights(place, two, parallel):
    a, b = two[f"wild {parallel}", 0], two[f"wild {parallel}", 1]
    assert a["depths"] == b["depths"] and len(a["depths"]) == 20 and len(set(a["depths"])) > 3
    assert_equal(a["weights"], b["weights"], atol=0)
    assert all(x != y for x, y in zip(a["first_ids"], b["first_ids"]))        # each rank reads its own part of the batch
    assert_equal(a["weights"], two["wild ddp", 0]["weights"])                 # and where the weights lie changes nothing


def test_the_core_is_gathered_once_forward_and_once_backward_whatever_the_depth(two):
    for rank in (0, 1):
        events = two["gathers", rank]["events"]
        first = events.index("step")
        assert events[first : first + 8] == ["step", "core", "backward", "core"] * 2
        assert two["gathers", rank]["depths"] == [4, 4]


@pytest.mark.parametrize("name", ["routed ddp", "routed fsdp"])
def test_routed_ranks_stay_equal_at_random_depths(two, name):
    assert two[name, 0]["end"] == two[name, 1]["end"] == "done" and len(two[name, 0]["depths"]) == 5
    assert_equal(two[name, 0]["weights"], two[name, 1]["weights"], atol=0)


@pytest.mark.parametrize("name", ["aux", "biased"])
def test_routed_runs_of_two_ranks_are_those_of_one_process_with_their_biases_and_what_they_say(place, two, name):
    whole = alone(place, **RUNS[f"{name} ddp"], out_dir=f"out/{name} one")
    kind = "recursion.router." + ("aux_units.1.layers.0.weight" if name == "aux" else "bias_R")
    assert whole.state["model"][kind].any()
    for parallel in ("ddp", "fsdp"):
        for rank in (0, 1):
            assert_equal(two[f"{name} {parallel}", rank]["weights"], whole.state["model"])
        assert_equal(*(two[f"{name} {parallel}", rank]["weights"] for rank in (0, 1)), atol=0)
        run = saved(place / f"out/{name} {parallel}")
        curves_equal(run.curve, whole.curve)
        for a, b in zip(run.records, whole.records, strict=True):                  # of all windows and all micro-batches
            for key in ("depth_shares", "go_on", "router_accuracy", "dead_tokens", "max_vio", "mean_depth", "topk_val_loss", "val_loss", "at_edge"):
                assert a.get(key) == pytest.approx(b.get(key), abs=1e-9), key


@pytest.mark.parametrize("name", RIVALS)
def test_ranks_of_poisson_ouro_and_lora_stay_equal_wherever_the_weights_lie_and_computed_again(two, name):
    runs = [two[f"{name} {parallel}", rank] for parallel in ("ddp", "fsdp") for rank in (0, 1)]
    assert all(run["end"] == "done" and len(run["depths"]) == 5 and run["depths"] == runs[0]["depths"] for run in runs)
    assert max(runs[0]["depths"]) > 4 or name != "poisson"                          # beyond n_recur
    for run in runs[1:]:
        assert_equal(run["weights"], runs[0]["weights"])


@pytest.mark.parametrize("name", ["lean ddp", "lean fsdp", "compiled", "compiled fsdp"])
def test_recomputed_and_compiled_ranks_stay_equal_to_plain_ones(place, two, name):
    assert_equal(two[name, 0]["weights"], two[name, 1]["weights"], atol=0)
    plain, run = saved(place / "out/wild ddp").curve, saved(place / "out" / name).curve
    curves_equal(run, {step: plain[step] for step in range(1, 6)})


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(place, two, one, parallel):
    shutil.copytree(place / f"out/{parallel} half", place / f"out/{parallel} on 1")
    assert saved(place / f"out/{parallel} on 1").state["step"] == 5
    run = alone(place, **{**RUNS["ddp"], "init_from": "resume"}, out_dir=f"out/{parallel} on 1")
    assert_equal(run.state["model"], one.state["model"])
    curves_equal(run.curve, one.curve)


def test_a_checkpoint_of_two_ranks_goes_on_on_four(place, two, one):
    shutil.copytree(place / "out/ddp half", place / "out/on 4")
    seen, _ = torchrun(place, 4, "on 4")
    run = saved(place / "out/on 4")
    assert_equal(run.state["model"], one.state["model"])
    curves_equal(run.curve, one.curve)
    assert len({json.dumps(seen["on 4", rank]["first_ids"]) for rank in range(4)}) == 4
    for name, own in run.state["optimizer"]["state"].items():
        for part in own:
            torch.testing.assert_close(own[part], one.state["optimizer"]["state"][name][part], atol=1e-9, rtol=0)


def test_a_killed_rank_is_replaced_and_the_curve_is_the_unbroken_one(place, two):
    seen, done = torchrun(place, 2, "broken", restarts=1)
    assert "out/broken goes on from its last checkpoint" in done.stdout
    run, whole = saved(place / "out/broken"), saved(place / "out/wild ddp")
    starts = [r["step"] for r in run.records if r["event"] == "start"]
    assert starts == [0, 8] and not (place / "out/broken-2").exists()
    curves_equal(run.curve, whole.curve)
    again = [r for r in run.records if r["event"] == "step" and r["step"] == 9]
    assert len(again) == 2 and again[0]["loss"] == again[1]["loss"]           # what was done twice came out the same
    assert_equal(run.state["model"], whole.state["model"], atol=0)


def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(place, two):
    assert two["stopped", 0]["end"] == two["stopped", 1]["end"] == "KeyboardInterrupt "
    run, whole = saved(place / "out/stopped"), saved(place / "out/wild ddp")
    assert run.state["step"] == 3 and run.state["val_step"] == 0
    assert run.curve == {step: whole.curve[step] for step in (1, 2, 3)}


def test_micro_batches_that_cannot_be_shared_are_refused_with_numbers_that_can(two):
    assert two["odd", 1]["end"] == "SystemExit 2"                    # the others end with it, and leave the word to rank 0
    for words in ("gradient_accumulation_steps=5", "batch_size=4", "2 processes", "use 4 or 6"):
        assert words in two["odd", 0]["end"]
    with pytest.raises(train.UserError, match="use 3$"):
        train.check_world(SimpleNamespace(gradient_accumulation_steps=1, batch_size=4, init_from="scratch", out_dir="out/x"), SimpleNamespace(size=3))


def test_rank_0_makes_the_default_set_and_the_other_waits_for_it(two):
    assert [two["default set", rank]["events"].count("prepare stdlib") for rank in (0, 1)] == [1, 0]
    assert two["default set", 0]["end"] == two["default set", 1]["end"] == "done"


def test_tokens_per_second_count_all_micro_batches_of_all_ranks(place, two, one):
    for run in (saved(place / "out/ddp"), one):
        for r in (r for r in run.records if r["event"] == "step"):
            assert r["tokens_per_update"] == 4 * 32 * 4
            assert r["tokens_per_second"] * r["ms_per_update"] / 1e3 == pytest.approx(4 * 32 * 4)


def test_rank_variables_without_a_launcher(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train.main(["toy.py", *flags(max_iters=0, out_dir="out/lonely")])         # a clean end: there is no group to leave
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refusal(train.main, ["toy.py", *flags(max_iters=0, out_dir="out/lost")])
    assert "WORLD_SIZE=2" in message and "start them with torchrun" in message and not Path("out/lost").exists()
