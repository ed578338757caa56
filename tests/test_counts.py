"""Counts: parameters, FLOPs and K/V bytes, against published totals and against what really runs.

    python -m pytest -q tests/test_counts.py
"""
import pytest
import torch
from tiny import GRID, case_config, case_name, layout, loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig, describe, make_cache

GRT = dict(vocab_size=50304, update="gate")                # gpt2 blocks without biases, context 1024
SMALL, MEDIUM, LARGE = dict(n_embd=768, n_head=12), dict(n_embd=1024, n_head=16), dict(n_embd=1280, n_head=20)
SMOLLM = {                                                 # shapes of the SmolLM family, as MoR uses them
    "135M": dict(n_embd=576, n_head=9, n_kv_head=3, n_ffn=1536),
    "360M": dict(n_embd=960, n_head=15, n_kv_head=5, n_ffn=2560),
    "730M": dict(n_embd=1536, n_head=24, n_kv_head=8, n_ffn=4096),
    "1.7B": dict(n_embd=2048, n_head=32, n_kv_head=32, n_ffn=8192),
}


def smollm(size, plan):
    return GPTConfig(block="llama", vocab_size=49152, block_size=2048, **SMOLLM[size], **layout(plan))


# ------------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("plan, size, total", [
    ("2+5x4+2", MEDIUM, 171_073_536), ("2+20x4+2", MEDIUM, 359_847_936),
    ("1+5x6+5", LARGE, 290_196_480), ("3+30x6+3", LARGE, 781_780_480)])
def test_grt_has_the_parameters_of_the_released_checkpoints(plan, size, total):
    assert GPTConfig(**GRT, **size, **layout(plan)).n_params() == total


def test_grt_small_has_63_million_parameters():
    assert round(GPTConfig(**GRT, **SMALL, **layout("1+1x10+1")).n_params() / 1e6, 2) == 63.61


def test_without_any_setting_it_is_gpt2_small():
    cfg = GPTConfig()
    assert (cfg.layout, cfg.n_embd, cfg.n_head, cfg.block_size, cfg.vocab_size) == ("0+12x1+0", 768, 12, 1024, 50304)
    assert cfg == GPTConfig(block="gpt2", bias=False, dropout=0.0, n_kv_head=None, n_ffn=None, sharing=None, update="replace",
                            router="none", kv="own", depth_sampling="fixed", min_depth=1, loss="last", state_noise=0.0,
                            gate_noise=0.0, gate_bias=4.0, gate_temperature=1.0, proj_init="normal", rope_theta=10000.0, norm_eps=1e-5)


def test_gpt2_has_124_million_parameters():
    assert GPTConfig(vocab_size=50257, bias=True).n_params() == 124_439_808
    assert GPTConfig(vocab_size=50257, bias=True).n_params(embeddings=False) == 124_439_808 - (50257 + 1024) * 768


@pytest.mark.parametrize("plan, total", [
    ("0+32x1+0", 314_635_200), ("1+15x2+1", 167_150_400), ("1+10x3+1", 117_988_800), ("1+8x4+1", 98_324_160)])
def test_a_recursive_360m_model_has_the_published_unique_parameters(plan, total):
    assert smollm("360M", plan).n_params(embeddings=False) == total


@pytest.mark.parametrize("size, n_core, millions, table", [
    ("135M", 30, 106, 28), ("360M", 32, 315, 47), ("730M", 26, 654, 75), ("1.7B", 24, 1611, 101)])
def test_smollm_shapes_have_the_published_sizes(size, n_core, millions, table):
    cfg = smollm(size, f"0+{n_core}x1+0")
    assert round(cfg.n_params(embeddings=False) / 1e6) == millions
    assert round((cfg.n_params() - cfg.n_params(embeddings=False)) / 1e6) == table


def test_more_steps_cost_no_parameters():
    for update in ("replace", "inject", "gate"):
        assert len({tiny(n_core=2, n_recur=R, update=update).n_params() for R in (1, 2, 5)}) == 1


def test_the_page_about_a_model_shows_its_plan_and_its_counts():
    cfg = tiny(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate", rope_theta=5.0)
    page = describe(cfg)
    for words in ("layout 1+2x3+1", "step 2:   0@4      1@5", f"{cfg.n_params():,} unique", "executed    8 blocks from 4",
                  "mean:", "(2, 8, 61)", "note: rope_theta=5.0"):
        assert words in page, words
    assert "mean:" not in describe(tiny(n_recur=2, sharing="sequence"))
    for words, keys in (("depth fixed 3, every step supervised", dict(loss="every")), ("rank 2", dict(lora_rank=2)),
                        ("poisson, 3 on average, gradients through the last 2; first state random", dict(update="inject", depth_sampling="poisson", bptt=2, state_init="random"))):
        assert words in describe(tiny(n_recur=3, **keys))


@pytest.mark.parametrize("router", ["expert", "token"])
def test_the_page_about_a_routed_model_needs_no_tokens(router):
    page = describe(tiny(n_prelude=1, n_core=2, n_recur=3, n_coda=1, router=router, kv="share"))
    assert f"router={router} kv=share" in page and "(2, 8, 61)" in page and ("(2, 5, 16)" in page) == (router == "expert")


def test_counting_needs_no_memory():
    huge = GPTConfig(vocab_size=50304, n_embd=24576, n_head=96, n_core=24)                 # 700 GB in float32
    assert huge.n_params() == 24 * (12 * 24576**2 + 2 * 24576) + (50304 + 1024 + 1) * 24576
    assert huge.flops_per_token(2048) > 2 * huge.n_params(embeddings=False)
    assert huge.kv_bytes(2048, 64, torch.float16) == 2 * 64 * 24 * 2048 * 24576 * 2


# ------------------------------------------------------------------------------------------------------------------ FLOPs


@pytest.mark.parametrize("plan, size, without, with_recurrence", [
    ("1+1x10+1", SMALL, 207.6, 266.6), ("2+5x4+2", MEDIUM, 704.6, 746.6), ("1+5x6+5", LARGE, 1604.3, 1702.6),
    ("1+10x10+1", SMALL, None, 1823.7), ("2+20x4+2", MEDIUM, None, 2508.2), ("3+30x6+3", LARGE, None, 8387.3)])
def test_flops_equal_the_formula_of_the_grt_paper(plan, size, without, with_recurrence):
    def mflop(update):
        return round(GPTConfig(**{**GRT, "update": update}, **size, **layout(plan)).flops_per_token(1024, "grt") / 1e6, 1)

    assert mflop("gate") == with_recurrence
    assert without in (None, mflop("replace"))


@pytest.mark.parametrize("case", GRID, ids=case_name)
def test_exact_flops_are_the_flops_of_a_real_forward(case):
    cfg, depth, T = case_config(case), case["depth"], 12
    model = loud(cfg)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(some_ids(2, T), depth=depth)
    full_attention = cfg.executed_blocks(depth) * 4 * cfg.n_embd * T         # what ran, per token: the whole square
    exact = cfg.flops_per_token(T, depth=depth)                              # counts half of it, the causal triangle
    assert counter.get_total_flops() == 2 * T * (exact + full_attention / 2)


@pytest.mark.parametrize("plan, mflop", [("0+32x1+0", 833.62), ("1+8x4+1", 885.72)])
def test_flops_equal_the_formula_of_the_mor_paper(plan, mflop):
    assert round(smollm("360M", plan).flops_per_token(2048, "paper") / 1e6, 2) == mflop


def test_flops_grow_by_one_core_per_step_and_depth_may_be_fractional():
    for convention in ("exact", "paper", "grt"):
        for update in ("replace", "gate"):
            cfg = tiny(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update=update)
            at = {depth: cfg.flops_per_token(32, convention, depth) for depth in (0, 1, 2, 2.5, 3)}
            assert at[2] - at[1] == at[1] - at[0] > 0 and at[2.5] == (at[2] + at[3]) / 2
            assert cfg.flops_per_token(32, convention) == at[3]
    with pytest.raises(ValueError, match="convention='approximate' is not one of exact"):
        tiny().flops_per_token(32, "approximate")


# -------------------------------------------------------------------------------------------------------------- K/V cache


@pytest.mark.parametrize("case", GRID, ids=case_name)
def test_kv_bytes_are_those_of_the_cache_to_the_byte(case):
    cfg, depth = case_config(case), case["depth"]
    for dtype in (torch.float32, torch.bfloat16):
        cache = make_cache(GPT(cfg).to(dtype), 3, 10, depth)
        assert cfg.kv_bytes(10, 3, dtype, depth=depth) == cache.nbytes()
        for how in ("first", "last", "mean") if case["sharing"] == "cycle" else ():
            assert cfg.kv_bytes(10, 3, dtype, how, depth) == cache.compress(how).nbytes()


def test_grt_medium_keeps_9_slots_in_place_of_24():
    cfg = GPTConfig(**GRT, **MEDIUM, **layout("2+5x4+2"))
    slot = 2 * 1024 * 1024 * 2                                               # K and V, tokens, features, bytes
    assert cfg.kv_bytes(1024, 1, torch.bfloat16) == 24 * slot
    assert cfg.kv_bytes(1024, 1, torch.bfloat16, "last") == 9 * slot
    assert cfg.kv_bytes(1024, 1, torch.bfloat16, "mean") == 9 * slot + 5 * slot // 1024          # and the entry in the making


def test_grt_medium_decodes_in_two_fifths_of_the_memory_of_gpt2_medium():
    """Weights and cache, bfloat16, 32 rows of 1024 tokens."""
    def gib(cfg, cache, rows):
        return (2 * cfg.n_params() + cfg.kv_bytes(1024, rows, torch.bfloat16, cache)) / 2**30

    dense, grt = GPTConfig(vocab_size=50304, n_core=24, **MEDIUM), GPTConfig(**GRT, **MEDIUM, **layout("2+5x4+2"))
    assert round(gib(grt, "last", 32) / gib(dense, "full", 32), 4) == 0.3944
    published = {(1, dense, "full"): 0.75, (32, dense, "full"): 3.66, (1, grt, "full"): 0.41, (32, grt, "full"): 3.32,
                 (1, grt, "mean"): 0.35, (32, grt, "mean"): 1.44}
    for (rows, cfg, cache), size in published.items():
        assert gib(cfg, cache, rows) == pytest.approx(size, abs=0.0051)


def test_every_executed_block_reads_every_stored_token():
    cfg = tiny(n_prelude=1, n_core=2, n_recur=3, n_coda=1)
    assert cfg.kv_io(100) == cfg.kv_io(100, "mean") == 8 * 100 and cfg.kv_io(100, depth=1) == 4 * 100
    with pytest.raises(ValueError, match="keeps one K and V per block"):
        tiny(n_core=2, n_recur=3, sharing="sequence").kv_io(100, "mean")
