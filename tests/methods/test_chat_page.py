"""`hsdraft ui`: what a browser session says and hears, the parts of the page, and the page in a real browser."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html.parser import HTMLParser
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from conftest import TEMPLATE, WORDS, make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter, harmless
from hf_hsdraft.cli._shared import bound_socket
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.methods.chat_page.page import (
    accepted_path,
    conversation_html,
    figures_html,
    label_of,
    pieces_html,
    tree_html,
    trees_html,
)
from hf_hsdraft.methods.chat_page.talk import LAST_ROUNDS, Reply, ReplySettings, Talk, Talks, Turn
from hf_hsdraft.serve.conversation import Conversation

NEW = 24
GREEDY = ReplySettings(max_new_tokens=NEW)
ALERT = "<img src=x onerror=window.executed=1>"  # every third word of the target
#        root - 5 - 7
#             \ 6 - 8 - 9
TREE = DraftTree((3, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 4), (0, 1, 1, 2, 2, 3), (0.0, -0.5, -1.0, -0.7, -1.5, -2.0))


def make_chatting(**overrides):
    """A target that never ends a text, and writes no special tokens."""
    target = make_target(**overrides)
    target.generation_config.suppress_tokens = [0, 1, 4]
    return target


@pytest.fixture(scope="module")
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def talk_of(tokenizer, thread):
    def talk_of(target, drafter):
        return Talk(target, tokenizer, drafter, thread)

    return talk_of


def ended(talk: Talk) -> Turn:
    """The last turn, when nothing is decoded any more."""
    limit = time.monotonic() + 60
    while talk.busy:
        assert time.monotonic() < limit, "an answer does not end"
        time.sleep(0.01)
    return talk.turns[-1]


def plain_ids(target, tokenizer, message: str, new: int = NEW) -> list[int]:
    """What plain `generate()` answers to a message as the only one."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return target.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()


def test_an_answer_is_that_of_plain_generate_and_its_rounds_are_seen(talk_of, tokenizer):
    """Every emitted token is in the rounds: the accepted ones along a path of the tree, then the target's own."""
    target = make_chatting()
    talk = talk_of(target, make_drafter(target))
    talk.say("w1 w2 w3", GREEDY)
    turn = ended(talk)
    assert turn.error == "" and turn.reply.ids == plain_ids(target, tokenizer, "w1 w2 w3")
    assert "".join(text for text, _ in turn.reply.pieces) == turn.reply.answer.text
    statistics = turn.reply.answer.statistics
    assert sum(drafted for _, drafted in turn.reply.pieces) == sum(statistics.accepted_lengths)
    emitted = []
    for number, done in turn.reply.rounds:
        tree, tokens, accepted = done.trees[0], done.news[0].tokens, done.accepted[0]
        assert accepted == statistics.accepted_lengths[number - 1]
        assert [tree.tokens[node] for node in accepted_path(tree, tokens, accepted)] == list(tokens[:accepted])
        emitted += tokens
    assert len(turn.reply.rounds) == min(LAST_ROUNDS, statistics.rounds)
    assert turn.reply.ids[-len(emitted) :] == emitted


@pytest.mark.parametrize("sample", [False, True])
def test_plain_decoding_answers_from_the_same_cache(talk_of, sample):
    """Also where an earlier message was not compared, and in sampling with the same draws."""
    target = make_chatting()
    talk = talk_of(target, make_drafter(target))
    settings = ReplySettings(sample=sample, temperature=1.3, max_new_tokens=NEW)
    for message, compare in (("w1 w2", False), ("w3", True), ("w4 w5", True)):
        talk.say(message, ReplySettings(**{**vars(settings), "compare": compare}))
        turn = ended(talk)
        assert (turn.plain is not None) == compare and turn.error == ""
        if compare:
            assert turn.difference is None and turn.reply.ids == turn.plain.ids
            assert turn.reply.answer.kept == turn.plain.answer.kept > 0
            assert turn.plain.answer.statistics is None and turn.reply.answer.statistics is not None
    talk.say("w6", ReplySettings(draft=False, max_new_tokens=NEW))
    turn = ended(talk)
    assert turn.plain is None and turn.reply.answer.statistics is None and not any(d for _, d in turn.reply.pieces)


def test_a_stopped_answer_stays_and_the_talk_goes_on(talk_of, tokenizer):
    target = make_chatting(max_position_embeddings=4096)
    talk = talk_of(target, make_drafter(target))
    talk.say("w1 w2 w3", ReplySettings(max_new_tokens=2048))
    with pytest.raises(ValueError, match="under way"):
        talk.say("w4", GREEDY)
    with pytest.raises(ValueError, match="under way"):
        talk.clear()
    while not (talk.turns[0].reply and len(talk.turns[0].reply.ids) > 5):
        time.sleep(0.005)
    talk.stop()
    turn = ended(talk)
    length = len(turn.reply.ids)
    assert turn.stopped and turn.plain is None and 5 < length < 2048 and turn.error == ""
    assert turn.reply.ids == plain_ids(target, tokenizer, "w1 w2 w3", length)
    talk.say("w4", GREEDY)
    turn = ended(talk)
    assert not turn.stopped and turn.reply.answer.kept > length and turn.difference is None


def test_a_message_waits_for_other_sessions_and_may_be_stopped_before(talk_of):
    target = make_chatting(max_position_embeddings=4096)
    first, second = talk_of(target, make_drafter(target)), talk_of(target, None)
    first.say("w1", ReplySettings(max_new_tokens=2048))
    second.say("w2", GREEDY)
    assert second.waits and "waits for its turn" in conversation_html(second.turns, second.busy, second.waits)
    second.stop()
    assert not second.busy and second.turns[-1].stopped and second.turns[-1].reply is None
    second.say("w3", GREEDY)
    first.stop()
    assert not ended(second).stopped and len(second.turns[-1].reply.ids) == NEW and not first.busy


def test_what_cannot_be_answered_is_told_and_forgotten(talk_of):
    target = make_chatting()  # of 256 positions
    talk = talk_of(target, make_drafter(target))
    talk.say("w1", GREEDY)
    ended(talk)
    talk.say("w1 " * 300, GREEDY)
    turn = ended(talk)
    assert "context window is 256" in turn.error and turn.reply.ids == []
    assert "context window is 256" in conversation_html(talk.turns)
    talk.say("w2", GREEDY)
    assert ended(talk).error == "" and talk.turns[-1].difference is None
    for message, settings, words in (
        ("  ", GREEDY, "empty"),
        ("w1", ReplySettings(sample=True, temperature=0), "temperature"),
        ("w1", ReplySettings(max_new_tokens=0), "new tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            talk.say(message, settings)
    talk.clear()
    talk.say("w1", GREEDY)
    assert ended(talk).reply.answer.kept == 0 and len(talk.turns) == 1


def test_texts_are_escaped():
    assert pieces_html([("a<b>", False), ("&", True), ('"x', True), (" y", False)]) == (
        "a&lt;b&gt;<mark>&amp;&quot;x</mark> y"
    )
    html = conversation_html([Turn(ALERT, error=ALERT)])
    assert "<img" not in html and html.count("&lt;img") == 2
    drawn = tree_html(TREE, 1, [5, 3], lambda token: "<b>")
    assert "<b>" not in drawn and drawn.count("&lt;b&gt;") == len(TREE) + 1


def test_the_figures_of_two_answers():
    turn = Turn("w1", reply=Reply(None), plain=Reply(None))
    assert figures_html(turn) == ""
    turn.reply.ids = [1, 2, 3, 4]
    for other, place in (([1, 2, 3, 5], 3), ([1, 2], 2), ([1, 2, 3, 4], None)):
        turn.plain.ids = other
        assert turn.difference == place


class Nodes(HTMLParser):
    """The nodes of a tree as it is drawn, from the top: depth, kind and label of each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found, self._depth, self._kind = [], -1, ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._depth += tag == "ul"
        self._kind = dict(attributes)["class"] if tag == "li" else self._kind

    def handle_endtag(self, tag):
        self._depth -= tag == "ul"

    def handle_data(self, data):
        self.found.append((self._depth, self._kind.removeprefix("hs-"), data))


def test_a_round_is_drawn_with_its_path_on_top():
    assert Nodes(tree_html(TREE, 2, [6, 8, 11], lambda token: f"t{token} ")).found == [
        (0, "root", "t3␣"), (1, "accepted", "t6␣"), (2, "accepted", "t8␣"), (3, "own", "t11␣"), (3, "refused", "t9␣"),
        (1, "refused", "t5␣"), (2, "refused", "t7␣"),
    ]  # fmt: skip
    assert Nodes(tree_html(DraftTree.root(3), 0, [4], str)).found == [(0, "root", "3"), (1, "own", "4")]
    kinds = [kind for _, kind, _ in Nodes(tree_html(TREE, 1, [5], str)).found]
    assert "own" not in kinds and kinds.count("accepted") == 1  # a text may end with a drafted token
    assert label_of(" a\n") == "␣a⏎" and len(label_of("x" * 99)) == 16
    assert "no drafted answer" in trees_html([Turn("w1")], str)


def test_the_command_tells_what_is_missing(monkeypatch):
    monkeypatch.setattr("hf_hsdraft.methods.chat_page.command.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["ui"])
    assert isinstance(result.exception, ImportError) and ".[ui]" in str(result.exception)
    monkeypatch.undo()
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        result = CliRunner().invoke(app, ["ui", "--port", str(taken.getsockname()[1])])
    assert isinstance(result.exception, OSError) and "choose another --host or --port" in str(result.exception)


# The page in a browser.

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
_no_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt-get install chromium")


def in_browser(test):
    return pytest.mark.browser(_no_browser(test))


@pytest.fixture(scope="module")
def html_tokenizer():
    """The tokenizer of the tests, with HTML for every third word of the target."""
    words = [ALERT + word if word[1:].isdigit() and int(word[1:]) % 3 == 0 else word for word in WORDS]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="end", chat_template=TEMPLATE
    )


@contextmanager
def served(talks):
    """The address of a page with these conversations."""
    from hf_hsdraft.methods.chat_page.page import ChatPage, page_server

    listener = bound_socket("127.0.0.1", 0)
    listener.listen()  # else requests are refused until the server has begun
    server = page_server(ChatPage(talks, "a tiny target", ReplySettings(max_new_tokens=40)), listener)
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        running.join(30)
        talks.close()


@pytest.fixture(scope="module")
def address(html_tokenizer):
    """A page whose drafter knows the answer to its first message, and whose target takes its time."""
    torch.manual_seed(0)
    target = make_chatting(max_position_embeddings=4096)
    known = Conversation(target, html_tokenizer, None, do_sample=False, max_new_tokens=40)
    known.ask("w1 w2")
    drafter = CachebackDrafter([known._text])
    drafter.generation_config.num_assistant_tokens = 3  # so that there are some rounds
    target.register_forward_pre_hook(harmless(lambda *_: time.sleep(0.05)))
    with served(Talks(target, html_tokenizer, drafter)) as found:
        yield found


def test_a_local_page_answers_to_local_names_and_takes_no_files(address):
    assert httpx.get(address).status_code == 200
    foreign = httpx.get(address, headers={"Host": "elsewhere.example"})
    assert foreign.status_code == 400 and "does not answer to the host" in foreign.json()["error"]["message"]
    files = httpx.post(f"{address}gradio_api/upload", files={"files": b"any"})
    assert files.status_code == 415 and "expected application/json" in files.json()["error"]["message"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, address):
    """The page in a session of its own; at the end nothing was asked of another machine, and no script failed."""
    context = browser.new_context()
    page, asked, failed = context.new_page(), [], []
    context.on("request", lambda request: asked.append(urlsplit(request.url)))
    page.on("pageerror", lambda error: failed.append(error))
    page.set_default_timeout(20_000)
    page.goto(address)
    page.locator("#hs-message textarea").wait_for()
    try:
        yield page
        assert len(asked) > 3 and not failed
        assert {url.hostname for url in asked if url.scheme not in ("data", "blob")} == {"127.0.0.1"}
    finally:
        context.close()


# Notes how many coloured characters of an answer, and how many characters of plain decoding's, there are at any time.
WATCH = """
window.seen = {drafted: [], plain: []};
new MutationObserver(() => {
    const marks = [...document.querySelectorAll('.hs-answer mark')];
    if (marks.length) window.seen.drafted.push(marks.map(mark => mark.innerText).join('').length);
    const plain = document.querySelector('.hs-plain');
    if (plain) window.seen.plain.push(plain.innerText.length);
}).observe(document.body, {subtree: true, childList: true, characterData: true});
"""


# Whether the end of the conversation is in sight, above the place where messages are written.
SCROLLED = """() => {
    const box = name => document.querySelector(name).getBoundingClientRect();
    const end = box('#hs-chat').bottom;
    return box('.hs-turn:last-child').bottom <= end && end <= box('#hs-entry').top;
}"""


def say(page, message):
    page.locator("#hs-message textarea").fill(message)
    page.locator("#hs-message textarea").press("Enter")


def wait_for_end(page, turns):
    """Waits until so many turns are there and the last one has ended."""
    page.wait_for_function(
        "n => document.querySelectorAll('.hs-turn').length === n && document.querySelector('#hs-stop').disabled"
        " && !document.querySelector('#hs-send').disabled",
        arg=turns,
    )


@in_browser
def test_a_message_is_answered_compared_and_drawn(browser, address):
    with opened(browser, address) as page:
        page.evaluate(WATCH)
        say(page, "w1 w2")
        wait_for_end(page, 1)
        for kind in ("drafted", "plain"):
            lengths = page.evaluate("kind => window.seen[kind]", kind)
            assert lengths == sorted(lengths) and len(set(lengths)) > 2, f"the {kind} answer does not stream"
        assert page.locator(".hs-plain").count() == 0  # the same text is not shown twice
        figures = dict(reversed(figure.split("\n")) for figure in page.locator(".hs-figure").all_inner_texts())
        assert set(figures) == {"tau", "tokens/s, drafted", "tokens/s, plain", "speed-up", "same text"}
        assert figures["same text"] == "yes" and float(figures["tau"]) > 1.5
        ratio = float(figures["tokens/s, drafted"]) / float(figures["tokens/s, plain"])
        assert float(figures["speed-up"]) == pytest.approx(ratio, abs=0.05)
        assert "per target forward" in page.locator(".hs-figure").first.get_attribute("title")
        own, drafted = (
            page.evaluate("name => getComputedStyle(document.querySelector(name)).color", name)
            for name in (".hs-answer", ".hs-answer mark")
        )
        assert own != drafted
        page.locator("#hs-show-trees").click()
        page.locator(".hs-tree").first.wait_for()
        assert page.locator(".hs-tree").count() > 0 and page.locator(".hs-tree .hs-accepted").count() > 0
        assert page.locator(".hs-tree .hs-own").count() > 0
        page.locator("#hs-compare input").uncheck()
        page.locator("#hs-draft input").uncheck()
        say(page, "w5")
        wait_for_end(page, 2)
        last = page.locator(".hs-turn").nth(1)
        assert last.locator("mark").count() == 0 and last.locator(".hs-figure").count() == 1
        page.locator("#hs-show-trees").click()
        page.wait_for_function("document.querySelectorAll('.hs-tree').length === 0")
        page.locator("#hs-clear").click()
        page.wait_for_function("document.querySelectorAll('.hs-turn').length === 0")


# Texts that are wider than a part of the page that hides the rest, or than the window; not those for screen readers.
CUT = """() => {
    const walker = document.createTreeWalker(document.querySelector('.gradio-container'), NodeFilter.SHOW_TEXT);
    const cut = [], range = document.createRange();
    while (walker.nextNode()) {
        range.selectNodeContents(walker.currentNode);
        const box = range.getBoundingClientRect();
        let hidden = !walker.currentNode.data.trim() || !box.width, over = box.right > window.innerWidth + 1;
        for (let outer = walker.currentNode.parentElement; outer; outer = outer.parentElement) {
            const around = outer.getBoundingClientRect();
            hidden = hidden || around.width <= 1;
            over = over || getComputedStyle(outer).overflowX !== 'visible' && box.right > around.right + 1;
        }
        if (over && !hidden) cut.push(walker.currentNode.data);
    }
    return cut;
}"""


# Words of a legend that do not begin beside their box.
APART = """() => [...document.querySelectorAll('.hs-key')].filter(key => {
    const range = document.createRange(), box = key.getBoundingClientRect();
    range.selectNodeContents(key.nextSibling);
    const [words] = range.getClientRects();
    const beside = words.left >= box.right && words.left < box.right + 12;
    return !beside || words.top > box.top || words.bottom < box.bottom;
}).map(key => key.className)"""


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_label_is_cut_in_narrow_and_wide_windows(browser, address, width):
    with opened(browser, address) as page:
        page.set_viewport_size({"width": width, "height": 844})
        say(page, "w1 w2")
        wait_for_end(page, 1)
        assert page.evaluate(CUT) == []
        page.locator("#hs-show-trees").click()
        page.locator(".hs-tree").first.wait_for()  # wide ones scroll
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tops = [page.locator(f"#hs-{name}").bounding_box()["y"] for name in ("draft", "compare", "sample")]
        assert width < 1000 or len(set(tops)) == 1, "the switches stand side by side"
        assert page.evaluate(APART) == []


@in_browser
def test_html_and_templates_stay_text_and_errors_are_told(browser, address):
    with opened(browser, address) as page:
        messages = [f"{ALERT}<script>window.executed=1</script>", "${window.executed=1} {{value}} <b>w1</b>"]
        for index, message in enumerate(messages):
            say(page, message)
            wait_for_end(page, index + 1)
            assert page.locator(".hs-message").nth(index).inner_text() == message
        assert ALERT in page.locator("#hs-chat").inner_text()
        page.locator("#hs-show-trees").click()
        page.locator(".hs-tree").first.wait_for()
        assert page.evaluate("window.executed") is None
        assert page.locator("#hs-chat img, #hs-chat b:not(.hs-figure b), .hs-trees img").count() == 0
        long = "w1 " * 5000
        say(page, long)
        wait_for_end(page, 3)
        assert "context window is 4096: shorten it" in page.locator(".hs-error").inner_text()
        assert page.locator("#hs-message textarea").input_value() == long  # to be shortened


@in_browser
def test_stop_ends_an_answer_and_sessions_do_not_meet(browser, address):
    with opened(browser, address) as first, opened(browser, address) as second:
        first.locator("#hs-limit input[type=number]").fill("2000")
        say(first, "w4 w4")
        first.locator(".hs-answer").wait_for()
        say(second, "w7")
        second.get_by_text("waits for its turn").wait_for()
        first.locator("#hs-stop").click()
        wait_for_end(first, 1)
        assert first.get_by_text("Stopped.").count() == 1
        first.wait_for_function(SCROLLED)
        wait_for_end(second, 1)
        assert "w7" in second.locator(".hs-message").inner_text() and second.locator(".hs-figure").count() == 5
        first.locator("#hs-limit input[type=number]").fill("2000")
        say(first, "w8")
        first.locator(".hs-turn").nth(1).locator(".hs-figure").first.wait_for()
        first.close()  # whoever leaves stops too
        say(second, "w9")
        wait_for_end(second, 2)
