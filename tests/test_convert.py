"""A dense run becomes a recursive model: shared weights by three rules, and low-rank additions (LoRA) for what they miss.

    python -m pytest -q tests/test_convert.py
"""
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import eval as evaluation
import prepare
import sample
import train
from config import UserError
from model import GPT, GPTConfig, block_table
from tiny import layout, loud, some_ids, tiny
from toy import DENSE, flags, make_config, make_data, refusal

pytestmark = pytest.mark.slow

HOW = ["stepwise", "average", "lower"]
FULL = 16                               # the rank of every matrix of a tiny block


def pair(how="stepwise", plan="1+2x2+1", rank=FULL, n_layers=6, donor=None, **changes):
    """(dense model, converted model, what convert() says of its additions)."""
    donor = donor or loud(tiny(n_core=n_layers, **changes))
    cfg = tiny(**{"sharing": None, **changes}, **layout(plan), lora_rank=rank)
    torch.manual_seed(1)
    model = GPT(cfg).eval()
    state, kept = prepare.convert(donor.state_dict(), donor.cfg, model.state_dict(), cfg, how)
    model.load_state_dict(state)
    return donor, model, kept


def by_hand(block):
    """{name: matrix} of a block's linears, the norms' weights multiplied into those that read them."""
    attention, mlp, g, m = block.attention, block.mlp, block.attention_norm.weight, block.mlp_norm.weight
    into = {"attention.query": g, "attention.key": g, "attention.value": g, "mlp.up": m, "mlp.gate": m}
    linears = {f"attention.{name}": layer for name, layer in attention.named_children()} | {f"mlp.{name}": layer for name, layer in mlp.named_children()}
    return {name: (layer.weight * into[name] if name in into else layer.weight).detach() for name, layer in linears.items()}


# ------------------------------------------------------------------------------------------------- as a function of tensors


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block, n_kv_head", [("gpt2", 4), ("gpt2", 2), ("llama", 4), ("llama", 1)])
@pytest.mark.parametrize("plan", ["1+2x2+1", "0+3x2+0", "2+1x3+1"])
def test_full_rank_lora_gives_the_donors_logits(how, block, n_kv_head, plan):
    donor, model, kept = pair(how, plan, block=block, n_kv_head=n_kv_head)
    ids_BT = some_ids(2, 20)
    torch.testing.assert_close(model(ids_BT).logits, donor(ids_BT).logits, atol=1e-4, rtol=0)
    assert model(ids_BT).logits.abs().max() > 1 and all(share in (None, pytest.approx(1)) for row in kept.values() for share in row)


def test_full_rank_lora_does_so_where_blocks_run_in_sequence():
    donor, model, _ = pair("average", "1+2x2+1", sharing=None)
    _, other, _ = pair("average", "1+2x2+1", donor=donor, sharing="middle_sequence")
    ids_BT = some_ids(2, 20)
    for each in (model, other):
        torch.testing.assert_close(each(ids_BT).logits, donor(ids_BT).logits, atol=1e-4, rtol=0)
    layers = [by_hand(block) for block in donor.recursion.core]
    for model, uses in ((model, [(1, 3), (2, 4)]), (other, [(1, 2), (3, 4)])):          # who is whose mean: (0,1)(0,1), (0,0)(1,1)
        for block, (a, b) in zip(model.recursion.core, uses):
            torch.testing.assert_close(block.mlp.up.weight, (layers[a]["mlp.up"] + layers[b]["mlp.up"]) / 2)


def test_a_lora_of_more_than_full_rank_keeps_a_part_that_can_learn():
    donor, model, _ = pair("average", rank=FULL + 3)
    fresh = pair(rank=FULL + 3)[1].recursion.lora
    torch.testing.assert_close(model(some_ids(2, 20)).logits, donor(some_ids(2, 20)).logits, atol=1e-4, rtol=0)
    for name, B in model.recursion.lora.up[0].items():
        assert not B[..., FULL:].any() and torch.equal(model.recursion.lora.down[0][name][:, FULL:], fresh.down[0][name][:, FULL:])


@pytest.mark.parametrize("plan, how, sources", [                                # layers of the loop that each core block is the mean of
    ("1+2x3+1", "stepwise", [[0], [5]]), ("1+2x3+1", "average", [[0, 2, 4], [1, 3, 5]]), ("1+2x3+1", "lower", [[0], [1]]),
    ("0+4x2+0", "stepwise", [[0], [2], [5], [7]]), ("0+4x2+0", "average", [[0, 4], [1, 5], [2, 6], [3, 7]]), ("0+4x2+0", "lower", [[0], [1], [2], [3]]),
    ("2+1x4+2", "stepwise", [[0]]), ("2+1x4+2", "average", [[0, 1, 2, 3]]), ("2+1x4+2", "lower", [[0]])])
@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_without_lora_the_core_is_what_the_rule_takes(plan, how, sources, block):
    donor, model, kept = pair(how, plan, rank=0, n_layers=8, block=block)
    layers, n_prelude = [by_hand(layer) for layer in donor.recursion.core], model.cfg.n_prelude
    for core, mine in zip(model.recursion.core, sources):
        for name, W in by_hand(core).items():
            torch.testing.assert_close(W, torch.stack([layers[n_prelude + i][name] for i in mine]).mean(0))
        assert torch.equal(core.attention_norm.weight, torch.ones(16)) and torch.equal(core.mlp_norm.weight, torch.ones(16))
    outer = [*donor.recursion.core[:n_prelude], *donor.recursion.core[8 - model.cfg.n_coda :]]
    for mine, theirs in zip([*model.prelude, *model.coda, model.norm, model.embed, model.positions], [*outer, donor.norm, donor.embed, donor.positions]):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
    assert kept == {}


@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_a_layer_that_runs_again_and_again_converts_exactly_without_lora(block):
    donor = loud(tiny(n_core=6, block=block))
    for i in (3, 4):                                                                  # the loop's layers 2, 3, 4 are one
        donor.recursion.core[i].load_state_dict(donor.recursion.core[2].state_dict())
    for how in HOW:
        _, model, _ = pair(how, "2+1x3+1", rank=0, donor=donor, block=block)
        torch.testing.assert_close(model(some_ids(2, 20)).logits, donor(some_ids(2, 20)).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("block, n_kv_head", [("gpt2", 4), ("llama", 2)])
def test_a_lora_is_the_nearest_matrix_of_its_rank(block, n_kv_head):
    """What is left of each residual is the tail of its singular values, by numpy, and `kept` is the rest of it."""
    rank, (donor, model, kept) = 5, pair("average", rank=5, block=block, n_kv_head=n_kv_head)
    layers, core, lora = [by_hand(layer) for layer in donor.recursion.core[1:-1]], [by_hand(block) for block in model.recursion.core], model.recursion.lora
    whole = lambda named: {"qkv": torch.cat([named[f"attention.{name}"] for name in ("query", "key", "value")]), "output": named["attention.output"],
                           **{name.removeprefix("mlp."): W for name, W in named.items() if name.startswith("mlp.")}}
    for name in kept:
        for step, row in enumerate(block_table(model.cfg)):
            head = both = 0
            for j, b in enumerate(row):
                residual = whole(layers[step * 2 + j])[name] - whole(core[b])[name]
                S = np.linalg.svd(residual.double().numpy(), compute_uv=False)
                left = residual - lora.up[j][name][step] @ lora.down[j][name][step]
                assert float(left.detach().norm()) == pytest.approx(np.sqrt((S[rank:] ** 2).sum()), rel=1e-4)
                head, both = head + (S[:rank] ** 2).sum(), both + (S**2).sum()
            assert kept[name][step] == pytest.approx(head / both, rel=1e-4) and 0 < kept[name][step] < 1
    assert set(kept) == set(lora.up[0])


def test_where_nothing_is_left_to_add_lora_is_as_new():
    """lower: step 0's layers are the shared ones themselves."""
    _, model, kept = pair("lower", rank=4)
    torch.manual_seed(1)
    fresh = GPT(model.cfg).recursion.lora
    for j in range(2):
        for name, B in model.recursion.lora.up[j].items():
            A, start = model.recursion.lora.down[j][name], fresh.down[j][name]
            assert not B[0].any() and torch.equal(A[0], start[0]) and A[0].any()
            assert B[1].any() and not torch.equal(A[1], start[1]) and kept[name][0] is None and kept[name][1] > 0


def test_converting_leaves_the_donor_and_the_new_model_as_they_were():
    donor, new = loud(tiny(n_core=6, bias=True)), GPT(tiny(bias=True, lora_rank=3, **layout("1+2x2+1")))
    states = [{name: w.clone() for name, w in model.state_dict().items()} for model in (donor, new)]
    prepare.convert(donor.state_dict(), donor.cfg, new.state_dict(), new.cfg, "average")
    for model, before in zip((donor, new), states):
        assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


def test_norm_biases_are_folded_into_the_linears_biases():
    """One layer, run once: with biases too the function stays."""
    donor, model, _ = pair("lower", "1+4x1+1", rank=0, bias=True)
    torch.testing.assert_close(model(some_ids(2, 20)).logits, donor(some_ids(2, 20)).logits, atol=1e-4, rtol=0)
    assert not model.recursion.core[0].attention_norm.bias.any() and donor.recursion.core[1].attention_norm.bias.any()


# ------------------------------------------------------------------------------------------------------------- as a command


DONOR = {**DENSE, "n_core": 4, "state_noise": 0.0, "gate_noise": 0.0}
RRT = dict(n_prelude=1, n_core=1, n_recur=2, n_coda=1, lora_rank=3)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """go(**changes) converts out/dense, a short run on the toy set, to the toy RRT with these changes. Returns the folder."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)
    train.main([make_config(tmp_path, **DONOR), "--out_dir=out/dense", "--learning_rate=2e-2", "--max_iters=12"])
    config = make_config(tmp_path, **{**DONOR, **RRT, "eval_tokens": 256})

    def go(source="out/dense", out_dir="out/start", **changes):
        prepare.main(["weights", str(source), config, f"--out_dir={out_dir}", *flags(**changes)])
        return Path(out_dir)
    return go


def checkpoint(folder):
    return torch.load(Path(folder) / "ckpt.pt", weights_only=True)


@pytest.mark.slow
def test_a_converted_run_with_lora_trains_on_from_the_loss_it_was_given(go, capsys):
    start = checkpoint(go())
    assert start["converted"]["source_step"] == 12 and start["converted"]["shared"] == "average" and start["converted"]["lora_rank"] == 3
    said = capsys.readouterr().out
    assert f"validation {start['val_loss']:.4f} nats/token; the source, at its step 12: {checkpoint('out/dense')['val_loss']:.4f}\n" in said
    assert said.endswith("next: python train.py --init_from=out/start --out_dir=out/start_tuned --learning_rate=0.003\n")
    assert Path("out/start/config.py").read_text().startswith("# Converted from 'out/dense/ckpt.pt', step 12, by prepare.py weights --shared=average\n")
    train.main(["--init_from=out/start", "--out_dir=out/unmoved", "--max_iters=0"])             # with the folder's own config
    assert all(torch.equal(w, start["model"][name]) for name, w in checkpoint("out/unmoved")["model"].items())
    assert checkpoint("out/unmoved")["val_loss"] == pytest.approx(start["val_loss"], abs=1e-6)
    train.main(["--init_from=out/start", "--out_dir=out/tuned", "--max_iters=40", "--learning_rate=1e-2"])
    tuned = checkpoint("out/tuned")
    assert tuned["val_loss"] < start["val_loss"] - 0.1 and tuned["model_config"] == start["model_config"]
    assert all(not torch.equal(w, start["model"][name]) for name, w in tuned["model"].items() if "lora" in name)
    model, tokenizer, about = sample.load_run("out/start", "cpu")
    assert about["step"] == 0 and model.cfg.layout == "1+1x2+1"
    evaluation.main(["loss", "--out_dir=out/start"])
    part = json.loads(Path("out/start/eval.json").read_text())["parts"]["loss"]
    assert part["train"]["agrees"] and part["train"]["stored_step"] == 0


@pytest.mark.slow
def test_a_command_of_full_rank_lora_keeps_the_donors_loss_and_rank_0_does_not(go):
    state = checkpoint("out/dense")
    torch.save({**state, "model": loud(GPTConfig(**state["model_config"])).state_dict()}, "out/dense/ckpt.pt")
    train.main(["--init_from=out/dense", "--out_dir=out/same", "--max_iters=0", "--eval_tokens=256"])
    donor = checkpoint("out/same")["val_loss"]
    full, none = checkpoint(go(lora_rank=16)), checkpoint(go(lora_rank=0, out_dir="out/none"))
    assert full["val_loss"] == pytest.approx(donor, abs=1e-4) and abs(none["val_loss"] - donor) > 0.01
    assert not any("lora" in name for name in none["model"]) and none["converted"]["kept"] == {}
    assert (full["converted"]["shared"], none["converted"]["shared"]) == ("average", "stepwise")
    for name in HOW:
        assert checkpoint(go(lora_rank=0, out_dir=f"out/{name}", shared=name))["converted"]["shared"] == name


@pytest.mark.slow
def test_a_conversion_that_cannot_be_is_one_line(go, tmp_path):
    folder = go()
    assert "out/start holds a run already; choose another --out_dir=" in refusal(go)
    for changes, words in ((dict(n_recur=3), "out/dense/ckpt.pt has 4 layers, and 1+1x3+1 executes 5 blocks; choose n_prelude + n_core x n_recur + n_coda = 4"),
                           (dict(block="llama"), "block='llama', but out/dense/ckpt.pt has 'gpt2'; give the same"),
                           (dict(n_embd=32), "command line: n_embd=32, but out/dense/ckpt.pt has 16"), (dict(n_head=4), "n_head=4, but"),
                           (dict(n_kv_head=1), "n_kv_head=1, but out/dense/ckpt.pt has 2"), (dict(n_ffn=48), "n_ffn=48, but out/dense/ckpt.pt has 64"),
                           (dict(vocab_size=640), "vocab_size=640, but"), (dict(block_size=16), "block_size=16, but"), (dict(bias=True), "bias=True, but"),
                           (dict(norm_eps=1e-6), "norm_eps=1e-06, but"), (dict(update="gate"), "command line: update='gate' is more than a dense run can start"),
                           (dict(router="expert"), "convert with router='none'"), (dict(kv="share"), "convert with kv='own'"),
                           (dict(sandwich_norm=True), "convert with sandwich_norm=False"), (dict(shared="mean"), "stepwise, average, lower"),
                           (dict(source=folder), "out/start/ckpt.pt is no dense run: 1+1x2+1"), (dict(source="out/no"), "no checkpoint at out/no")):
        assert words in refusal(go, **{"out_dir": "out/other", **changes}), changes
    assert not Path("out/other").exists()
    whole = checkpoint("out/dense")
    for name in ("model", "model_config", "fingerprint", "step", "val_loss", "settings"):
        torch.save({key: value for key, value in whole.items() if key != name}, tmp_path / "part.pt")
        assert "part.pt is not a whole checkpoint of this program" in refusal(go, source=tmp_path / "part.pt", out_dir="out/other")
    for words in ([], ["out/dense"], ["out/dense", "out/start", str(tmp_path / "toy.py")]):
        assert "weights takes a dense run and a config file" in refusal(prepare.main, ["weights", *words])
    with pytest.raises(UserError, match="or convert it first: python prepare.py weights out/dense CONFIG"):
        train.main([str(tmp_path / "toy.py"), "--init_from=out/dense"])
    for name, value in (("lora_rank", 2), ("n_recur", 3)):
        with pytest.raises(UserError, match=f"{name} is .* there and {value} here; give the model keys of that run$"):
            train.main(["--init_from=out/start", f"--{name}={value}"])


def test_help_of_weights_has_its_command_and_every_key(capsys):
    with pytest.raises(SystemExit) as exit:
        prepare.main(["weights", "--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0 and "python prepare.py weights out/gpt_tiny config/rrt_tiny.py" in text
    assert "  --shared " in text and "[stepwise | average | lower]" in text and "  --lora_rank " in text


@pytest.mark.slow
def test_weights_are_made_without_the_data_too_and_say_what_is_not_known(go, capsys):
    folder = go(data_dir="elsewhere", bias=False)
    note = capsys.readouterr().err
    assert note.startswith("note: no validation loss: no data set 'toy' in elsewhere/") and np.isnan(checkpoint(folder)["val_loss"])
    assert checkpoint(folder)["settings"]["data_dir"] == "elsewhere"


def test_a_run_on_a_synthetic_set_converts_with_the_loss_over_its_answers(go, tmp_path):
    prepare.prepare("addition", data_dir=tmp_path / "data", max_tokens=24_000, quiet=True)
    train.main(["toy.py", *flags(**DENSE | {"n_core": 4, "lora_rank": 0}), "--dataset=addition", "--block_size=48", "--eval_tokens=9999", "--out_dir=out/sums"])
    start = checkpoint(go("out/sums", dataset="addition", block_size=48, eval_tokens=9999, lora_rank=FULL))
    assert start["val_loss"] == pytest.approx(checkpoint("out/sums")["val_loss"], abs=1e-4)
