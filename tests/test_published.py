"""The papers' models: their layouts, recipes and counts, and config/published.json, the numbers that the papers state.

    python -m pytest -q tests/test_published.py
"""
import functools
import json
import math
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from toy import flags, make_data

import model
import train
from config import UserError

CONFIG = Path(train.__file__).resolve().parent / "config"
TEXT = (CONFIG / "published.json").read_text("utf-8")
ROWS = json.loads(TEXT, parse_float=Decimal, parse_int=Decimal)["rows"]          # a Decimal knows how many digits were printed
MUST = {"config", "paper", "setting", "system", "quantity", "value", "unit", "ours", "agrees"}
MAY = {"note", "against", "vocab_size", "batch_size", "seq_len", "cache"}
UNITS = {"M": 1e6, "B": 1e9, "MFLOP": 1e6, "1e18 FLOP": 1e18, "GiB": 2**30, "%": 1e-2, "parameters": 1, "steps": 1}

WIDTHS = {  # n_embd, n_head, n_kv_head, n_ffn                                                         [MoR, shapes; GRT, shapes]
    "135m": (576, 9, 3, 1536), "360m": (960, 15, 5, 2560), "730m": (1536, 24, 8, 4096), "1700m": (2048, 32, 32, 8192),
    "small": (768, 12, 12, 3072), "medium": (1024, 16, 16, 4096), "large": (1280, 20, 20, 5120)}
LAYOUTS = {
    "gpt2_small": "0+12x1+0", "gpt2_medium": "0+24x1+0", "gpt2_large": "0+36x1+0",
    "grt_small": "1+1x10+1", "grt_medium": "2+5x4+2", "grt_large": "1+5x6+5",
    "grt_small_isoparam": "1+10x10+1", "grt_medium_isoparam": "2+20x4+2", "grt_large_isoparam": "3+30x6+3",
    "smollm/vanilla_135m": "0+30x1+0", "smollm/vanilla_360m": "0+32x1+0", "smollm/vanilla_730m": "0+26x1+0", "smollm/vanilla_1700m": "0+24x1+0",
    "smollm/recursive2_135m": "1+14x2+1", "smollm/recursive3_135m": "1+10x3+1", "smollm/recursive4_135m": "1+7x4+1",
    "smollm/recursive2_360m": "1+15x2+1", "smollm/recursive3_360m": "1+10x3+1", "smollm/recursive4_360m": "1+8x4+1",
    "smollm/recursive2_730m": "1+12x2+1", "smollm/recursive3_730m": "1+8x3+1", "smollm/recursive4_730m": "1+6x4+1",
    "smollm/recursive2_1700m": "1+11x2+1", "smollm/recursive3_1700m": "1+8x3+1",
    "smollm/ablation/vanilla_135m_10b": "0+30x1+0", "smollm/ablation/vanilla_360m_10b": "0+32x1+0",
    "smollm/ablation/middle_cycle3_730m": "1+8x3+1", "smollm/ablation/cycle3_730m": "0+10x3+0",
    **{f"smollm/ablation/{sharing}{N}_{size}": plan for sharing in ("cycle", "sequence")
       for N, size, plan in ((2, "135m", "0+15x2+0"), (3, "135m", "0+10x3+0"), (2, "360m", "0+16x2+0"), (3, "360m", "0+10x3+0"))},
    **{f"smollm/ablation/middle_{sharing}{N}_{size}": plan for sharing in ("cycle", "sequence")
       for N, size, plan in ((2, "135m", "1+14x2+1"), (3, "135m", "1+9x3+1"), (2, "360m", "1+15x2+1"), (3, "360m", "1+10x3+1"))},
}
SMOLLM = [name for name in LAYOUTS if name.startswith("smollm/")]
MAIN = [name for name in SMOLLM if "ablation" not in name]


@functools.cache
def settings_of(name, *more):
    return train.parse([str(CONFIG / f"{name}.py"), *more])


@functools.cache
def cfg_of(name, vocab_size=50304):
    return settings_of(name).build(model.GPTConfig, vocab_size=int(vocab_size))


@functools.cache
def n_params(cfg, embeddings=True):
    return cfg.n_params(embeddings)


def recipe(name):
    """(tokens per step, steps)."""
    s = settings_of(name)
    return s.batch_size * s.gradient_accumulation_steps * s.block_size, s.max_iters


# ------------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_config_has_the_layout_the_sharing_and_the_widths_of_its_paper(name):
    cfg, stem = cfg_of(name), name.split("/")[-1]
    assert cfg.layout == LAYOUTS[name]
    assert (cfg.n_embd, cfg.n_head, cfg.kv_heads, cfg.ffn_width) == WIDTHS[next(word for word in stem.split("_") if word in WIDTHS)]
    assert (cfg.block, cfg.update) == ("llama" if name in SMOLLM else "gpt2", "gate" if "grt" in stem else "replace")
    if name in SMOLLM and "vanilla" not in name:
        family, N = re.fullmatch(r"([a-z_]+)(\d)_\d+m", stem).groups()
        assert (cfg.sharing_name, cfg.n_recur) == ("middle_cycle" if family == "recursive" else family, int(N))
    assert (cfg.depth_sampling, cfg.state_noise, cfg.gate_noise) == (("uniform", .1, .1) if "grt" in stem else ("fixed", 0, 0))


def test_every_config_beside_these_is_in_the_table_above():
    there = {str(path.relative_to(CONFIG).with_suffix("")) for path in CONFIG.rglob("[!_]*.py")}
    ours = {name for name in there if name.startswith("bench/") or name.endswith(("_tiny", "_tiny_half"))}
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


@pytest.mark.parametrize("name", MAIN)
def test_an_isoflop_run_spends_its_budget_and_cools_down_to_zero(name):
    s, (tokens, steps) = settings_of(name), recipe(name)
    assert steps == round(16.5e18 / (cfg_of(name).flops_per_token(2048, "paper") * tokens))
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
        assert s.warmup_iters == (57 if name in SMOLLM else 2000)


FAMILIES = ["gpt2_small", "grt_small", "grt_medium_isoparam", "smollm/vanilla_135m", "smollm/recursive3_360m", "smollm/recursive2_1700m",
            "smollm/ablation/cycle3_135m", "smollm/ablation/sequence2_135m", "smollm/ablation/middle_cycle3_135m",
            "smollm/ablation/middle_sequence2_360m", "smollm/ablation/cycle3_730m"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    make_data(folder)
    return folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
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
    assert (cfg.layout, cfg.update, cfg.block, model.block_table(cfg)) == (paper.layout, paper.update, paper.block, model.block_table(paper))


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
    "training_flops_paper": lambda name, cfg, row: cfg.flops_per_token(2048, "paper") * math.prod(recipe(name)),
    "tokens": lambda name, cfg, row: math.prod(recipe(name)),
    "kv+weights GiB": lambda name, cfg, row: bytes_at(cfg, row),
}


def agrees(number, value):
    """Whether a number, rounded to as many digits as `value` was printed with, is `value`."""
    return Decimal(number).quantize(value) == value


def computed(row):
    number = OURS[row["ours"]](row["config"], cfg_of(row["config"], row.get("vocab_size", 50304)), row)
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
        assert MUST <= set(row) <= MUST | MAY and type(row["value"]) is Decimal and row["paper"] in ("MoR", "GRT", "Ouro"), row
        assert all(row[name] in LAYOUTS for name in ("config", "against") if row.get(name)), row
        assert (row["ours"] is None) == (row["agrees"] is None) and (row["ours"] is None or row["config"]), row
        assert row["ours"] is None or row["ours"] in OURS and row["unit"] in UNITS, row
        assert row["agrees"] is not False or row.get("note"), f"{row}: a number that does not follow needs a word"
    places = Counter((row["paper"], row["setting"], row["system"], row["quantity"]) for row in ROWS)
    assert [place for place, n in places.items() if n > 1] == []
    assert {row["ours"] for row in ROWS} == set(OURS) | {None}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "ablation" not in name and cfg_of(name).n_embd in (960, 768, 1024, 1280)])
def test_every_model_of_the_main_tables_has_a_published_loss(name):
    assert [row for row in ROWS if row["config"] == name and row["quantity"] == "validation NLL" and row["setting"].startswith("iso")]


def test_flags_in_the_notes_are_keys():
    notes = [(row["config"], row["note"].split()) for row in ROWS if row.get("note", "").startswith("--")]
    assert len(notes) > 3
    for name, words in notes:
        settings_of(name, *words).build(model.GPTConfig, vocab_size=320)
    with pytest.raises(UserError):
        settings_of("grt_small", "--no_such_key=1")
