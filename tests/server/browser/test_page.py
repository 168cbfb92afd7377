"""The console in a browser: real clicks against a real server of the tiny target."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from console_page import TABS, ask, tab
from like_vllm import WORDS, LikeVllm
from serving import MODEL, Brake, Running, Serve, all_free, make_llm, until
from test_metrics import read
from tiny import make_drafter, make_target

from peagle.engine.llm import LLM
from peagle.model.drafter import Drafter

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Shot = Callable[[Any, str], None]
USED = "button, input, select, textarea, progress, [role=log]"
SPELLED = "nodes => nodes.map(node => node.firstChild.textContent)"


def test_chat(served: Running, opened: Open, shot: Shot) -> None:
    """Tokens appear, those a draft wrote are tinted by their place, and the numbers are the
    stream's."""
    page = opened(served.url)
    page.get_by_text(f"{MODEL} · P-EAGLE, K = 3").wait_for()
    shot(page, "welcome")
    said = ask(page, "the cat sat on the mat")
    got = served.chat(
        [{"role": "user", "content": "the cat sat on the mat"}], max_tokens=40, temperature=0
    )
    assert said == got.choices[0].message.content
    tinted = page.locator(".message.assistant .token")
    classes = {c.split()[-1] for c in tinted.evaluate_all("all => all.map(t => t.className)")}
    assert "p1" in classes <= {"p1", "p2", "p3"}
    assert tinted.first.get_attribute("title") == "draft token 1"
    colours = [
        page.locator(f".message.assistant .{c}").first.evaluate(
            "t => getComputedStyle(t).backgroundColor"
        )
        for c in sorted(classes)
    ]
    assert len(set(colours)) == len(classes) and "rgba(0, 0, 0, 0)" not in colours
    assert float(page.locator("#al").inner_text()) > 1
    assert float(page.locator("#rate").inner_text()) > 0
    assert page.locator("#ttft").inner_text().endswith("s")
    assert got.usage is not None
    assert page.locator("#tokens").inner_text() == str(got.usage.completion_tokens)
    assert page.locator("#legend-rows li").count() == 1 + len(classes)
    figures = page.locator(".message.assistant .figures").inner_text()
    length = page.locator("#al").inner_text()
    assert re.fullmatch(
        rf"acceptance length {length} · 3\.0 nodes a round · [\d.]+ tokens .*", figures
    )
    assert page.locator(".message .lookup").count() == 0 and "lookup" not in figures
    shot(page, "chat")
    # The conversation goes on, and can begin anew.
    ask(page, "<img src=x onerror=alert(1)>")
    assert page.locator(".message").count() == 4 and page.locator(".message img").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_lookup_is_marked(serve: Serve, opened: Open, shot: Shot) -> None:
    """Underlined, named by title and legend, and counted below the answer."""
    target = make_target()
    head = make_drafter(target, "p-eagle")  # of random weights: it offers little
    running = serve(LLM(target, head, nodes=12, max_batch=4, kv_tokens=1024))
    page = opened(running.url)
    page.get_by_text(f"{MODEL} · P-EAGLE, 12 nodes + lookup").wait_for()
    ask(page, "the cat sat on the mat and the cat sat on the mat", tokens=96)
    found = page.locator(".message.assistant .token.lookup")
    assert 0 < found.count() < page.locator(".message.assistant .token").count()
    assert re.fullmatch(r"draft token \d+, from lookup", found.first.get_attribute("title"))
    line = "t => getComputedStyle(t).textDecorationLine"
    assert found.first.evaluate(line) == "underline"
    assert page.locator(".message.assistant .token:not(.lookup)").first.evaluate(line) == "none"
    page.locator("#legend-rows").get_by_text("from lookup").wait_for()
    figures = page.locator(".message.assistant .figures").inner_text()
    assert re.search(r" · [1-9]\d* % from lookup( · |$)", figures)
    shot(page, "lookup")


def test_stop(served: Running, opened: Open, brake: Brake) -> None:
    """The button that sends also stops, and the server is free."""
    page = opened(served.url)
    brake.go.clear()
    page.get_by_label("Message").fill("a")
    page.locator("#send").click()
    page.get_by_role("button", name="Stop").click()
    page.locator("#log:not([aria-busy])").wait_for()
    assert page.locator("#log .figures, #log .error").count() == 0
    brake.go.set()
    until(lambda: all_free(served))
    assert read(served)["vllm:request_success_total", "abort"] == 1
    assert ask(page, "the cat")


def test_errors_are_told(
    served: Running, opened: Open, complaints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(served.url)
    page.get_by_label("Message").fill("word " * 300)
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("shorten it").wait_for()
    complaints[:] = [c for c in complaints if "status of 400" not in c]


def test_the_answers_room_is_the_servers(serve: Serve, drafter: Drafter, opened: Open) -> None:
    """With a small cache the first message is answered as the page comes."""
    running = serve(make_llm(drafter, kv_tokens=96))
    page = opened(running.url)
    page.locator("#send:enabled").wait_for()
    longest = page.get_by_label("Max tokens")
    assert longest.get_attribute("max") == str(running.api.context)
    assert longest.input_value() == str(running.api.context // 2)
    page.get_by_label("Message").fill("the cat")
    page.keyboard.press("Enter")
    page.locator(".message.assistant .figures").wait_for()


@pytest.mark.parametrize("asked", ["v1/models", "peagle/console"])
def test_nothing_is_sent_before_the_page_is_ready(
    served: Running, opened: Open, asked: str
) -> None:
    """A browser would send a form by itself, to nowhere, and a number typed would change."""
    page, held = opened("about:blank"), list[Any]()

    def hold(route: Any) -> None:
        held.append(route)

    page.route(f"**/{asked}", hold)
    with page.expect_request(f"**/{asked}"):
        page.goto(f"{served.url}/#race")
    unready = ("#race-start", "#question", "#max-tokens", "#send")
    assert all(page.locator(name).is_disabled() for name in unready)
    held[0].continue_()
    for name in unready:
        page.locator(f"{name}:enabled").wait_for(state="attached")


def test_drafts(served: Running, opened: Open, shot: Shot) -> None:
    """By the keyboard, draft by draft: the accepted path is what the answer says next."""
    page = opened(served.url)
    said = ask(page, "the cat sat on the mat")
    drafts = page.locator("details.drafts")
    assert not drafts.locator(".tree").is_visible()
    drafts.locator("summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    slider = page.get_by_label("Draft", exact=True)
    count = int(slider.get_attribute("max"))
    offered = accepted = 0
    for number in range(1, count + 1):
        told = str(slider.get_attribute("aria-valuetext"))
        found = re.fullmatch(rf"{number} of {count}: (\d+) offered, (\d+) accepted", told)
        assert found, told
        assert drafts.locator(".node.accepted, .node.refused").count() == int(found[1])
        path = drafts.locator(".node.accepted")
        assert path.count() == int(found[2])
        offered, accepted = offered + int(found[1]), accepted + int(found[2])
        page.keyboard.press("ArrowRight")
    assert accepted > 0
    assert slider.input_value() == str(count)
    page.keyboard.press("Home")
    spelled = "".join(drafts.locator(".node.accepted, .node.own").evaluate_all(SPELLED))
    before = drafts.locator("code").inner_text().replace("·", " ")
    assert said.startswith(before + spelled.replace("·", " "))
    shot(page, "drafts")


def test_no_server(served: Running, opened: Open, complaints: list[str], shot: Shot) -> None:
    """The page says so, and nothing can be sent."""
    page = opened("about:blank")
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(served.url)
    page.get_by_text("The server does not answer").wait_for()
    assert page.locator("#served").inner_text() == "not reachable"
    assert page.locator("#send").is_disabled()
    shot(page, "no-server")
    complaints.clear()


def test_charts_move(served: Running, opened: Open, shot: Shot) -> None:
    """Charts show requests of other clients."""
    page = opened(f"{served.url}/#live")
    charts = page.locator(".chart")
    path = "path.line.s0"
    until(lambda: charts.nth(0).locator(path).get_attribute("d"))
    before = charts.nth(0).locator(path).get_attribute("d")
    assert [float(charts.nth(i).get_attribute("data-most")) for i in range(2)] == [0, 0]
    assert charts.nth(1).locator("rect.bar").count() == 0, "nothing was drafted"
    ask(page, "the cat sat on the mat")
    tab(page, "Live")
    for drawn in range(3):
        until(lambda at=drawn: float(charts.nth(at).get_attribute("data-most")) > 0)
    assert charts.nth(0).locator(path).get_attribute("d") != before
    assert charts.nth(1).locator("rect.bar").count() == 3
    forward = charts.nth(2)
    assert 2 < float(forward.get_attribute("data-most")) <= 4, (
        "rows: the newest token, a draft of 3"
    )
    assert re.fullmatch(r"[\d.]+ / [\d.]+", forward.locator(".chart-value").inner_text())
    label = charts.nth(3).locator("svg").get_attribute("aria-label")
    assert label.startswith("Queue, requests: running ")
    shot(page, "live")


def test_key(serve: Serve, opened: Open, complaints: list[str], shot: Shot) -> None:
    """The page asks for the key once, again when it is wrong, and keeps it for this tab only."""
    page = opened(serve(api_key="secret").url)
    page.get_by_role("dialog").wait_for()
    shot(page, "key")
    for key in ("wrong", "secret"):
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        if key == "wrong":
            page.get_by_text("refuses this key").wait_for()
    page.locator(".dot.on").wait_for()
    assert not page.get_by_role("dialog").is_visible()
    assert ask(page, "the cat")
    stored = "[sessionStorage.getItem('peagle-api-key'), localStorage.length, document.cookie]"
    assert page.evaluate(stored) == ["secret", 0, ""]
    page.reload()
    page.locator(".dot.on").wait_for()
    assert not page.get_by_role("dialog").is_visible()
    complaints[:] = [c for c in complaints if "status of 401" not in c]


def test_keyboard_alone(served: Running, opened: Open) -> None:
    """Tabs by arrows, everything else by Tab and Enter; all that can be used has a name."""
    page = opened(served.url)
    page.locator(".dot.on").wait_for()
    page.keyboard.press("Tab")
    for name in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.textContent") == name
        panel = page.get_by_role("tabpanel", name=name)
        panel.wait_for()
        assert panel.locator("h2").first.is_visible()
    for _ in range(3):  # past the log and to the second example
        page.keyboard.press("Tab")
    assert "sky" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.locator(".message.assistant .words:not(:empty)").wait_for()
    nameless = page.evaluate(
        f"[...document.querySelectorAll('{USED}')]"
        ".filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).length"
    )
    assert nameless == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(served: Running, opened: Open, shot: Shot, scheme: str) -> None:
    """No tab is wider than the window, in both colours, and text stands out of the page."""
    page = opened(served.url, width=360, height=740, color_scheme=scheme, has_touch=True)
    page.locator(".dot.on").wait_for()
    ask(page, "the cat sat on the mat")
    for name in TABS:
        tab(page, name)
        if name == "Catalog":
            page.locator(".entry summary").first.click()
        wide = "[document.documentElement.scrollWidth, document.querySelector('main').scrollWidth]"
        assert max(page.evaluate(wide)) <= 360, name
        shot(page, f"phone-{scheme}-{name.lower()}")
    light = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(page.evaluate(light)) > 3 * 128) == (scheme == "light")


def test_another_server(like_vllm: LikeVllm, opened: Open, shot: Shot) -> None:
    """vLLM does not say which tokens were drafted: no tint, and acceptance from /metrics."""
    page = opened(like_vllm.url)
    page.get_by_text("Ask other").wait_for()
    assert ask(page, "Why?") == "".join(WORDS)
    assert page.locator(".message .token").count() == 0 and not page.locator("#legend").is_visible()
    assert page.locator("#al").inner_text() == "3.00"
    assert page.locator("#tokens").inner_text() == str(len(WORDS))
    assert "peagle_drafts" not in like_vllm.asked[0]["stream_options"]
    for name in ("Race", "Catalog"):
        tab(page, name)
        page.get_by_text("this server is another one").and_(page.locator(":visible")).wait_for()
    tab(page, "Live")
    page.locator(".chart rect.bar").nth(2).wait_for()
    shot(page, "another-server")


def test_charts_after_a_restart(like_vllm: LikeVllm, opened: Open) -> None:
    """The counters of the new server begin at 0: no rate is below 0."""
    like_vllm.asked += [{}] * 9
    page = opened(f"{like_vllm.url}/#live")
    bars, line = (page.locator(f".chart {part}") for part in ("rect.bar", "path.line.s0"))
    bars.first.wait_for()
    like_vllm.asked.clear()
    page.get_by_role("img", name="nothing was drafted").wait_for()
    until(lambda: page.locator(".chart-value").first.inner_text() == "0")
    drawn = str(line.first.get_attribute("d"))
    heights = [float(y) for y in re.findall(r"[ML]\S+ (\S+?)(?:h0)?(?=L|$)", drawn)]
    assert heights and max(heights) <= 140, "the axis"
