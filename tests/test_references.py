"""Other people's models: random two-layer GPT-2 and Llama of `transformers` give the same logits from the same weights.

    python -m pytest -q tests/test_references.py
"""
import pytest
import torch
from tiny import some_ids

from model import GPT, GPTConfig

pytestmark = pytest.mark.slow


def randomize(model):
    """Loud weights, norms and biases included: at their start values a missing one would not show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn_like(p)) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def load(cfg, weights):
    model = GPT(cfg).eval()
    model.load_state_dict(weights)                                           # strict: every name, nothing over
    return model


def assert_equal_logits(mine, theirs, vocab_size):
    ids_BT = some_ids(2, 24, vocab_size=vocab_size)
    with torch.no_grad():
        logits_BTV = mine(ids_BT).logits
        assert logits_BTV.std() > 0.5 and torch.allclose(logits_BTV, theirs(ids_BT).logits, atol=1e-4)
        longer_BT = mine.generate(ids_BT, 8, temperature=0)
        assert (longer_BT[:, 24:] == theirs(longer_BT).logits[:, 23:-1].argmax(-1)).all()


def test_gpt2_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=97, n_positions=48, n_embd=32, n_head=4, n_layer=2, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)))
    their = theirs.state_dict()
    weights = {"embed.weight": their["transformer.wte.weight"], "positions.table.weight": their["transformer.wpe.weight"]}
    for kind in ("weight", "bias"):
        weights[f"norm.{kind}"] = their[f"transformer.ln_f.{kind}"]
        for i in range(2):
            a, b = f"recursion.core.{i}.", f"transformer.h.{i}."
            query, key, value = their[b + f"attn.c_attn.{kind}"].split(32, -1)          # their matrices are transposed
            weights |= {a + f"attention.{name}.{kind}": part.T if kind == "weight" else part
                        for name, part in (("query", query), ("key", key), ("value", value))}
            for name, other in (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                part = their[b + f"{other}.{kind}"]
                weights[a + f"{name}.{kind}"] = part.T if kind == "weight" else part
            weights[a + f"attention_norm.{kind}"] = their[b + f"ln_1.{kind}"]
            weights[a + f"mlp_norm.{kind}"] = their[b + f"ln_2.{kind}"]
    mine = load(GPTConfig(vocab_size=97, block_size=48, n_embd=32, n_head=4, n_core=2, bias=True), weights)
    assert_equal_logits(mine, theirs, 97)


def test_llama_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, max_position_embeddings=48, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, intermediate_size=88, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0)))
    names = {"model.embed_tokens": "embed", "model.norm": "norm", "model.layers": "recursion.core",
             "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm", "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
             "self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.output", "gate_proj": "gate", "up_proj": "up",
             "down_proj": "down"}
    weights = {}
    for name, p in theirs.state_dict().items():
        for other, mine in names.items():
            name = name.replace(other, mine)
        if name != "lm_head.weight":                                         # tied
            weights[name] = p
    cfg = GPTConfig(block="llama", vocab_size=97, block_size=48, n_embd=32, n_head=4, n_kv_head=2, n_core=2, n_ffn=88)
    assert_equal_logits(load(cfg, weights), theirs, 97)
