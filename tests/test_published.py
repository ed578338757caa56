"""The papers' models: their layouts, recipes and counts, and config/published.json, the numbers that the papers state.

    python -m pytest -q tests/test_published.py
"""
import ast
import dataclasses
import functools
import json
import math
import re
import shlex
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from toy import flags, make_data, refusal

import bench
import config
import eval as evaluation
import model
import train
from config import UserError

pytestmark = pytest.mark.slow

ROOT = Path(train.__file__).resolve().parent
CONFIG = ROOT / "config"
TEXT = (CONFIG / "published.json").read_text("utf-8")
ROWS = json.loads(TEXT, parse_float=Decimal, parse_int=Decimal)["rows"]          # a Decimal knows how many digits were printed
MUST = {"config", "paper", "setting", "system", "quantity", "value", "unit", "ours", "agrees"}
MAY = {"note", "overrides", "against", "vocab_size", "batch_size", "seq_len", "cache"}
UNITS = {"M": 1e6, "B": 1e9, "MFLOP": 1e6, "1e18 FLOP": 1e18, "GiB": 2**30, "%": 1e-2, "parameters": 1, "steps": 1}

WIDTHS = {  # n_embd, n_head, n_kv_head, n_ffn                                                         [MoR, shapes; GRT, shapes]
    "135m": (576, 9, 3, 1536), "360m": (960, 15, 5, 2560), "730m": (1536, 24, 8, 4096), "1700m": (2048, 32, 32, 8192),
    "small": (768, 12, 12, 3072), "medium": (1024, 16, 16, 4096), "large": (1280, 20, 20, 5120)}
LAYOUTS = {
    "gpt2_small": "0+12x1+0", "gpt2_medium": "0+24x1+0", "gpt2_large": "0+36x1+0",
    "grt_small": "1+1x10+1", "grt_medium": "2+5x4+2", "grt_large": "1+5x6+5",
    **{f"{rival}_small": "1+1x10+1" for rival in ("poisson", "rrt", "ouro")},
    "grt_small_isoparam": "1+10x10+1", "grt_medium_isoparam": "2+20x4+2", "grt_large_isoparam": "3+30x6+3",
    "smollm/vanilla_135m": "0+30x1+0", "smollm/vanilla_360m": "0+32x1+0", "smollm/vanilla_730m": "0+26x1+0", "smollm/vanilla_1700m": "0+24x1+0",
    "smollm/recursive2_135m": "1+14x2+1", "smollm/recursive3_135m": "1+10x3+1", "smollm/recursive4_135m": "1+7x4+1",
    "smollm/recursive2_360m": "1+15x2+1", "smollm/recursive3_360m": "1+10x3+1", "smollm/recursive4_360m": "1+8x4+1",
    "smollm/recursive2_730m": "1+12x2+1", "smollm/recursive3_730m": "1+8x3+1", "smollm/recursive4_730m": "1+6x4+1",
    "smollm/recursive2_1700m": "1+11x2+1", "smollm/recursive3_1700m": "1+8x3+1",
    "mor_135m": "1+10x3+1", "mor_360m": "1+10x3+1", "mor_730m": "1+8x3+1", "mor_1700m": "1+8x3+1",
    "smollm/ablation/vanilla_135m_10b": "0+30x1+0", "smollm/ablation/vanilla_360m_10b": "0+32x1+0",
    "smollm/ablation/middle_cycle3_730m": "1+8x3+1", "smollm/ablation/cycle3_730m": "0+10x3+0",
    **{f"smollm/ablation/{sharing}{N}_{size}": plan for sharing in ("cycle", "sequence")
       for N, size, plan in ((2, "135m", "0+15x2+0"), (3, "135m", "0+10x3+0"), (2, "360m", "0+16x2+0"), (3, "360m", "0+10x3+0"))},
    **{f"smollm/ablation/middle_{sharing}{N}_{size}": plan for sharing in ("cycle", "sequence")
       for N, size, plan in ((2, "135m", "1+14x2+1"), (3, "135m", "1+9x3+1"), (2, "360m", "1+15x2+1"), (3, "360m", "1+10x3+1"))},
}
MOR = [name for name in LAYOUTS if name.startswith("mor_")]
SMOLLM = [name for name in LAYOUTS if name.startswith("smollm/")] + MOR
MAIN = [name for name in SMOLLM if "ablation" not in name]
ROWS_OF_FLAGS = [(name, *re.split(r"  +(?=--)", line.strip())) for name in LAYOUTS                  # config, what it is, flags
                 for line in ast.get_docstring(ast.parse((CONFIG / f"{name}.py").read_text("utf-8"))).splitlines() if re.search("^    .*  --", line)]


@functools.cache
def settings_of(name, *more):
    return train.parse([str(CONFIG / f"{name}.py"), *more])


@functools.cache
def cfg_of(name, vocab_size=50304, more=()):
    return settings_of(name, *more).build(model.GPTConfig, vocab_size=int(vocab_size))


@functools.cache
def n_params(cfg, embeddings=True):
    return cfg.n_params(embeddings)


def recipe(name, more=()):
    """(tokens per step, steps)."""
    s = settings_of(name, *more)
    return s.batch_size * s.gradient_accumulation_steps * s.block_size, s.max_iters


# ------------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_config_has_the_layout_the_sharing_and_the_widths_of_its_paper(name):
    cfg, stem = cfg_of(name), name.split("/")[-1]
    assert cfg.layout == LAYOUTS[name]
    assert (cfg.n_embd, cfg.n_head, cfg.kv_heads, cfg.ffn_width) == WIDTHS[next(word for word in stem.split("_") if word in WIDTHS)]
    assert (cfg.block, cfg.update) == ("llama" if name in SMOLLM else "gpt2", {"grt": "gate", "poisson": "inject"}.get(stem.split("_")[0], "replace"))
    if name in MOR:
        assert (cfg.sharing_name, cfg.n_recur, cfg.router, cfg.kv) == ("middle_cycle", 3, "expert", "own")
    elif name in SMOLLM and "vanilla" not in name:
        family, N = re.fullmatch(r"([a-z_]+)(\d)_\d+m", stem).groups()
        assert (cfg.sharing_name, cfg.n_recur) == ("middle_cycle" if family == "recursive" else family, int(N))
    sampling = {"grt": "uniform", "poisson": "poisson"}.get(stem.split("_")[0], "fixed")
    assert (cfg.depth_sampling, cfg.state_noise, cfg.gate_noise) == (sampling, *(2 * (.1 if "grt" in stem else 0,)))


def test_poisson_lora_and_ouro_differ_from_a_plain_loop_in_what_their_papers_changed_alone():
    plain = model.GPTConfig(vocab_size=50304, fused_loss=True, n_prelude=1, n_core=1, n_recur=10, n_coda=1)
    changed = {"poisson": dict(update="inject", state_init="random", depth_sampling="poisson", bptt=8), "rrt": dict(lora_rank=8), "ouro": dict(loss="every")}
    for name, choices in changed.items():
        assert cfg_of(f"{name}_small") == dataclasses.replace(plain, **choices), name
        for scale in ("small", "medium", "large"):
            for row in ROWS:
                if row["paper"] == "GRT" and row["system"].lower() == name and scale in row["setting"].lower():
                    of_row, grt = cfg_of(row["config"], more=overrides(row)), cfg_of(f"grt_{scale}" + "_isoparam" * ("isoPARAM" in row["setting"]))
                    assert {key: getattr(of_row, key) for key in choices} == choices and (of_row.layout, of_row.n_embd) == (grt.layout, grt.n_embd), row


def test_every_config_beside_these_is_in_the_table_above():
    there = {str(path.relative_to(CONFIG).with_suffix("")) for path in CONFIG.rglob("[!_]*.py")}
    ours = {name for name in there if name.startswith(("bench/", "ladder/")) or "_tiny" in name}
    assert there - ours == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_line_of_a_config_tells_its_layout_and_its_paper(name):
    first = (CONFIG / f"{name}.py").read_text("utf-8").splitlines()[0]
    assert f", {LAYOUTS[name]}: " in first and first.rstrip(".").endswith("]") and ("[MoR" in first) == (name in SMOLLM)


@pytest.mark.parametrize("name, total", [
    ("smollm/vanilla_360m", 314_635_200), ("smollm/recursive2_360m", 167_150_400), ("smollm/recursive3_360m", 117_988_800),
    ("smollm/recursive4_360m", 98_324_160)])
def test_a_recursive_config_owns_each_shared_block_once(name, total):
    assert n_params(cfg_of(name), embeddings=False) == total


@pytest.mark.parametrize("name, total", [("grt_medium", 171_073_536), ("grt_medium_isoparam", 359_847_936), ("grt_large", 290_196_480),
                                         ("grt_large_isoparam", 781_780_480)])
def test_a_grt_config_has_the_parameters_of_its_released_checkpoint(name, total):
    assert n_params(cfg_of(name)) == total


@pytest.mark.slow
def test_models_that_are_compared_have_equal_parameters_or_equal_blocks():
    for size in ("135m", "360m"):
        for N in (2, 3):
            for middle in ("", "middle_"):
                cycle, sequence = (cfg_of(f"smollm/ablation/{middle}{how}{N}_{size}") for how in ("cycle", "sequence"))
                assert n_params(cycle) == n_params(sequence) and cycle.executed_blocks() == sequence.executed_blocks()
                assert model.block_table(cycle) != model.block_table(sequence)
    middle, cycle = cfg_of("smollm/ablation/middle_cycle3_730m"), cfg_of("smollm/ablation/cycle3_730m")
    assert n_params(middle) == n_params(cycle) and (middle.executed_blocks(), cycle.executed_blocks()) == (26, 30)
    for scale, blocks in (("small", 12), ("medium", 24), ("large", 36)):
        isoflop, isoparam = cfg_of(f"grt_{scale}"), cfg_of(f"grt_{scale}_isoparam")
        assert isoflop.executed_blocks() == isoparam.n_prelude + isoparam.n_core + isoparam.n_coda == cfg_of(f"gpt2_{scale}").n_core == blocks


# ------------------------------------------------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_has_the_papers_tokens(name):
    assert recipe(name)[0] == (2_097_152 if name in SMOLLM else 491_520)


def budget(name, more=()):
    """Steps that 16.5e18 FLOPs of forward passes pay for."""
    return round(16.5e18 / (cfg_of(name, more=more).flops_per_token(2048, "paper") * recipe(name)[0]))


@pytest.mark.parametrize("name", MAIN)
def test_an_isoflop_run_spends_its_budget_and_cools_down_to_zero(name):
    s, (tokens, steps) = settings_of(name), recipe(name)
    assert steps == budget(name) or (name, steps, budget(name)) == ("mor_360m", 14161, 14160)                # that run was released
    for step in (s.warmup_iters, int(.79 * steps)):
        assert train.learning_rate(step, s) == pytest.approx(3e-3)
    assert 0 < train.learning_rate(0, s) < 1e-4 and 0 <= train.learning_rate(steps - 1, s) < 3e-3 / (.19 * steps)
    assert train.learning_rate(round(.9 * steps), s) == pytest.approx(1.5e-3, rel=.02)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in MAIN])
def test_the_other_runs_follow_a_cosine_to_a_tenth(name):
    s, (tokens, steps) = settings_of(name), recipe(name)
    assert abs(tokens * steps - (1e10 if name in SMOLLM else 9.83e9)) < tokens
    peak = 3e-3 if name in SMOLLM else 6e-4
    assert train.learning_rate(s.warmup_iters, s) == pytest.approx(peak) and train.learning_rate(steps, s) == pytest.approx(peak / 10)


def test_the_optimizer_is_the_papers():
    for name in LAYOUTS:
        s = settings_of(name)
        assert (s.beta1, s.beta2, s.weight_decay, s.grad_clip, s.dropout) == (.9, .95, .1, 1, 0)
        assert s.dataset == ("fineweb-edu" if name in SMOLLM else "stdlib") and s.vocab_size is None
        assert s.warmup_iters == (86 if name in MOR else 57 if name in SMOLLM else 2000)


def test_a_routed_config_routes_as_the_paper_adopted():
    for name in MOR:
        cfg = cfg_of(name)
        with torch.device("meta"):
            router = model.GPT(cfg).recursion.router
        assert (cfg.router_kind, router.alpha, router.score, cfg.threshold) == ("linear", .1, torch.sigmoid, .5)
        assert cfg.capacities == [1, 2 / 3, 1 / 3] and [int(c * 2048) for c in cfg.capacities] == [2048, 1365, 682]
        assert [tuple(p.shape) for p in router.parameters()] == 3 * [(1, cfg.n_embd)] and cfg.router_weight == .016


def test_a_routed_config_and_its_recursive_twin_differ_in_routing_budget_and_warm_up_alone():
    for name in MOR:
        mine, twin = settings_of(name).values, settings_of(f"smollm/recursive3_{name[4:]}").values
        assert {key for key in mine if mine[key] != twin[key]} == {"router", "max_iters", "warmup_iters"}


@pytest.mark.parametrize("name, what, flags", ROWS_OF_FLAGS, ids=lambda text: text.replace(" ", "_"))
def test_a_row_of_flags_in_a_docstring_makes_another_model_or_run(name, what, flags):
    s, before = settings_of(name, *flags.split()), settings_of(name)
    assert all(s.values[key] != before.values[key] for key in re.findall(r"--(\w+)", flags)), "a flag that changes nothing"
    cfg = s.build(model.GPTConfig, vocab_size=320)
    assert cfg.unused() == []
    with torch.device("meta"):
        model.GPT(cfg)
    if what.startswith("MoR-"):                                         # MoR-N, at equal FLOPs or at equal tokens
        assert cfg.n_recur == int(what[4]) and (", 34 blocks" not in what or cfg.executed_blocks() == 34)
        same_cost = cfg.flops_per_token(2048, "paper") == cfg_of(name).flops_per_token(2048, "paper")      # then the file's steps are its own
        assert s.max_iters in (9438, budget(name, tuple(flags.split()))) or same_cost and s.max_iters == before.max_iters


@pytest.mark.slow
def test_a_small_version_of_each_row_of_flags_has_a_loss_and_a_gradient_for_every_parameter():
    narrow = flags(n_embd=16, n_head=2, n_kv_head=1, n_ffn=24, block_size=16)
    ids_BT = torch.arange(34).view(2, 17)
    for name, what, more in ROWS_OF_FLAGS:
        torch.manual_seed(0)
        net = model.GPT(settings_of(name, *more.split(), *narrow).build(model.GPTConfig, vocab_size=64))
        out = net(ids_BT[:, :-1], ids_BT[:, 1:], seed=(0, 0))
        out.loss.backward()
        assert all(loss.isfinite() for loss in out.losses.values()) and out.losses["ce"].item() == pytest.approx(math.log(64), rel=.05), what
        assert [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == [], what
        steps = out.depth_BT.sum().item()
        assert steps == 2 * sum(max(1, int(c * 16)) for c in net.cfg.capacities) or net.cfg.router == "token", what


def test_the_rows_of_flags_cover_the_paper():
    """Each value of each choice that its tables vary, on the 360M model, where they were trained."""
    rows = [flags for name, _, flags in ROWS_OF_FLAGS if name == "mor_360m"]
    assert len(rows) == len(set(rows))
    for flag in ("n_recur=2", "n_recur=4", "max_iters=9438", "router=token", "kv=share", "kv=share_k", "kv=share_v", "router_kind=mlp", "router_width=3840",
                 "router_score=tanh", "router_score=none", "router_score=add", "router_score=sigmoid", "router_alpha=1", "router_loss=0", "aux_router=True",
                 "aux_router_lr_scale=10", "capacity_warmup_iters=1000", "router_z_loss=1e-3", "router_z_loss=0", "router_balance=bias", "router_choice=random"):
        assert any(f"--{flag}" in row.split() for row in rows), flag
    assert {name for name, _, _ in ROWS_OF_FLAGS} == set(MOR)


FAMILIES = ["gpt2_small", "grt_small", "poisson_small", "rrt_small", "ouro_small", "grt_medium_isoparam", "smollm/vanilla_135m", "smollm/recursive3_360m", "smollm/recursive2_1700m",
            "smollm/ablation/cycle3_135m", "smollm/ablation/sequence2_135m", "smollm/ablation/middle_cycle3_135m",
            "smollm/ablation/middle_sequence2_360m", "smollm/ablation/cycle3_730m", "mor_360m"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    make_data(folder)
    return folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_a_small_version_of_each_family_trains(name, data, tmp_path, monkeypatch):
    """The layout, sharing, update and schedule as they are; the widths and the run cut down by flags."""
    monkeypatch.chdir(tmp_path)
    llama = dict(n_kv_head=1, n_ffn=24) if name in SMOLLM else {}
    train.main([str(CONFIG / f"{name}.py"), *flags(
        n_embd=16, n_head=2, **llama, block_size=16, batch_size=2, gradient_accumulation_steps=2, max_iters=2, warmup_iters=0, eval_interval=0,
        eval_tokens=64, log_interval=1, sample_tokens=0, dataset="toy", data_dir=data, device="cpu", compile=False)])
    folder = tmp_path / "out" / Path(name).name
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    steps, evals = ([record for record in log if record["event"] == event] for event in ("step", "eval"))
    assert [record["step"] for record in steps] == [1, 2] and all(math.isfinite(record["loss"]) for record in steps)
    assert evals[0]["val_loss"] == pytest.approx(math.log(320), abs=.1) and evals[-1]["val_loss"] < evals[0]["val_loss"]
    cfg = model.GPTConfig(**torch.load(folder / "ckpt.pt", weights_only=True)["model_config"])
    paper = cfg_of(name)
    assert (cfg.layout, cfg.update, cfg.block, cfg.router) == (paper.layout, paper.update, paper.block, paper.router)
    assert model.block_table(cfg) == model.block_table(paper)


# -------------------------------------------------------------------------------------------------------- the published numbers

def bytes_at(cfg, row):
    """bfloat16 weights and K/V of `batch_size` rows of `seq_len` tokens."""
    return 2 * n_params(cfg) + cfg.kv_bytes(int(row["seq_len"]), int(row["batch_size"]), torch.bfloat16, row["cache"])


OURS = {  # (config's name, its GPTConfig, row) -> the quantity in its basic unit
    "n_params": lambda name, cfg, row: n_params(cfg),
    "n_params_without_tables": lambda name, cfg, row: n_params(cfg, embeddings=False),
    "n_params_of_tables": lambda name, cfg, row: n_params(cfg) - n_params(cfg, embeddings=False),
    "flops_paper": lambda name, cfg, row: cfg.flops_per_token(2048, "paper"),
    "flops_grt_per_block": lambda name, cfg, row: cfg.flops_per_token(1024, "grt") / cfg.executed_blocks(),
    "flops_grt_over": lambda name, cfg, row: cfg.flops_per_token(1024, "grt") / cfg_of(row["against"]).flops_per_token(1024, "grt") - 1,
    "steps_paper": lambda name, cfg, row: 16.5e18 / (cfg.flops_per_token(2048, "paper") * recipe(name)[0]),
    "training_flops_paper": lambda name, cfg, row: cfg.flops_per_token(2048, "paper") * math.prod(recipe(name, overrides(row))),
    "tokens": lambda name, cfg, row: math.prod(recipe(name, overrides(row))),
    "kv+weights GiB": lambda name, cfg, row: bytes_at(cfg, row),
}


def agrees(number, value):
    """Whether a number, rounded to as many digits as `value` was printed with, is `value`."""
    return Decimal(number).quantize(value) == value


def overrides(row):
    """The flags that make the row's system of its config."""
    return tuple(row.get("overrides", ()))


def computed(row):
    number = OURS[row["ours"]](row["config"], cfg_of(row["config"], row.get("vocab_size", 50304), overrides(row)), row)
    return number / UNITS[row["unit"]]


def row_name(row):
    return f"{row['system']}-{row['quantity']}-{row['setting']}".replace(" ", "_")


def test_agreement_is_judged_at_the_precision_that_was_printed():
    assert agrees(0.754, Decimal("0.75")) and not agrees(0.756, Decimal("0.75")) and agrees(11.04, Decimal("11.0"))
    assert not agrees(11.06, Decimal("11.0")) and agrees(27.6, Decimal("28")) and not agrees(117_988_801, Decimal("117988800"))


@pytest.mark.parametrize("row", [row for row in ROWS if row["ours"]], ids=row_name)
def test_a_published_number_follows_from_its_config_exactly_where_the_file_says_so(row):
    assert row["agrees"] is agrees(computed(row), row["value"]), f"ours is {computed(row)}"


def test_every_row_is_complete_names_a_config_that_exists_and_stands_once():
    for row in ROWS:
        assert MUST <= set(row) <= MUST | MAY and row["paper"] in ("MoR", "GRT", "Ouro"), row
        assert type(row["value"]) is Decimal or row["value"] is None and row["ours"] is None and row["config"], f"{row}: not at hand, but a command"
        assert all(row[name] in LAYOUTS for name in ("config", "against") if row.get(name)), row
        assert (row["ours"] is None) == (row["agrees"] is None) and (row["ours"] is None or row["config"]), row
        assert row["ours"] is None or row["ours"] in OURS and row["unit"] in UNITS, row
        assert row["agrees"] is not False or row.get("note"), f"{row}: a number that does not follow needs a word"
    places = Counter((row["paper"], row["setting"], row["system"], row["quantity"]) for row in ROWS)
    assert [place for place, n in places.items() if n > 1] == []
    assert {row["ours"] for row in ROWS} == set(OURS) | {None}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "ablation" not in name and cfg_of(name).n_embd in (960, 768, 1024, 1280)])
def test_every_model_of_the_main_tables_has_a_published_loss(name):
    assert [row for row in ROWS if row["config"] == name and row["quantity"] == "validation NLL" and row["setting"].startswith("iso") and not overrides(row)]


def test_every_published_row_of_mixture_of_recursions_has_its_flags_in_the_docstring():
    """One system, one set of flags: those of a docstring; how long and by which schedule it trains is the row's own."""
    what_it_is = lambda flags: frozenset(flag for flag in flags if not re.match("--(max_iters|schedule)=", flag))
    stated = {name: {frozenset()} | {what_it_is(flags.split()) for file, _, flags in ROWS_OF_FLAGS if file in (name, "mor_360m")} for name in MOR}
    rows = [row for row in ROWS if row["paper"] == "MoR" and row["system"].startswith("MoR-")]
    assert {row["config"] for row in rows} == set(MOR) and len(rows) > 45
    for row in rows:
        assert what_it_is(overrides(row)) in stated[row["config"]], row
        assert cfg_of(row["config"], more=overrides(row)).n_recur == int(row["system"][4])
        if row["setting"].startswith("isoFLOP") and row["config"] != "mor_360m":
            assert settings_of(row["config"], *overrides(row)).max_iters == budget(row["config"], overrides(row)), row


def test_an_override_is_a_key_that_changes_the_config():
    rows = [row for row in ROWS if "overrides" in row]
    assert len(rows) > 25
    for row in rows:
        assert all(re.fullmatch(r"--\w+=\S+", flag) for flag in overrides(row)) and overrides(row), row
        s, before = settings_of(row["config"], *overrides(row)), settings_of(row["config"])
        assert all(s.values[flag[2:].split("=")[0]] != before.values[flag[2:].split("=")[0]] for flag in overrides(row)), row
        s.build(model.GPTConfig, vocab_size=320)
    with pytest.raises(UserError):
        settings_of("grt_small", "--no_such_key=1")


@pytest.mark.slow
def test_bench_sets_beside_a_model_the_published_rows_of_that_model_alone(capsys):
    def published(*flags):
        bench.main(["counts", str(CONFIG / "mor_360m.py"), "--vocab_size=50304", *flags])
        return {(row["system"], row["value"], row["counted"] and round(row["counted"], 2))
                for row in json.loads(capsys.readouterr().out.splitlines()[-1])["published"] if row["unit"] == "MFLOP"}

    assert published() == published("--max_iters=5") == {("MoR-3", 555.63, 555.63)}
    assert published("--n_core=15", "--n_recur=2") == {("MoR-2", 623.49, 623.49)}
    assert published("--kv=share") == {("MoR-3 share", 536.25, 536.25)}
    assert published("--n_core=9") == published("--router=token") == set()


# ------------------------------------------------------------------------------------------------------------- the table of all

SECTION_7 = {  # million parameters: dense, MoR, Poisson, Ouro, RRT of rank 8, GRT; an empty place is no row of the paper        [GRT, computed]
    "isoFLOP, Small": (124.37, 60.67, 61.84, 60.66, 61.64, 63.61), "isoFLOP, Medium": (354.60, 165.83, 167.92, 165.83, 168.45, 171.07),
    "isoFLOP, Large": (773.58, 282.01, 285.27, 282.00, 286.91, 290.20), "isoPARAM, Small": (124.37, 124.38, 125.55, 124.37, 134.20, 127.33),
    "isoPARAM, Medium": (354.60, 354.60, 356.70, None, None, 359.85), "isoPARAM, Large": (773.58, 773.59, 776.86, None, None, 781.78)}
SIZES = {  # settings of a table: rows
    ("isoFLOP, Small", "isoFLOP, Medium", "isoFLOP, Large"): 18, ("isoPARAM, Small", "isoPARAM, Medium", "isoPARAM, Large"): 14,
    ("ladder, 20,000 steps, Small",): 6, ("ladder, 2,000 steps, Medium",): 6, ("sensitivity, gate bias",): 4, ("sensitivity, 20,000 steps, Small",): 3,
    ("sensitivity, 5,000 steps, Medium",): 3, ("isoFLOP 16.5e18, 360M", "equal tokens, 360M"): 12, ("isoFLOP 16.5e18, 1.7B",): 6,
    ("sharing, 10 billion tokens, 135M", "sharing, 10 billion tokens, 360M"): 16 + 2, ("routers, 10 billion tokens, 360M",): 11,
    ("K/V sharing, 10 billion tokens, 360M",): 4, ("equal unique parameters, 730M",): 3, ("isoFLOP scaling, 16.5e18",): 12}


def tables_in(text):
    """{setting: [{column: cell} of each line]} of a page like PUBLISHED.md."""
    found = {}
    for section in text.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0].partition(": ")[2]] = [dict(zip(lines[0], line)) for line in lines[1:]]
    return found


@pytest.fixture(scope="module")
def page():
    return bench.published_table()[0]


@pytest.fixture
def few(monkeypatch):
    """Two small tables of the file, free to be edited; the page made of them."""
    rows = [dict(row) for row in bench.published_rows(Decimal) if row["setting"] in ("isoFLOP, Small", "shapes, 360M")]
    monkeypatch.setattr(bench, "published_rows", lambda number: rows)
    return rows, lambda: bench.published_table()


@pytest.mark.slow
def test_the_table_is_made_anew_to_the_letter(page):
    assert page == (ROOT / "PUBLISHED.md").read_text("utf-8"), "python bench.py table writes it anew"


@pytest.mark.slow
def test_an_edit_of_either_side_shows_in_the_table(few, monkeypatch):
    rows, make = few
    before, tally = make()
    row = next(row for row in rows if row["system"] == "GRT" and row["quantity"] == "parameters")
    row["value"] = Decimal("63.61")
    after, now = make()
    assert "parameters 63.61 M" in after and (now["agree"], now["do not agree"]) == (tally["agree"] + 1, tally["do not agree"] - 1)
    row["value"], known = Decimal(35), bench.system_of
    assert make()[0] == before
    monkeypatch.setattr(bench, "system_of", lambda row: known(dict(row, overrides=["--n_ffn=3000"]) if row["config"] == "grt_small" else row))
    (says, line), (said, old) = zip(*((new, old) for new, old in zip(make()[0].splitlines(), before.splitlines()) if new != old))
    assert says.startswith("2 tables") and line.startswith("| GRT | `python train.py config/grt_small.py`") and "63,611,904" in old and "63,611,904" not in line


@pytest.mark.slow
def test_the_table_has_the_parameters_of_every_rival(page):
    tables = tables_in(page)
    for setting, numbers in SECTION_7.items():
        wanted = {system: number for system, number in zip(("dense", "MoR", "Poisson", "Ouro", "RRT", "GRT"), numbers) if number}
        assert {line["system"]: round(int(line["parameters"].replace(",", "")) / 1e6, 2) for line in tables[setting]} == wanted, setting


@pytest.mark.slow
def test_the_tables_have_every_row_of_both_papers(page):
    tables = tables_in(page)
    assert {settings: sum(len(tables[setting]) for setting in settings) for settings in SIZES} == SIZES
    places = {(row["setting"], row["system"]) for row in ROWS}
    assert {(setting, line["system"]) for setting, lines in tables.items() for line in lines if "system" in line} == places


@pytest.mark.slow
def test_every_command_in_the_table_makes_the_model_of_its_row(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [(line, words) for lines in tables_in(page).values() for line in lines for words in re.findall("`([^`]+)`", line.get("command", ""))]
    assert len(commands) > 150
    without = Counter(line["command"].partition(":")[0] for lines in tables_in(page).values() for line in lines if "`" not in line.get("command", "`"))
    assert without == {"none": 4}
    for line, command in commands:
        first, *more = (shlex.split(part) for part in command.split(" && "))
        s = train.parse(first[2:]) if first[1] == "train.py" else list(bench.settings_of(first[2:])[1].values())[-1]
        vocabulary = 49152 if "mor_" in command or "smollm" in command or "360m" in command else 50304
        cfg = s.build(model.GPTConfig, vocab_size=vocabulary)
        if "--paper" not in command or "decode" not in command:          # whose context is 1,152
            assert f"{bench.count_once(cfg):,}" == line["parameters"], command
        assert cfg.layout == line["layout"] and cfg.unused() == [], command
        assert (line["tokens"] == "") is (first[1] == "bench.py"), command
        for words in more:
            assert words[:2] == ["python", "eval.py"] and config.parse(words[2:], [evaluation.EvalConfig], "", words=("", 99)).words in (["depth"], ["steps", "gate"])


@pytest.mark.slow
def test_a_table_gives_the_command_that_measures_its_numbers_or_says_that_there_is_none(page):
    tables = tables_in(page)
    steps = evaluation.exit_depths(cfg_of("grt_large"))
    deep, others = ([line for line in tables["dynamics, Large"] if ("at depth" in line["system"]) is at_depth] for at_depth in (True, False))
    assert [line["system"] for line in deep] == [f"GRT at depth {n}" for n in (0, 1, 2, 5, 6, 8, 10, 12)] and {0, 1, 2, 5, 6, 8, 10, 12} <= set(steps)
    assert all("eval.py depth" in line["command"] for line in deep)
    assert ["steps gate" in line["command"] for line in others] == ["step" in line["system"] for line in others] == [False, False, True, True]
    served = {line["system"]: line for setting, lines in tables.items() if setting.startswith("throughput") for line in lines}
    assert {system: line["command"].startswith("`python bench.py serve ") for system, line in served.items()} == dict.fromkeys(("MoR-2", "MoR-3", "MoR-4"), True)
    compiles = {line["system"]: train.parse(shlex.split(line["command"].strip("`"))[2:]).compile for line in tables["training, Small"]}
    assert compiles == {"dense, compiled": "auto", "GRT, not compiled": False}


def test_a_bar_in_a_cell_ends_no_cell():
    line = bench.markdown([["openness", "b"], ["|(1-g)(o-h)| / |o|", "0"]]).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 3 and line.replace("\\|", "|") == "| |(1-g)(o-h)| / |o| | 0 |"


def test_the_opening_explains_why_its_examples_differ():
    """MoR-3: the head and the width of K and V make the difference, and the rest is rounding and routers; MoR at Small: no capacities."""
    mor, small = cfg_of("mor_360m", 49152), cfg_of("gpt2_small", more=("--n_prelude=1", "--n_core=1", "--n_recur=10", "--n_coda=1", "--router=expert"))
    mflop = lambda cfg, S, convention: cfg.flops_per_token(S, convention) / 1e6
    words = [f"{mflop(*way):.2f}" for way in ((mor, 2048, "paper"), (mor, 2048, "exact"), (small, 1024, "grt"), (small, 1024, "exact"))]
    assert words == ["555.63", "595.83", "207.62", "192.58"] and all(word in bench.OPENING for word in words)
    head, full_width = 2 * 49152 * 960 / 1e6, dataclasses.replace(mor, n_kv_head=None)
    kv = mflop(full_width, 2048, "exact") - mflop(mor, 2048, "exact")
    assert (round(kv), round(head)) == (54, 94) and "less 54 for K and V, plus 94 for the head" in bench.OPENING
    assert mflop(mor, 2048, "paper") - kv + head == pytest.approx(mflop(mor, 2048, "exact"), abs=.2)
    assert mflop(small, 1024, "grt") == mflop(cfg_of("gpt2_small"), 1024, "grt")


def test_what_is_not_at_hand_says_so_in_the_table_and_is_no_number(few):
    rows, make = few
    rows[0]["value"], rows[0]["ours"] = None, None
    text, tally = make()
    assert tally["not at hand"] == 1 and f"{rows[0]['quantity']} not at hand" in text and "None" not in text


def test_the_table_of_properties_is_read_off_the_configs():
    row = next(row for row in ROWS if row["config"] == "grt_small" and row["setting"] == "isoFLOP, Small")
    of = lambda **more: {name: has == "yes" for name, has, _ in bench.property_lines([dict(row, **more)])[1:]}
    grt, names = of(), list(bench.PROPERTIES)
    assert [name for name in names if grt[name]] == [
        "leaves early while decoding: as predictions settle (exit=kl)", "input read at every step", "gate", "noise in training", "random depth in training", "runs deeper than trained",
        "plain cache: all tokens at every step", "one K and V for all steps while decoding"]
    changes = {("--update=inject",): "-gate", ("--state_noise=0", "--gate_noise=0"): "-noise in training", ("--depth_sampling=fixed",): "-random depth in training",
               ("--loss=every", "--update=inject"): "+leaves early while decoding: by an exit gate (exit=cdf), +every step supervised, -gate",
               ("--lora_rank=8",): "+weights change with the step, -runs deeper than trained",
               ("--router=token", "--update=replace"): "-input read at every step, -gate, +depth of its own per token in training, -leaves early while decoding: as predictions settle (exit=kl), -runs deeper than trained, "
                                    "-plain cache: all tokens at every step, -one K and V for all steps while decoding",
               ("--router=expert",): "+depth of its own per token in training, -runs deeper than trained, -plain cache: all tokens at every step, -one K and V for all steps while decoding"}
    for flags, wanted in changes.items():
        now = of(overrides=list(flags))
        assert {("+" if now[name] else "-") + name for name in names if now[name] != grt[name]} == set(wanted.split(", ")), flags


@pytest.mark.slow
def test_bench_writes_the_table_and_refuses_what_does_not_go_with_it(few, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.main(["table"])
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "PUBLISHED.md").read_text("utf-8") == few[1]()[0] and len(lines) == 2
    record = json.loads(lines[-1])
    assert record["mode"] == "table" and (record["tables"], record["rows"]) == (2, 7) and "2 tables, 7 rows" in lines[0]
    bench.main(["table", "--to=mine.md"])
    assert (tmp_path / "mine.md").read_bytes() == (tmp_path / "PUBLISHED.md").read_bytes()
    grt = str(CONFIG / "grt_small.py")
    for argv, words in ((["table", grt], "leave out"), (["table", "--n_embd=8"], "leave out --n_embd"), (["table", "--to=none/x.md"], "none/x.md cannot be written"),
                        (["counts", grt, "--to=x.md"], "goes with mode table"),
                        (["counts", grt, "--jobs=3"], "jobs=3 has no part in a counts run, it goes with mode ladder"), (["counts", grt, "--seeds=4"], "seeds=[4]"),
                        (["counts", grt, "--results=/x"], "results=/x"), (["train", grt, "--cache=mean"], "goes with mode generate or decode"),
                        (["generate", grt, "--seq_len=8"], "goes with mode counts or train")):
        assert words in refusal(bench.main, argv)
