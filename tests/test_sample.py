"""Sampling: text as it streams, prompts, depths, the trace, and which run is taken.

    python -m pytest -q tests/test_sample.py
"""
import io
import itertools
import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny
from toy import DENSE, SEQUENCE, flags, make_config, make_data, refusal

import prepare
import sample
import train
from model import GPT, GPTConfig
from sample import Text, depth_meaning

ROOT = Path(sample.__file__).resolve().parent
BYTES = prepare.get_tokenizer("bytes")
MIXED = "Zoë 🦊🦊 東京 👩‍👩‍👧 नमस्ते\r\n<|endoftext|> end"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/toy (gated, any depth), out/dense, out/sequence, out/fixed and routed out/expert and out/token:
    untrained, so every token comes up."""
    folder = tmp_path_factory.mktemp("sample")
    make_data(folder)
    here = os.getcwd()
    os.chdir(folder)
    routed = dict(depth_sampling="fixed", update="replace")
    for name, changes in {"dense": DENSE, "sequence": SEQUENCE, "fixed": dict(depth_sampling="fixed"), "expert": {"router": "expert", **routed},
                          "token": {"router": "token", **routed}, "toy": {}}.items():
        make_config(folder, **{"max_iters": 0, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        os.utime(f"out/{name}/ckpt.pt", (1e9, 1e9 + (name == "toy")))
    os.chdir(here)
    return folder


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(*flags, **flags) -> (stdout, stderr) of sample.py; greedy and short unless told otherwise."""
    monkeypatch.chdir(place)

    def go(*argv, **changes):
        capsys.readouterr()
        sample.main([*flags(**{"max_new_tokens": 8, "temperature": 0, **changes}), *argv])
        return capsys.readouterr()
    return go


def load(place, name="toy"):
    return sample.load_run(place / "out" / name, "cpu")[0]


# ------------------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("ids", [list(MIXED.encode("utf-8")), list("🦊".encode("utf-8"))[:3], [0xF0, 0x9F, 65, 0xFF, 0xE6, 66], [256, 65, 256], []])
def test_streamed_text_equals_the_whole_decoded_at_once(ids):
    text = Text(BYTES, None)
    pieces = [text.add(i) for i in ids] + [text.end()]
    assert "".join(pieces) == text.text == BYTES.decode(ids, errors="replace")


def test_a_character_appears_when_its_last_byte_does():
    text = Text(BYTES, None)
    assert [text.add(i) for i in "é🦊x".encode("utf-8")] == ["", "é", "", "", "", "🦊", "x"]


def test_an_id_without_text_is_shown_as_a_placeholder_in_its_place():
    text = Text(BYTES, None)
    pieces = [text.add(i) for i in (65, 0xF0, 300, 0x9F, 0xA6, 0x8A)] + [text.end()]
    assert "".join(pieces) == text.text == "A" + 5 * "\ufffd"                    # it cuts the fox in two, never joins it


@pytest.mark.parametrize("stop, shown", [("🦊", "Zoë 🦊"), ("🦊 東", None), ("東京 👩", "Zoë 🦊🦊 東京 👩"), ("<|endoftext|>", None), ("Z", "Z"), (" end", None)])
def test_a_stop_is_found_across_tokens_and_nothing_follows_it(stop, shown):
    shown = shown or MIXED[: MIXED.index(stop) + len(stop)]
    text = Text(BYTES, stop)
    pieces = [text.add(i) for i in MIXED.encode("utf-8")] + [text.end()]
    assert text.done and "".join(pieces) == text.text == shown


def test_a_stop_inside_a_longer_token_cuts_the_token():
    class Words:
        n_vocab = 2

        def decode_single_token_bytes(self, token):
            return (b"one two", b" three four")[token]
    text = Text(Words(), "two th")
    assert [text.add(0), text.add(1), text.add(1)] == ["one two", " th", ""] and text.done


def test_without_its_stop_a_text_runs_on():
    text = Text(BYTES, "never")
    assert "".join(text.add(i) for i in b"neve neve") == "neve neve" and not text.done


# --------------------------------------------------------------------------------------------------------------- prompts


def continued(model, prompt, n=8, **options):
    """prompt + what generate() writes after it, greedily."""
    ids = BYTES.encode_ordinary(prompt) or [BYTES.eot_token]
    new = model.generate(torch.tensor([ids]), n, temperature=0, **options)[0, len(ids):].tolist()
    runs = itertools.groupby(new, key=lambda i: i < BYTES.n_vocab)
    return prompt + "".join(BYTES.decode(list(ids), errors="replace") if known else "\ufffd" * len(list(ids)) for known, ids in runs)


def test_text_goes_to_stdout_and_everything_else_to_stderr(go, place):
    out, err = go(start="def f")
    assert out == continued(load(place), "def f") + "\n"
    assert "out/toy: 1+1x4+1 update=gate, step 0" in err and "tokens/s" in err and "cache full" in err


def test_prompts_of_different_lengths_share_a_batch_and_are_answered_as_if_alone(go, place):
    prompts = ["a", "class Fox(é):", "x" * 20]
    out, err = go(*(f"--start={prompt}" for prompt in prompts))
    assert out == "".join(continued(load(place), prompt) + "\n" for prompt in prompts)
    assert "--- 2 of 3" in err and "--- 3 of 3" in err and "3 rows x 8 tokens" in err


def test_every_sample_of_every_prompt_is_a_row_with_draws_of_its_own(go):
    out, err = go("--start=ab", "--start=c", num_samples=3, temperature=1.0)
    assert "6 rows x 8 tokens" in err and out.count("ab") >= 3
    assert out == go("--start=ab", "--start=c", num_samples=3, temperature=1.0).out != go("--start=ab", "--start=c", num_samples=3, temperature=1.0, seed=1).out
    first = [line[:3] for line in out.split("ab")[1:4]]
    assert len(set(first)) > 1


@pytest.mark.parametrize("argv", [[], ["--start="], ["--start=FILE:empty.txt"], ["--start=-"]])
def test_no_start_or_an_empty_one_is_end_of_text(go, place, argv, monkeypatch):
    (place / "empty.txt").touch()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert go(*argv).out == continued(load(place), "") + "\n"


def test_prompts_come_from_files_and_stdin_as_utf_8(go, place, monkeypatch):
    (place / "prompt é.txt").write_bytes("é🦊\r\n".encode("utf-8"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é🦊\r\n".encode("utf-8")), encoding="ascii"))
    assert go("--start=FILE:prompt é.txt").out == go("--start=-").out == go("--start=é🦊\r\n").out


def test_the_end_of_text_marker_in_a_prompt_is_ordinary_text(go, place):
    assert go("--start=<|endoftext|>").out == continued(load(place), "<|endoftext|>") + "\n"


@pytest.mark.parametrize("start, words", [("FILE:none.txt", "No such file"), ("FILE:.", "Is a directory"), ("FILE:out/toy/ckpt.pt", "utf-8")])
def test_a_prompt_that_cannot_be_read_is_one_line(go, start, words):
    assert words in refusal(go, start=start)


@pytest.mark.parametrize("prompt, n", [("", 0), ("abc", 0), ("abc", 70), ("abcdefg" * 30, 8), ("x" * 32, 1)])
def test_any_prompt_and_any_number_of_tokens_is_continued_with_and_without_a_cache(go, place, prompt, n):
    wanted = continued(load(place), prompt, n)
    assert go(start=prompt, max_new_tokens=n).out == go(start=prompt, max_new_tokens=n, use_cache=False).out == wanted + "\n"


def test_a_stop_ends_a_row_early_and_leaves_the_others_alone(go, place):
    model = load(place)
    start, stop = next((text[0], text[1:3]) for text in (continued(model, c) for c in string.ascii_letters) if text[1:3].isascii())
    other = next(text for text in (continued(model, c) for c in string.ascii_letters) if stop not in text)
    out, err = go(f"--start={start}", f"--start={other[0]}", stop=stop)
    assert out == start + stop + "\n" + other + "\n" and "2 rows x 8 tokens" in err
    assert "1 rows x 2 tokens" in go(start=start, stop=stop).err


def test_a_long_untrained_text_meets_ids_without_text_and_does_not_crash(go):
    out = go(num_samples=40, max_new_tokens=50, temperature=1.0, top_k=0).out
    assert out.count("\ufffd") > 200                                   # 63 of 320 ids have none, half of all bytes are cut off


@pytest.mark.parametrize("flag", ["temperature=-1", "temperature=nan", "temperature=inf", "top_k=-1", "top_p=0", "top_p=1.5", "top_p=nan", "seed=-1",
                                  "seed=2**70", "num_samples=0", "max_new_tokens=-1", "cache=none"])
def test_a_value_that_cannot_be_sampled_with_is_refused_before_anything_is_loaded(flag):
    assert refusal(sample.main, [f"--{flag}", "--out_dir=none"]).startswith("command line: " + flag.partition("=")[0])


@pytest.mark.parametrize("flag", ["top_k=0", "top_k=1", "top_k=320", "top_k=9999", "top_p=1", "top_p=1e-9", "temperature=1e-9", "temperature=1e9", "top_k=None"])
def test_the_edges_of_sampling_settings_are_legal(go, place, flag):
    out = go(f"--{flag}", start="ab", **({} if "temperature" in flag else dict(temperature=1.0))).out
    greedy = flag in ("top_k=1", "top_p=1e-9", "temperature=1e-9")
    assert out.startswith("ab") and (out == continued(load(place), "ab") + "\n") == greedy


def test_use_cache_false_reads_the_whole_text_for_every_token(go, monkeypatch):
    fed, feed = [], GPT.feed
    monkeypatch.setattr(GPT, "feed", lambda model, ids_BT, *args: fed.append(ids_BT.size(1)) or feed(model, ids_BT, *args))
    assert "cache" in go(start="abc", max_new_tokens=3).err and "cache" not in go(start="abc", max_new_tokens=3, use_cache=False).err
    assert fed == [3, 1, 1, 3, 4, 5]


# ----------------------------------------------------------------------------------------------------------------- depth


@pytest.mark.parametrize("depth, sentence", [
    (None, "depth 10 (trained at 2 to 10)"), (3, "depth 3 (trained at 2 to 10)"), (1, "depth 1 (trained at 2 to 10; never trained at this depth: expect worse)"),
    (0, "depth 0 (trained at 2 to 10; never trained at this depth: expect worse)"), (12, "depth 12 (trained at 2 to 10; beyond the trained depth: expect worse)")])
def test_what_a_depth_means_is_said(depth, sentence):
    assert depth_meaning(tiny(n_recur=10, depth_sampling="uniform", min_depth=2), depth) == sentence


def test_a_model_of_fixed_depth_was_trained_at_one_depth_only():
    assert depth_meaning(tiny(n_recur=4), 2) == "depth 2 (trained at 4; never trained at this depth: expect worse)"
    assert depth_meaning(tiny(n_core=2), None) == "no recursion"


@pytest.mark.parametrize("run, recursions, words", [("dense", 1, "has no recursion"), ("dense", 3, "has no recursion"), ("toy", -1, "give an integer from 0 up"),
                                                    ("sequence", 3, "always runs n_recur=2 steps")])
def test_a_depth_that_a_model_has_not_is_refused(go, run, recursions, words):
    assert words in refusal(go, out_dir=f"out/{run}", recursions=recursions)


@pytest.mark.parametrize("depth", [0, 1, 3, 4, 9])
def test_any_depth_can_be_asked_for(go, place, depth):
    out, err = go(start="ab", recursions=depth)
    assert out == continued(load(place), "ab", depth=depth) + "\n" and f"depth {depth} (" in err


@pytest.mark.parametrize("cache", ["first", "last", "mean"])
def test_a_compressed_cache_is_used_and_its_size_told(go, place, cache):
    out, err = go(start="abcdefgh", cache=cache, max_new_tokens=20)
    assert out == continued(load(place), "abcdefgh", 20, cache=cache) + "\n" and f"cache {cache}: " in err
    assert "use cache='full'" in refusal(go, cache=cache, out_dir="out/sequence")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_that_is_told_is_that_of_the_keys_as_they_are(go, monkeypatch, dtype):
    asked = []
    monkeypatch.setattr(GPTConfig, "kv_bytes", lambda cfg, n, rows, dtype, cache, depth, exit: asked.append((n, rows, dtype, cache, depth)) or 3 * 2**20)
    assert "cache mean: 3.00 MiB for 2 rows of 11 tokens" in go(start="abcd", num_samples=2, cache="mean", dtype=dtype, recursions=3).err
    assert asked == [(11, 2, getattr(torch, dtype), "mean", 3)]                 # the last token is never fed


# ---------------------------------------------------------------------------------------------------------------- colour

CODES = r"\x1b\[38;5;16;48;5;(\d+)m([^\x1b]*)\x1b\[0m"


def characters(out):
    """[(character, its background or None)] of coloured text, newlines left out."""
    cells = []
    for colour, inside, plain in re.findall(CODES + r"|([^\x1b])", out):
        cells += [(c, int(colour) if colour else None) for c in inside + plain if c != "\n"]
    return cells


@pytest.mark.parametrize("run", ["toy", "sequence", "expert", "token"])
@pytest.mark.parametrize("changes", [{}, dict(num_samples=3, temperature=1.0), dict(max_new_tokens=0), dict(max_new_tokens=1), dict(stop="\ufffd"),
                                     dict(use_cache=False), dict(max_new_tokens=60)], ids=str)
@pytest.mark.slow
def test_colour_adds_codes_and_changes_no_character(go, run, changes):
    prompts = ["--start=ab\n\nc", "--start=" + MIXED[:8], "--start="]
    plain, coloured = (go(*prompts, out_dir=f"out/{run}", color=color, **changes) for color in (False, True))
    assert "\x1b" not in plain.out + plain.err
    assert re.sub(CODES, r"\2", coloured.out) == plain.out and len(re.findall(CODES, coloured.out)) >= 5 * bool(changes.get("max_new_tokens", 1))
    assert "\x1b" not in re.sub(CODES, "", coloured.out) and not re.search(r"m[^\x1b]*\n[^\x1b]*\x1b\[0m", coloured.out)


@pytest.mark.parametrize("run", ["expert", "token", "toy"])
def test_a_character_has_the_colour_of_the_steps_that_its_last_token_took(go, place, run):
    prompt, model = "def é(x): 🦊", load(place, run)
    ids = BYTES.encode_ordinary(prompt)
    ids_1T = model.generate(torch.tensor([ids]), 12, temperature=0)
    steps = [*model(ids_1T).depth_BT[0].tolist()[:-1], None]                     # the last token is drawn and not read
    text, cells = Text(BYTES, None), []
    for token, n in zip(ids_1T[0].tolist(), steps):
        cells += [(c, n and sample.shade(n, 4)) for c in text.add(token)]
    cells += [(c, None) for c in text.end()]
    out = characters(go(start=prompt, max_new_tokens=12, color=True, out_dir=f"out/{run}").out)
    assert out == [cell for cell in cells if cell[0] != "\n"]
    assert (len({colour for _, colour in out} - {None}) > 1) == (run != "toy")


def test_a_text_beyond_the_context_keeps_its_colours_in_place(go, place):
    """What was read before the older half was dropped, and what is read again, is not told twice."""
    out = characters(go(start="ab" * 10, max_new_tokens=40, color=True, out_dir="out/expert", threshold=0).out)
    assert {colour for _, colour in out[:20]} == {sample.shade(4, 4)} and out[-1][1] is None and sum(colour is None for _, colour in out) <= 2
    out, err = go(start="ab" * 30, max_new_tokens=4, color=True, out_dir="out/expert", threshold=0)              # its beginning is never read
    assert [colour for _, colour in characters(out)[:60]] == [None] * 44 + [sample.shade(4, 4)] * 16 and "mean depth 4.00 of 4 over 19 tokens" in err


def test_the_legend_names_every_colour_with_the_fewest_steps_it_stands_for(go):
    assert [sample.shade(n, 4) for n in (0, 1, 2, 3, 4)] == [sample.SHADES[i] for i in (0, 0, 2, 4, 6)] and sample.shade(1, 1) == sample.SHADES[0]
    assert [text.strip() for _, text in re.findall(CODES, sample.legend(4))] == ["1", "2", "3", "4"]
    many = [(int(colour), int(text)) for colour, text in re.findall(CODES, sample.legend(40))]
    assert [colour for colour, _ in many] == list(sample.SHADES) and many[0][1] == 1
    assert all(sample.shade(n, 40) == colour and sample.shade(n - 1, 40) != colour for colour, n in many[1:])
    assert sample.legend(4) in go(color=True).err and "steps taken" not in go().err
    assert [(int(colour), text.strip()) for colour, text in re.findall(CODES, sample.legend(0))] == [(sample.shade(0, 0), "0")]
    assert sample.legend(0) in go(color=True, recursions=0).err


def test_a_newline_stays_outside_the_codes():
    assert sample.paint("\na\n", 195) == "\n\x1b[38;5;16;48;5;195ma\x1b[0m\n" and sample.paint("", 195) == ""


def test_a_model_without_a_loop_has_no_colours(go):
    assert "has no recursion" in refusal(go, out_dir="out/dense", color=True)


@pytest.mark.parametrize("run", ["expert", "token"])
def test_the_mean_depth_of_what_was_read_is_told(go, place, run):
    model, ids = load(place, run), list(b"class Fox:")
    ids_1T = model.generate(torch.tensor([ids]), 9, temperature=0)
    mean = model(ids_1T[:, :-1]).depth_BT.double().mean().item()
    assert 1 < mean < 4
    assert f"mean depth {mean:.2f} of 4 over 18 tokens read" in go(start="class Fox:", max_new_tokens=9, out_dir=f"out/{run}").err
    assert "mean depth" not in go(max_new_tokens=9, color=True).err + go(max_new_tokens=0, out_dir=f"out/{run}").err


def test_a_cache_that_grew_is_told_at_its_size_with_what_was_declared(go, monkeypatch):
    """Nobody and everybody goes on: the cache stays at the declared capacities, or holds four steps of all tokens."""
    sizes = []
    for threshold in (1, 0):
        err = go(start="abcd", max_new_tokens=20, num_samples=2, out_dir="out/expert", threshold=threshold).err
        sizes.append(re.search(r"cache full: (\S+) MiB for 2 rows of 23 tokens(.*)", err))
    declared = load(sample.Path(), "expert").cfg.kv_bytes(23, 2, torch.float32)
    assert sizes[0][2] == "" and sizes[0][1] == f"{declared / 2**20:.2f}"
    assert sizes[1][2] == f" (declared: {declared / 2**20:.2f}; more tokens went on than its capacities let in)" and float(sizes[1][1]) > float(sizes[0][1])


def test_a_lower_threshold_sends_more_tokens_on(go):
    depths = [float(re.search(r"mean depth (\S+)", go(start="def f", out_dir="out/expert", threshold=at).err)[1]) for at in (1, 0.5, 0)]
    assert depths[0] == 1 < depths[1] < depths[2] == 4
    assert go(start="def f", out_dir="out/expert", threshold=0.5).out == go(start="def f", out_dir="out/expert").out
    assert trace_lines(go(trace="ab", out_dir="out/expert", threshold=1).out)[1][1] == trace_lines(go(trace="ab", out_dir="out/expert", threshold=1).out)[1][4]


@pytest.mark.parametrize("run, threshold, words", [("toy", 0.5, "has no expert-choice router"), ("token", 0.5, "has no expert-choice router"),
                                                   ("dense", 0.0, "has no expert-choice router"), ("expert", 2, "threshold=2"), ("expert", -1, "threshold=-1")])
def test_a_threshold_that_means_nothing_is_refused(go, run, threshold, words):
    assert words in refusal(go, out_dir=f"out/{run}", threshold=threshold)
    assert "chooses by lot" in refusal(sample.at_threshold, GPTConfig(router="expert", n_recur=2, router_choice="random"), threshold)


# ----------------------------------------------------------------------------------------------------------------- trace


def trace_lines(out):
    head, *lines = out.splitlines()
    return head, {int(line[6:8]): [(text, float(p)) for text, p in re.findall(r"\| *(\S.*?) (\d\.\d{3})", line)] for line in lines}


def test_the_trace_has_a_line_for_each_depth_with_five_probabilities(go, place):
    head, lines = trace_lines(go("--trace=The author of 1984", recursions=6).out)
    assert head == "next token after 'The author of 1984'" and list(lines) == list(range(7))
    ids_BT = torch.tensor([BYTES.encode_ordinary("The author of 1984")])
    for depth, cells in lines.items():
        best = load(place)(ids_BT, depth=depth).logits[0, -1].softmax(-1).topk(5)
        assert [p for _, p in cells] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [text for text, _ in cells] == [sample.show(BYTES, i) for i in best.indices.tolist()]


@pytest.mark.parametrize("token, shown", [(97, "'a'"), (32, "' '"), (10, "'\\n'"), (0xF0, "'\\xf0'"), (256, "'<|endoftext|>'"), (300, "\ufffd")])
def test_a_token_is_shown_so_that_it_is_seen(token, shown):
    assert sample.show(BYTES, token) == shown


def test_a_trace_has_the_depths_that_there_are_and_reads_the_end_of_a_long_text(go):
    assert list(trace_lines(go(trace="ab", out_dir="out/sequence").out)[1]) == [2]
    assert list(trace_lines(go(trace="").out)[1]) == [0, 1, 2, 3, 4]
    assert trace_lines(go(trace="xyz" * 50).out)[1] == trace_lines(go(trace=("xyz" * 50)[-32:]).out)[1]


# ----------------------------------------------------------------------------------------------------------------- runs


def test_the_newest_run_is_taken_whatever_else_lies_there(go, place):
    out = place / "out"
    for junk in ("zz/ckpt_copy.pt", "zz/ckpt.pt.tmp", "ckpt.pt"):
        (out / junk).parent.mkdir(exist_ok=True)
        (out / junk).write_bytes(b"junk")
    (out / "yy" / "ckpt.pt").mkdir(parents=True, exist_ok=True)
    assert "out/toy:" in go().err
    os.utime(out / "fixed/ckpt.pt", (2e9, 2e9))
    try:
        assert "out/fixed:" in go().err
    finally:
        os.utime(out / "fixed/ckpt.pt", (1e9, 1e9))


@pytest.mark.parametrize("argv", [[], ["--out_dir=none"], ["--recursions=3"]])
def test_without_a_run_the_path_and_the_command_to_run_are_told(tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    message = refusal(sample.main, argv)
    assert "python train.py config/grt_tiny.py" in message and ("out/" in message or argv[0].partition("=")[2] in message)


@pytest.mark.parametrize("argv", [["config/grt_tiny.py"], ["def main("]])
def test_what_is_not_a_flag_is_answered_with_what_to_write(argv):
    assert "a prompt is --start=" in refusal(sample.main, argv)


def copy_run(place, tmp_path, change):
    state = torch.load(place / "out/toy/ckpt.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "ckpt.pt")
    return f"--out_dir={tmp_path}"


@pytest.mark.parametrize("change, words", [
    (lambda state: state.update(fingerprint="beef"), "beef"), (lambda state: state.pop("fingerprint"), "fingerprint"),
    (lambda state: state.update(tokenizer="none"), "unknown tokenizer 'none'"), (lambda state: state["model"].popitem(), "norm.weight"),
    (lambda state: state["model_config"].update(n_embd=32), "size mismatch"), (lambda state: state["model_config"].update(n_ghosts=3), "n_ghosts"),
    (lambda state: [p.fill_(float("nan")) for p in state["model"].values()], "not finite")])
def test_a_checkpoint_that_does_not_fit_is_one_line(place, tmp_path, change, words):
    assert words in refusal(sample.main, [copy_run(place, tmp_path, change), "--max_new_tokens=3"])


def test_loading_gives_the_weights_that_were_trained(place):
    model, tokenizer, about = sample.load_run(place / "out/toy", "cpu")
    state = torch.load(place / "out/toy/ckpt.pt", weights_only=True)
    assert not model.training and about["step"] == 0 and about["val_loss"] == state["val_loss"] and tokenizer.n_vocab == 257
    assert all(torch.equal(p, state["model"][name]) for name, p in model.state_dict().items()) and isinstance(model, GPT)


@pytest.mark.slow
def test_it_all_works_where_text_is_ascii_by_default(place, tmp_path):
    """Train and sample in one process whose locale knows no emoji: the prompt comes out as it went in."""
    make_config(tmp_path, data_dir=str(place / "data"), max_iters=1, sample_tokens=30)
    code = "import sys, train, sample; train.main(['toy.py']); sample.main(['--max_new_tokens=3', *sys.argv[1:]]); sample.main(['--trace=' + sys.argv[1][8:]])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code, "--start=é🦊"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert "\né🦊" in done.stdout.decode("utf-8", "replace") and "next token after 'é🦊'" in done.stdout.decode("utf-8", "replace")
    assert json.loads((tmp_path / "out/toy/log.jsonl").read_text("utf-8").splitlines()[0])["event"] == "start"
