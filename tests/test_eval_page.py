"""eval.py's part page: a span for every token, the numbers of the model behind it, and nothing that a text can break.

    python -m pytest -q tests/test_eval_page.py
"""
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from tiny import loud
from toy import DENSE, SEQUENCE, flags, make_config, open_run, refusal

import eval as evaluation
import prepare
import train
from eval import as_html, page_data, painted, ramp, read_passage, rows_of, shade, token_name, token_text
from model import GPTConfig

NASTY = 'a</script><!-- <b class="x">&amp; \t{{data}}\r\n\n\x01\x1b[31m é🦊 \u202e\n'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/gated, out/expert, out/token, out/dense and out/sequence, with loud weights, on texts full of traps."""
    folder, here = tmp_path_factory.mktemp("page"), os.getcwd()
    (folder / "corpus").mkdir()
    for i in range(4):
        (folder / "corpus" / f"{i}.txt").write_text(NASTY + f"x = {i} + y\n" * 200, encoding="utf-8", newline="")
    os.chdir(folder)
    prepare.prepare("corpus", name="toy", data_dir="data", quiet=True, val_fraction=0.3)
    routed = dict(update="replace", depth_sampling="fixed", state_noise=0.0, gate_noise=0.0)
    for name, changes in {"dense": DENSE | dict(n_core=3), "sequence": SEQUENCE, "token": routed | dict(router="token"), "expert": routed | dict(router="expert"), "gated": {}}.items():
        make_config(folder, **{"max_iters": 0, "eval_tokens": 64, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        path = Path(f"out/{name}/ckpt.pt")
        state = train.load_checkpoint(path)
        train.save_checkpoint(path, {**state, "step": 8, "model": loud(GPTConfig(**state["model_config"])).state_dict()})
    os.chdir(here)
    return folder


@pytest.fixture
def make(place, monkeypatch, capsys):
    """make(name) -> (the page of out/NAME as its source, eval.py's lines, the part's record)."""
    monkeypatch.chdir(place)

    def make(name, **changes):
        capsys.readouterr()
        evaluation.main(["page", *flags(device="cpu", out_dir=f"out/{name}", **changes)])
        *lines, last = capsys.readouterr().out.splitlines()
        return Path(f"out/{name}/depth.html").read_text("utf-8"), lines, json.loads(last)["parts"]["page"]
    return make


class Page(HTMLParser):
    """The text of each span, the data, the attributes of what has an id, the values of options, every element's name, and
    whatever could fetch something."""

    def __init__(self, source):
        super().__init__()
        self.spans, self.scripts, self.ids, self.names, self.ticks, self.fetches, self.inside = [], [], {}, [], [], [], None
        self.feed(source)
        self.data, self.slider, self.by = json.loads(self.scripts[0]), self.ids["depth"], self.ids["by"]

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.names.append(tag)
        self.ids[attributes.get("id")] = attributes
        self.ticks += [attributes["value"]] if tag == "option" else []
        self.fetches += [value for key, value in attributes.items() if key in ("src", "href", "action", "style") or key.startswith("on")]
        if tag in ("span", "script"):
            self.inside = self.spans if tag == "span" else self.scripts
            self.inside.append("")

    def handle_endtag(self, tag):
        self.inside = None if tag in ("span", "script") else self.inside

    def handle_data(self, text):
        if self.inside:
            self.inside[-1] += text


def values(name):
    """A run, and what its model says at a place of the slider: (place, ids) -> logits."""
    run = open_run(f"out/{name}")
    if name != "dense":
        return run, lambda place, ids_BT: run.model(ids_BT, depth=place).logits

    def cut(place, ids_BT):
        x_BTD, who = run.model.start(ids_BT, evaluation.no_cache(run.model.cfg))
        for block in run.model.recursion.core[:place]:
            x_BTD = block(x_BTD, who.cos, who.sin)
        return run.model.head(run.model.norm(x_BTD))
    return run, cut


# ---- what is on the page


@pytest.mark.parametrize("name", ["gated", "expert", "token", "dense", "sequence"])
@torch.no_grad()
def test_the_losses_and_guesses_on_the_page_are_those_of_the_model_at_each_depth(make, name):
    source, _, record = make(name)
    run, logits_at = values(name)
    data, ids = Page(source).data, run.split.read(0, 1025)
    ids_BT, targets_BT = torch.tensor(ids[:-1]).view(32, 32), torch.tensor(ids[1:]).view(32, 32)
    assert [data["names"][i] for i in data["ids"]] == [token_name(run.tokenizer, id) for id in ids[:-1].tolist()]
    assert data["places"] == {"gated": list(range(9)), "expert": list(range(5)), "token": list(range(5)), "dense": [0, 1, 2, 3], "sequence": [2]}[name]
    assert data["places"][data["full"]] == (3 if name == "dense" else run.model.cfg.n_recur)
    assert len(data["nats"]) == len(data["top"]) == len(data["p"]) == len(data["means"]) == len(data["said"]) == len(data["training"]) == len(data["places"])
    for at, place in enumerate(data["places"]):
        logits_BTV = logits_at(place, ids_BT)
        nats = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").tolist()
        p, best = (x.flatten().tolist() for x in logits_BTV.softmax(-1).max(-1))
        assert data["nats"][at][0] is None and data["nats"][at][1:] == pytest.approx(nats[:-1], abs=1e-3)
        assert data["p"][at][1:] == pytest.approx(p[:-1], abs=1e-3)
        assert data["means"][at] == record["nats_per_token"][at] == pytest.approx(sum(nats[:-1]) / 1023, abs=1e-3)
        differ = [i for i in range(1023) if data["names"][data["top"][at][i + 1]] != token_name(run.tokenizer, best[i])]
        top_two = logits_BTV.flatten(0, 1).topk(2).values
        assert all(top_two[i, 0] - top_two[i, 1] < 1e-3 for i in differ)       # ties
    assert len({tuple(row) for row in data["nats"]}) == len(data["places"])     # depth does something


@pytest.mark.parametrize("name", ["expert", "token", "gated"])
@torch.no_grad()
def test_the_steps_on_the_page_are_those_that_tokens_take_and_unrouted_runs_have_none(make, name):
    source, _, record = make(name)
    run, page = open_run(f"out/{name}"), Page(source)
    depth_N = run.model(torch.tensor(run.split.read(0, 1024)).view(32, 32)).depth_BT.flatten()
    assert page.data["steps"] == (None if name == "gated" else depth_N.tolist()) and ("hidden" in page.by) == (name == "gated")
    assert record["mean_depth"] == pytest.approx(depth_N.double().mean().item())
    assert name == "gated" or len(depth_N.unique()) > 1


@pytest.mark.parametrize("name", ["gated", "dense", "token", "sequence"])
def test_the_places_of_the_sliders_are_the_depths_and_it_stands_at_the_full_one(make, name):
    page = Page(make(name)[0])
    first, last, full = (int(page.slider[key]) for key in ("min", "max", "value"))
    assert list(range(first, last + 1)) == page.data["places"] == [int(tick) for tick in page.ticks] and page.slider["step"] == "1"
    assert full == {"gated": 4, "dense": 3, "token": 4, "sequence": 2}[name] and ("disabled" in page.slider) == (name == "sequence")


def test_there_are_as_many_spans_as_tokens_and_their_text_is_the_tokens(make):
    source, _, record = make("gated")
    spans, run = Page(source).spans, open_run("out/gated")
    ids = run.split.read(0, 1024).tolist()
    assert len(spans) == len(ids) == record["tokens"] == 1024
    special = {9: "→\t", 10: "↵\n", 13: "␍", 1: "␁", 27: "␛", 256: "<|endoftext|>"}
    assert spans == [special.get(id) or (chr(id) if 32 <= id < 127 else "\ufffd") for id in ids]
    assert "".join(spans).startswith("a</script><!--") and {*special, *"é🦊".encode()} - {256} <= {*ids}


def test_nothing_in_a_text_can_leave_its_place_in_the_page(make):
    source = make("gated")[0]
    page = Page(source)
    assert page.names.count("script") == 2 and page.names.count("b") == 0 and source.count("</script>") == 2 and source.count("<!--") == 0
    assert not re.search(r"\{\{\w+\}\}", source.replace("{{data}}", "", 1)) and "".join(page.spans).count("{{data}}") == 1
    assert page.fetches == [] and not re.search(r"https?:|//\w+\.|@import|url\(", source)         # nothing is fetched


def test_a_token_that_is_a_whole_end_of_script_is_text_wherever_the_page_shows_it(place, monkeypatch):
    monkeypatch.chdir(place)
    run, traps = open_run("out/gated"), ["</script><script>x</script>", "<!--<script>", "<b>&amp;", "{{data}}{{title}}", "\u2028\u2029"]
    encoding = tiktoken.Encoding("traps", pat_str=r"[\s\S]+", special_tokens={}, mergeable_ranks={**{bytes([i]): i for i in range(256)}, **{trap.encode(): 256 + i for i, trap in enumerate(traps)}})
    run, passage = run._replace(tokenizer=encoding), read_passage(run)
    passage = passage._replace(id_N=256 + torch.arange(1024) % 5, likeliest_RN=256 + torch.arange(1024).expand(9, -1) % 5)
    data = page_data(run, passage)
    source = evaluation.fill_page(run, passage, data)
    page = Page(source)
    assert page.data == json.loads(json.dumps(data)) and page.data["names"] == [*traps[:4], "  ".replace(" ", "␣")]
    assert page.spans[:5] == [*traps[:4], "  "] and len(page.spans) == 1024 and page.names.count("script") == 2 and page.names.count("b") == 0
    assert source.count("</script>") == 2 and "<!--" not in source


def test_a_page_holds_the_run_its_step_its_data_and_the_commit(make):
    source = make("expert")[0]
    facts = re.search(r'<p id="facts">(.*?)</p>', source)[1]
    run = open_run("out/expert")
    for fact in ("1+1x4+1 expert-choice router", "step 8", f"data toy (bytes {run.meta['fingerprint']})", f"commit {train.commit()}"):
        assert fact in facts.split(" · ")
    assert "<title>out/expert" in source


def test_tokens_are_named_by_what_they_are():
    encoding = tiktoken.Encoding("x", pat_str=r"[\s\S]+", special_tokens={"<|endoftext|>": 260}, mergeable_ranks={**{bytes([i]): i for i in range(256)}, b"\n ": 256, "\u0301é".encode(): 257})
    assert [token_name(encoding, i) for i in (65, 32, 10, 0xC3, 256, 257, 258, 260)] == ["A", "␣", "↵", "byte c3", "↵␣", "\u0301é", "id 258", "<|endoftext|>"]
    assert token_text(encoding, 0xC3) == "\ufffd" and token_text(encoding, 258) == ""
    assert as_html("<&\"'>\n\t\x9b\0") == "&lt;&amp;&quot;&#x27;&gt;<i>↵</i>\n<i>→</i>\t<i>\ufffd</i><i>␀</i>"


def test_a_page_is_made_in_as_many_windows_as_the_context_is_long_and_of_no_synthetic_set(place, monkeypatch):
    monkeypatch.chdir(place)
    run = open_run("out/gated")
    one, three = read_passage(run), read_passage(run._replace(batch_size=3))
    assert all(torch.allclose(a.double(), b.double(), atol=1e-5, equal_nan=True) for a, b in zip(one, three)) and len(one.id_N) == 1024
    phop = run._replace(meta={**run.meta, "row": 8})
    assert "is no text, so there is nothing for the part page" in refusal(evaluation.parts_for, ["page"], phop) and "page" not in evaluation.parts_for([], phop)
    assert "page" in evaluation.parts_for([], run)


def test_a_run_that_has_diverged_still_has_a_page(place, monkeypatch):
    monkeypatch.chdir(place)
    run = open_run("out/gated")
    run.model.norm.weight.data.fill_(float("nan"))
    data = page_data(run, passage := read_passage(run))
    assert data["means"] == [None] * 9 and data["nats"][4][:3] == [None] * 3 and Page(evaluation.fill_page(run, passage, data)).data == json.loads(json.dumps(data))


# ---- colours


def lightness(color):
    """OKLab's L of #rrggbb."""
    rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    l, m, s = 0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b, 0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b, 0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b  # noqa: E741
    return 0.2104542553 * l ** (1 / 3) + 0.7936177850 * m ** (1 / 3) - 0.0040720468 * s ** (1 / 3), 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_ordered_evenly_by_lightness_and_their_text_can_be_read(dark):
    colors = ramp(dark)
    light = [lightness(back)[0] for back, _ in colors]
    steps = [b - a if dark else a - b for a, b in zip(light, light[1:])]
    assert min(steps) > 0 and abs(light[0] - light[-1]) > 0.5 and max(steps) < 2.5 * sum(steps) / len(steps)
    for back, ink in colors:
        Y = lightness(back)[1]
        assert {"#000": (Y + 0.05) / 0.05, "#fff": 1.05 / (Y + 0.05)}[ink] >= 4.5


# ---- the terminal


@pytest.mark.parametrize("name, places", [("gated", [0, 1, 2, 4]), ("dense", [0, 1, 2, 3]), ("expert", ["steps"])])
def test_without_a_terminal_digits_stand_under_each_token(make, name, places):
    source, lines, _ = make(name)
    data, lines = Page(source).data, lines[1 : -1]
    assert [line.split(":")[0] for line in lines[: len(places)]] == [str(place) for place in places] and "\x1b" not in "".join(lines)
    values = [data["steps"] if place == "steps" else data["nats"][place] for place in places]
    texts, i = lines[len(places) :: 1 + len(places)], 0
    for n, text in enumerate(texts):
        for row, under in zip(values, lines[len(places) + n * (1 + len(places)) + 1 :]):
            digits = ["-" if value is None else str(min(9, round(value))) for value in row[i : i + len(text) - 7]]
            assert under[7:].ljust(len(text) - 7).replace(" ", "-") == "".join(digits)               # a character per byte here
        i += len(text) - 7
    assert i == evaluation.GLANCE


@pytest.mark.parametrize("how", ["true", "256"])
def test_a_terminal_shows_the_same_text_on_the_colours_of_its_steps(make, monkeypatch, how):
    plain = [line[7:] for line in make("expert")[1][2:-1:2]]
    monkeypatch.setattr(evaluation, "paints", lambda: how)
    title, *colored = make("expert")[1][1:-1]
    assert re.findall(r"m ([\d.]+) \x1b", title) == ["0", "1", "2", "3", "4"]
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == plain
    data = Page(Path("out/expert/depth.html").read_text("utf-8")).data
    painted_tokens = re.findall(r"\x1b\[38;5;(?:16|231);48;([\d;]+)m(.*?)\x1b\[0m", "".join(colored))
    assert len(painted_tokens) == evaluation.GLANCE and len({back for back, _ in painted_tokens}) == len({*data["steps"][: evaluation.GLANCE]}) > 1
    for (back, _), steps in zip(painted_tokens, data["steps"]):
        wanted = [round(255 * c) for c in shade(steps / 4, True)]
        kind, *numbers = map(int, back.split(";"))
        if how == "true":
            assert kind == 2 and numbers == wanted
        else:
            cube, n = [0, 95, 135, 175, 215, 255], numbers[0] - 16
            got = [cube[n // 36], cube[n // 6 % 6], cube[n % 6]]
            assert kind == 5 and all(abs(g - w) == min(abs(level - w) for level in cube) for g, w in zip(got, wanted))


def test_colours_need_a_terminal_that_wants_them(monkeypatch):
    for tty, env, how in ((False, {}, ""), (True, {}, "256"), (True, {"COLORTERM": "truecolor"}, "true"), (True, {"NO_COLOR": "1"}, ""), (True, {"NO_COLOR": ""}, "256"), (True, {"TERM": "dumb"}, "")):
        for name in ("NO_COLOR", "COLORTERM", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(evaluation.sys, "stdout", SimpleNamespace(isatty=lambda: tty))
        assert evaluation.paints() == how
    assert painted("x", 7.0, "true") == painted("x", 1.0, "true") != painted("x", 0.0, "true")


def test_digits_stand_under_their_tokens_on_a_narrow_terminal_too(monkeypatch):
    names, values = ["ab"] * 60, list(range(10)) * 6
    for tty, columns, widest in ((True, 40, 33), (True, 3, 2), (True, 500, 100), (False, 40, 100)):
        monkeypatch.setattr(evaluation.sys, "stdout", SimpleNamespace(isatty=lambda: tty))
        monkeypatch.setenv("COLUMNS", str(columns))
        texts, digits = (list(evaluation.numbered(names, {"4": values}))[i::2] for i in (0, 1))
        assert {len(text) - 7 for text in texts[:-1]} == {widest - widest % 2} and "".join(text[7:] for text in texts) == "".join(names)
        assert [int(digit) for line in digits for digit in line[7:].split()] == values


def test_a_line_ends_where_the_text_does_and_before_it_is_too_long():
    names = ["ab", "c↵", "de", "x" * 97, "y", "z", "", "x" * 150, "end"]
    assert list(rows_of(names)) == [[0, 1], [2, 3, 4], [5, 6], [7], [8]]


# ---- in a real browser


def dump(path, view, size="1200,900"):
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--virtual-time-budget=3000", "--dump-dom", f"{path.resolve().as_uri()}#{view}"],
                          capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("name, views", [("gated", ["depth=0", "depth=4"]), ("expert", ["by=loss&depth=1", "by=steps&depth=4", "by=steps&depth=1"])])
def test_the_slider_changes_the_colours_of_the_spans_in_a_browser(make, name, views):
    make(name)
    painted_spans, words = [], []
    for view in views:
        source = dump(Path(f"out/{name}/depth.html"), view)
        spans = re.findall(r"<span([^>]*)>", source)
        assert len(spans) == 1024
        painted_spans.append([re.search(r"background-color: (rgb\([^)]*\)); color: rgb", attributes) for attributes in spans])
        words.append(re.search(r'<p id="words"[^>]*>(.*?)</p>', source)[1])
    painted_spans = [[match and match[1] for match in spans] for spans in painted_spans]
    data = Page(Path(f"out/{name}/depth.html").read_text("utf-8")).data
    light = [tuple(int(back[i : i + 2], 16) for i in (1, 3, 5)) for back, _ in data["ramp"]["light"]]
    for view, spans, text in zip(views, painted_spans, words):
        depth, by_steps = int(re.search(r"depth=(\d)", view)[1]), "steps" in view
        assert text.startswith(f"At depth {depth} of 4")
        x = [min(steps, depth) / 4 for steps in data["steps"]] if by_steps else [None if n is None else n / data["top_nats"] for n in data["nats"][depth]]
        wanted = [None if value is None else "rgb({}, {}, {})".format(*light[int(min(1, value) * 64 + 0.5)]) for value in x]
        assert sum(a != b for a, b in zip(spans, wanted)) <= 5               # halves may be rounded either way
    assert len({tuple(spans) for spans in painted_spans}) == len({*words}) == len(views)
