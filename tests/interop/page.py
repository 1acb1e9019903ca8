"""The embedded page in headless Chromium: the whole loop of a chat on a desk, a tablet and a phone, and hostile answers.

    page.py SHARDPACK CHROMIUM SCREENSHOTS [AXE]

CHROMIUM is a program; an empty text is the one that playwright has installed. AXE is the script of
axe-core, where npm gave it.
"""

import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

from playwright.sync_api import expect, sync_playwright

data = pathlib.Path(__file__).parent.parent / "data"
shardpack, chromium, screenshots = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2], pathlib.Path(sys.argv[3])
axe = pathlib.Path(sys.argv[4]).read_text() if len(sys.argv) > 4 else None
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MARKDOWN = """Here is **Markdown** with $a^2 + b^2 = c^2$.

1. one
2. two

| name | size |
|---|---:|
| a | 1 |

```rust
fn main() { println!("hello"); }
```
"""
EVIL = """<script>window.ran = 1; alert(1)</script><img src=x onerror="window.ran = 1"><svg onload="window.ran = 1"><a xlink:href="javascript:window.ran = 1">x</a></svg>

[link](javascript:window.ran=1) [other](JaVaScRiPt:alert(1)) [data](data:text/html,<script>alert(1)</script>) ![image](x" onerror="alert(1))

$\\href{javascript:window.ran=1}{x}$ $\\htmlData{x=y}{z}$ <iframe srcdoc="<script>parent.ran = 1</script>"></iframe>

<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">

**half [open `code"""
# What each prompt is answered with, and how often it is said.
HOSTILE = {
    "scripts and links": (EVIL, 1),
    "no space": ("a" * 1000, 200),
    "lines of code": ("```python\n" + "x = [1, 2, 3]\n" * 100, 100),
    "32k tokens": ("Some words of **weight**, and a list:\n\n- one\n- two\n\n`code` goes on here.\n\n", 900),
}
SCHEMA = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False})
SCRIPT = {
    "step_ms": 2,
    "answers": [
        {"when": "Weather in Rome?", "text": CALL},
        {"when": "sunny, 21 degrees", "text": "It is sunny in Rome."},
        {"when": "fails", "text": "half an ans", "fail": "rank 1 is gone", "retryable": True},
        {"when": "show all", "text": MARKDOWN},
        {"when": "Speak for long", "text": "word ", "repeat": 20000},
        {"when": "As JSON", "text": '{"city":"Rome"}'},
        *({"when": name, "text": text, "repeat": times} for name, (text, times) in HOSTILE.items()),
        {"text": "Hello <b>there</b>, reader. " * 20},
    ],
}
TOOLS = json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])


def settled(page):
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=30000)


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answer(page):
    return page.locator(".turn.assistant").last


def fits(page, name):
    """Nothing is wider than the screen."""
    page.screenshot(path=screenshots / f"{name}.png")
    wider = page.evaluate("[document.documentElement, ...document.querySelectorAll('main')].some((it) => it.scrollWidth > innerWidth)")
    assert not wider, f"{name}: the page is wider than the screen"


def is_set_up(page):
    """Waits until what answers are rendered with is set up; the page's policy allows no waiting in its own words."""
    for _ in range(200):
        if page.evaluate("window.shardpack?.isReady === true"):
            return
        page.wait_for_timeout(50)
    raise AssertionError("what answers are rendered with is not set up by itself")


def configure(page, label, text):
    """Sets a field of the settings and closes them."""
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label(label).fill(text)
    page.get_by_label("Settings", exact=True).get_by_role("button", name="Close").click()


def keeps_what_is_typed(page):
    """A number of the settings that somebody types slowly: each second the page is drawn again beside it."""
    field = page.get_by_label("Temperature")
    page.get_by_role("button", name="Settings", exact=True).click()
    for typed in ["0", ".", "5"]:
        field.press_sequentially(typed)
        page.wait_for_timeout(1300)
    expect(field).to_have_value("0.5")
    page.get_by_label("Settings", exact=True).get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(field).to_have_value("0.5")
    field.fill("")
    page.get_by_label("Settings", exact=True).get_by_role("button", name="Close").click()


def converse(page, name):
    """The whole loop: ask, stream, stop, edit, branch, retry, a call with its result, a schema, reload."""
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("m")
    keeps_what_is_typed(page)
    ask(page, "Hi")
    expect(answer(page)).to_contain_text("Hello <b>there</b>, reader.")
    settled(page)
    expect(answer(page).locator(".facts")).to_contain_text("tokens/s")
    answer(page).get_by_role("button", name="Regenerate").click()
    expect(answer(page).locator(".branches")).to_contain_text("2 / 2")
    settled(page)
    answer(page).get_by_role("button", name="Previous version").click()
    expect(answer(page).locator(".branches")).to_contain_text("1 / 2")
    user = page.locator(".turn.user").last
    user.get_by_role("button", name="Edit").click()
    user.get_by_role("textbox", name="Edit").fill("Show all of it: show all")
    user.get_by_role("button", name="Save and send").click()
    expect(page.locator(".turn.user .branches")).to_contain_text("2 / 2")
    settled(page)
    for part in ["strong", "table", ".code .hljs-keyword", "math"]:
        expect(answer(page).locator(part).first).to_be_visible()
    aligned = answer(page).locator("td").evaluate_all("cells => cells.map((it) => getComputedStyle(it).textAlign)")
    assert aligned == ["left", "right"], aligned
    fits(page, name + "-markdown")
    ask(page, "Speak for long")
    expect(answer(page).locator(".answer")).to_contain_text("word")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(answer(page)).to_contain_text("Stopped.")
    configure(page, "Tools (JSON)", TOOLS)
    ask(page, "Weather in Rome?")
    call = page.locator(".call")
    expect(call).to_contain_text("get_weather")
    expect(call).to_contain_text('"Rome"')
    page.get_by_label("Result", exact=True).fill("sunny, 21 degrees")
    page.get_by_role("button", name="Return").click()
    expect(answer(page)).to_contain_text("It is sunny in Rome.")
    settled(page)
    configure(page, "Tools (JSON)", "")
    configure(page, "Answer schema (JSON)", SCHEMA)
    ask(page, "As JSON")
    settled(page)
    expect(answer(page).locator(".answer")).to_contain_text('{"city":"Rome"}')
    configure(page, "Answer schema (JSON)", "")
    ask(page, "This fails")
    expect(page.locator(".turn .error")).to_have_text("rank 1 is gone")
    said = page.locator(".turn .answer").all_inner_texts()
    page.reload()
    expect(page.locator(".call .result")).to_contain_text("sunny, 21 degrees")
    # Until then answers are shown as they were written.
    is_set_up(page)
    assert page.locator(".turn .answer").all_inner_texts() == said, "what was said is lost by a reload"
    fits(page, name)


def carries_over(page, browser, url):
    """A chat that is exported is imported in another browser, and broken files are refused."""
    menu = page.get_by_role("button", name="Show chats")
    if menu.is_visible():
        menu.click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    file = screenshots / "chats.json"
    download.value.save_as(file)
    other = browser.new_context().new_page()
    other.goto(url)
    broken = screenshots / "broken.json"
    broken.write_text('{"format": "shardpack-chats", "chats": [{"messages": {"a": {"id": "a", "role": "user", "parent": "a"}}}]}')
    for given in [broken, file]:
        with other.expect_file_chooser() as chooser:
            other.get_by_role("button", name="Import chats").click()
        chooser.value.set_files(given)
        if given == broken:
            expect(other.get_by_role("alert")).to_contain_text("This file holds no chats")
    expect(other.locator(".call .result")).to_contain_text("sunny, 21 degrees")
    other.context.close()


def attaches(page):
    """A text file goes with a message and into the export, another file is refused; a preset and the keys."""
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".empty")).to_be_visible()
    text, other = screenshots / "notes.txt", screenshots / "picture.bin"
    text.write_text("Four Macs stand here.")
    other.write_bytes(b"\0\1\2")
    for file in [other, text]:
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Attach text files").click()
        chooser.value.set_files(file)
        if file == other:
            expect(page.get_by_role("alert")).to_contain_text("picture.bin: expected a text file")
    expect(page.locator(".composer .chip")).to_have_text("notes.txt")
    page.keyboard.press("Control+,")
    page.get_by_label("Preset").select_option("precise")
    expect(page.get_by_label("Temperature")).to_have_value("0.2")
    page.keyboard.press("Control+,")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "What is written there?")
    body = request.value.post_data_json
    assert body["messages"][-1]["content"] == "notes.txt:\n```\nFour Macs stand here.\n```\n\nWhat is written there?", body
    assert (body["temperature"], body["top_p"]) == (0.2, 0.9), body
    settled(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown").click()
    file = screenshots / "chat.md"
    download.value.save_as(file)
    told = file.read_text()
    for part in ["## user", "Four Macs stand here.", "What is written there?", "## assistant", "Hello <b>there</b>, reader."]:
        assert part in told, (part, told)
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")


# Notes the frames of the next seconds; what was noting them before stops.
FRAMES = """() => { const noted = window.frames_ = []; const next = at => { if (noted !== window.frames_) return; noted.push(at); requestAnimationFrame(next); }; requestAnimationFrame(next); }"""


@contextlib.contextmanager
def serving(*arguments):
    """A server with these arguments, and the address of its page; it is ended afterwards."""
    process = subprocess.Popen([*map(str, [shardpack, "serve", *arguments, "--listen", "127.0.0.1:0", "--json"])], stdout=subprocess.PIPE, text=True)
    try:
        yield process, json.loads(process.stdout.readline())["url"].removesuffix("v1")
    finally:
        process.terminate()
        process.wait(30)


def frames_of(page, prompt):
    """Frames per second from a prompt to the end of its answer."""
    page.evaluate(FRAMES)
    ask(page, prompt)
    expect(page.locator(".turn.user .bubble").last).to_have_text(prompt)
    expect(answer(page)).to_have_attribute("aria-busy", "false", timeout=120000)
    frames = page.evaluate("frames_")
    seconds = max(1, frames[-1] - frames[0]) / 1000
    print(f"page: {prompt}: {(len(frames) - 1) / seconds:.0f} frames per second over {seconds:.1f} s")
    return (len(frames) - 1) / seconds


def first_answer_is_smooth(browser, url):
    """The first answer of a page pays for no library: they are set up while nobody asks."""
    rates = []
    while len(rates) < 3 and max(rates, default=0) <= 30:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        expect(page.locator("#state")).to_have_text("ready")
        is_set_up(page)
        rates.append(frames_of(page, "show all"))
        for part in ["table", ".code .hljs-keyword", "math"]:
            expect(answer(page).locator(part).first).to_be_visible()
        page.close()
    assert max(rates) > 30, f"the first answer: {rates} frames per second"


def survives_hostile_output(page):
    """Nothing in an answer runs, whatever it is made of, and the page goes on being drawn."""
    ran = []
    page.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
    for name, (text, times) in HOSTILE.items():
        # What else the machine does comes and goes; a page that is slow is slow each time.
        rates = []
        while len(rates) < 3 and max(rates, default=0) <= 30:
            page.get_by_role("button", name="New chat").first.click()
            expect(page.locator(".empty")).to_be_visible()
            rates.append(frames_of(page, name))
        assert max(rates) > 30, f"{name}: {rates} frames per second"
        expect(page.locator(".turn .error")).to_have_count(0)
        shown = len(answer(page).locator(".answer").text_content())
        assert shown > len(text) * times / 2, f"{name}: {shown} characters are shown"
        assert page.evaluate("window.ran === undefined"), name
        unsafe = page.evaluate("[...document.querySelectorAll('.answer *')].filter(it => /^(script|iframe|img|object|svg|form)$/i.test(it.tagName) && !it.closest('button') || [...it.attributes].some(a => /^on/i.test(a.name) || /javascript:/i.test(a.value))).map(it => it.outerHTML)")
        assert not unsafe and not ran, (name, unsafe, ran)
    fits(page, "hostile")
    page.evaluate("window.frames_ = []")


def meets_hostile_output(browser, folder):
    """Hostile answers as fast as they can be sent, by a model whose context holds them."""
    source, set_, script = folder / "source", folder / "long", folder / "hostile.json"
    shutil.copytree(data / "kjv-4m", source)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 18
    (source / "config.json").write_text(json.dumps(config))
    convert = [shardpack, "convert", source, "--output", set_]
    subprocess.run([*map(str, convert)], check=True, capture_output=True)
    script.write_text(json.dumps(SCRIPT | {"step_ms": 0}))
    with serving(set_, "--script", script) as (_, url):
        first_answer_is_smooth(browser, url)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        survives_hostile_output(page)


def is_accessible(browser, url):
    """axe-core finds no serious fault, light and dark, on a phone and a desk, whatever panel is open."""
    for scheme in ["light", "dark"]:
        for width, height in [(320, 640), (1440, 900)]:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True)
            page = context.new_page()
            page.goto(url)
            ask(page, "show all")
            settled(page)
            for panel in [None, "Settings", "Models", "Cluster", "Playground"]:
                if panel == "Playground":
                    page.get_by_role("button", name=panel).click()
                    page.get_by_label("Prompt", exact=True).fill("show all")
                    page.get_by_role("button", name="Run", exact=True).click()
                    expect(page.locator(".tokens span").first).to_be_visible(timeout=15000)
                elif panel:
                    # The models' button names the model too.
                    page.get_by_role("button", name="Models: m" if panel == "Models" else panel, exact=True).first.click()
                    expect(page.locator(".side .panel > *").first).to_be_visible(timeout=15000)
                page.evaluate(axe)
                found = page.evaluate("axe.run().then(it => it.violations)")
                serious = [(it["id"], it["nodes"][0]["html"]) for it in found if it["impact"] in ("serious", "critical")]
                assert not serious, (scheme, width, panel, serious)
                if panel and panel != "Playground":
                    page.locator(".side > header button").click()
            context.close()
    print("page: axe-core finds no serious fault")


def paints_soon_and_once(browser, url):
    """One request for the page, its first paint soon, and nothing fetched again that is known."""
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(url)))
    page.goto(url)
    expect(page.locator("#state")).to_have_text("ready")
    paints = []
    for _ in range(5):
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
    paint = min(paints)
    extra = [it for it in asked if not it.startswith(("stats", "events", "props", "v1/models", "data:")) and it]
    assert not extra, extra
    with urllib.request.urlopen(urllib.request.Request(url, headers={"accept-encoding": "gzip"})) as reply:
        size, tag = len(reply.read()), reply.headers["etag"]
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers={"if-none-match": tag}))
        raise AssertionError("the page was sent again")
    except urllib.error.HTTPError as error:
        assert error.code == 304, error.code
    print(f"page: {size} bytes in one request, first paint after {paint:.0f} ms (best of {len(paints)}; the aim is 300)")
    # Twice the aim: this machine may do other things beside.
    assert paint < 600, paints
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.reload(wait_until="commit")
    expect(page.locator(":root")).to_have_attribute("data-theme", "dark")
    page.close()
    # What is painted first is in the page itself: no script is waited for.
    bare = browser.new_context(java_script_enabled=False, viewport={"width": 375, "height": 720}).new_page()
    bare.goto(url)
    expect(bare.locator(".empty h1")).to_have_text("What can I help with?")
    bare.screenshot(path=screenshots / "first-paint.png")
    bare.context.close()


def shows_ranks(browser, set_):
    """Memory, step, sum and traffic of every rank that computes, on a phone, and the link between them."""
    with serving(set_) as (_, url):
        page = browser.new_page(viewport={"width": 375, "height": 720})
        page.goto(url)
        ask(page, "John 3:16")
        page.get_by_role("button", name="Cluster").click()
        expect(page.locator(".node")).to_have_count(2)
        for rank in range(2):
            for fact in ["iB", "step", "all-reduce"]:
                expect(page.locator(".node").nth(rank)).to_contain_text(fact, timeout=20000)
        page.locator(".side > header button").click()
        # Traffic is that of the last seconds.
        ask(page, "John 3:16")
        page.get_by_role("button", name="Cluster").click()
        for rank in range(2):
            expect(page.locator(".node").nth(rank)).to_contain_text(re.compile(r"own data[1-9][\d.]* [KMG]?i?B/s"), timeout=20000)
        expect(page.locator(".links li")).to_contain_text(re.compile(r"tcp · \d.* µs · .*/s"))
        expect(page.locator(".map circle")).to_have_count(2)
        fits(page, "ranks")
        page.close()
        shows_sensors(browser, url)


def shows_sensors(browser, url):
    """Power and temperature where a machine tells them, and no zero where it does not; how many drafts are taken."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})

    def with_sensors(route):
        reply = route.fetch()
        stats = reply.json()
        for model in [stats, *stats["models"]]:
            model["drafts"] = {"run": 200, "accepted": 120}
            for node in model["nodes"]:
                for sensor in ["power_watts", "temperature_celsius"]:
                    node.pop(sensor, None)
            model["nodes"][0] |= {"power_watts": 38.4, "temperature_celsius": 61.25}
        route.fulfill(response=reply, json=stats)

    page.route("**/stats", with_sensors)
    page.goto(url)
    page.get_by_role("button", name="Cluster", exact=True).first.click()
    first, second = page.locator(".node").nth(0), page.locator(".node").nth(1)
    for fact in ["temperature61 °C", "power38 W"]:
        expect(first).to_contain_text(fact, timeout=20000)
    for fact in ["temperaturenot measured", "powernot measured"]:
        expect(second).to_contain_text(fact)
    expect(page.locator(".numbers div", has_text="drafts accepted")).to_contain_text("60 %")
    expect(page.locator(".spark", has_text="drafts accepted")).to_contain_text("60.0 %")
    fits(page, "sensors")
    page.unroute_all(behavior="ignoreErrors")
    page.close()


def ranks_of(process):
    """Process ids of a server's ranks, in the order in which they were started."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return sorted(int(line[0]) for line in lines if line[1] == str(process.pid) and "text-worker" not in line)


def survives_a_lost_rank(browser, set_):
    """A rank killed in the middle of an answer: the page says what was lost and that it is back, and the
    answer is the one of an undisturbed run."""
    with serving(set_, "--threads", "1") as (process, url):
        # Long enough to be lost in the middle of.
        schema = {"type": "object", "properties": {"verses": {"type": "array", "minItems": 300, "items": {"type": "boolean"}}}, "required": ["verses"], "additionalProperties": False}
        body = {"messages": [{"role": "user", "content": "John 3:16"}], "temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
        asked = urllib.request.Request(url + "v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        undisturbed = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        expect(page.locator("#state")).to_have_text("ready")
        configure(page, "Answer schema (JSON)", json.dumps(schema))
        configure(page, "Temperature", "0")
        page.get_by_role("button", name="Cluster", exact=True).first.click()
        ask(page, "John 3:16")
        expect(answer(page).locator(".answer")).to_contain_text("verses")
        ranks = ranks_of(process)
        assert len(ranks) == 2, ranks
        os.kill(ranks[1], signal.SIGKILL)
        assert answer(page).get_attribute("aria-busy") == "true", "the answer had ended before the rank was killed"
        expect(page.locator(".banner")).to_contain_text(re.compile("rank|machine"), timeout=60000)
        told = answer(page).locator(".lost li")
        expect(told).to_have_count(1, timeout=60000)
        expect(told.last).to_contain_text("A machine was lost and is back", timeout=60000)
        settled(page)
        shown = answer(page).locator(".answer").text_content()
        assert "".join(shown.split()) == "".join(undisturbed.split()), (shown[-200:], undisturbed[-200:])
        assert ranks_of(process)[0] == ranks[0] and ranks_of(process)[1] != ranks[1], "rank 1 has a new process"
        for kind in ["Rank lost", "Ranks serve"]:
            expect(page.locator(".events b", has_text=kind).first).to_be_visible()
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator(".map .lost")).to_have_count(0)
        fits(page, "lost-rank")
        page.close()
    print("page: a rank killed in the middle of an answer is shown, and the answer goes on to its end")


def plays(browser, folder, set_):
    """One prompt for two models side by side: the text that each reads, and the odds of every token."""
    eight = folder / "eight"
    convert = [shardpack, "convert", data / "kjv-4m", "--output", eight, "--bits", "8"]
    subprocess.run([*map(str, convert)], check=True, capture_output=True)
    with serving(set_, eight) as (_, url):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.get_by_role("button", name="Playground").click()
        page.get_by_role("button", name="Compare models").click()
        expect(page.locator(".pane")).to_have_count(2)
        page.get_by_label("Prompt", exact=True).fill("John 11:35")
        page.locator(".ask").get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Run", exact=True).click()
        for at, model in enumerate([set_.name, eight.name]):
            pane = page.locator(".pane").nth(at)
            expect(pane.get_by_label("Model", exact=True)).to_have_value(model)
            expect(pane.locator("pre.raw")).to_have_text("<|im_start|>user\nJohn 11:35<|im_end|>\n<|im_start|>assistant\n")
            expect(pane.locator(".tokens")).to_contain_text("Jesus wept.", timeout=60000)
            pane.locator(".tokens span").first.hover()
            expect(pane.locator(".odds tr")).to_have_count(5)
            chosen = pane.locator(".odds .chosen td").last.text_content()
            assert 50 < float(chosen.removesuffix(" %")) <= 100, chosen
            pane.locator(".tokens").press("ArrowRight")
            expect(pane.locator(".tokens span").nth(1)).to_have_class("p0 at")
        page.get_by_label("Raw text").check()
        page.get_by_label("Prompt", exact=True).fill("In the beginning")
        page.get_by_label("Prompt", exact=True).press("Control+Enter")
        expect(page.locator(".pane pre.raw").first).to_have_text("In the beginning")
        expect(page.locator(".pane .tokens").first).to_be_visible(timeout=60000)
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=60000)
        expect(page.locator(".pane .error")).to_have_count(0)
        for name, (width, height) in {"desk": (1440, 900), "tablet": (768, 1024), "phone": (320, 640)}.items():
            page.set_viewport_size({"width": width, "height": height})
            fits(page, f"playground-{name}")
        page.close()
        print("page: two models answer one prompt side by side, with the odds of every token")
        compares_settings(browser, url, set_.name)
    administers(browser, folder, [set_, eight])


def compares_settings(browser, url, model):
    """One prompt for one model under several settings side by side; what is left open is as in the form."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    bodies = []
    page.on("request", lambda request: request.url.endswith("/chat/completions") and bodies.append(request.post_data_json))
    page.goto(url)
    page.get_by_role("button", name="Playground").click()
    page.get_by_label("Prompt", exact=True).fill("John 11:35")
    form = page.locator(".ask")
    form.get_by_label("Top-p").fill("0.9")
    form.get_by_label("Seed").fill("7")
    for _ in range(2):
        page.get_by_role("button", name="Compare settings").click()
    panes = page.locator(".pane")
    expect(panes).to_have_count(3)
    for at, (label, value) in enumerate([("Temperature", "0"), ("Temperature", "1.5"), ("Seed", "8")]):
        panes.nth(at).get_by_label(label).fill(value)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(panes.nth(0).locator(".tokens")).to_contain_text("Jesus wept.", timeout=60000)
    for at in range(3):
        expect(panes.nth(at).get_by_label("Model", exact=True)).to_have_value(model)
        expect(panes.nth(at).locator(".tokens span").first).to_be_visible(timeout=60000)
    asked = [{name: body.get(name) for name in ["model", "temperature", "top_p", "seed"]} for body in bodies]
    expected = [{"model": model, "top_p": 0.9, "seed": 7, "temperature": 0}, {"model": model, "top_p": 0.9, "seed": 7, "temperature": 1.5}, {"model": model, "top_p": 0.9, "seed": 8, "temperature": None}]
    assert sorted(asked, key=str) == sorted(expected, key=str), asked
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=60000)
    panes.nth(1).get_by_label("Temperature").fill("warm")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(panes.nth(1).get_by_role("alert")).to_have_text("Temperature: expected a number, found warm")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=60000)
    for name, (width, height) in {"desk": (1440, 900), "phone": (320, 640)}.items():
        page.set_viewport_size({"width": width, "height": height})
        fits(page, f"settings-{name}")
    panes.nth(2).get_by_role("button", name="Close").click()
    expect(panes).to_have_count(2)
    page.get_by_role("button", name="Single answer").click()
    expect(panes).to_have_count(1)
    expect(panes.get_by_label("Temperature")).to_have_count(0)
    page.close()
    print("page: one model answers one prompt under several settings side by side")


def administers(browser, folder, sets):
    """A key that may only administer loads and unloads models, and is offered nothing that computes."""
    keys = folder / "administer.json"
    make = [shardpack, "keys", keys, "add", "ops", "--scopes", "admin"]
    key = subprocess.run([*map(str, make)], check=True, capture_output=True, text=True).stdout.strip()
    with serving(*sets, "--keys", keys) as (_, url):
        page = browser.new_page(viewport={"width": 768, "height": 1024})
        asked = []
        page.on("request", lambda request: request.method == "POST" and asked.append(request.url.removeprefix(url)))
        page.goto(url)
        page.get_by_label("API key", exact=True).fill(key)
        page.get_by_role("button", name="Use this key").click()
        second = page.locator(".watch .model", has_text=sets[1].name)
        second.get_by_role("button", name="Unload").click(timeout=20000)
        second.get_by_role("button", name="Load", exact=True).click(timeout=60000)
        expect(second.get_by_role("button", name="Unload")).to_be_visible(timeout=60000)
        expect(page.locator(".top")).to_contain_text("key for administration")
        for name in ["Settings", "Playground"]:
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        expect(page.get_by_label("Message", exact=True)).to_have_count(0)
        assert asked == ["v1/models/unload", "v1/models/load"], asked
        fits(page, "administer")
        page.close()
    print("page: a key that may only administer loads and unloads models")


def watches(browser, folder, set_):
    """A read-only key sees the cluster and nothing that computes."""
    keys = folder / "keys.json"
    make = [shardpack, "keys", keys, "add", "wall", "--read-only"]
    key = subprocess.run([*map(str, make)], check=True, capture_output=True, text=True).stdout.strip()
    with serving(set_, "--keys", keys) as (_, url):
        page = browser.new_page(viewport={"width": 768, "height": 1024})
        asked = []
        page.on("request", lambda request: request.method == "POST" and asked.append(request.url))
        page.goto(url)
        page.get_by_label("API key", exact=True).fill(key)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator(".watch .node")).to_have_count(2)
        expect(page.locator(".watch .memory")).not_to_have_count(0, timeout=20000)
        expect(page.locator(".events b", has_text="Ranks serve")).to_be_visible()
        expect(page.get_by_label("Message", exact=True)).to_have_count(0)
        expect(page.get_by_role("button", name="Settings")).to_have_count(0)
        expect(page.locator(".watch .model")).to_have_count(0)
        assert not asked, asked
        fits(page, "read-only")
        page.close()
    print("page: a read-only key sees the cluster alone")


# What a page of a stranger's tries on a server on the reader's machine.
TRIES = """async url => {
    const body = JSON.stringify({messages: [{role: "user", content: "Hi"}]});
    const chat = url + "v1/chat/completions";
    const tried = {};
    const outcome = async (name, made) => {
        try { const reply = await made; tried[name] = reply.type + " " + reply.status + " " + await reply.text(); }
        catch (error) { tried[name] = "refused"; }
    };
    await outcome("read models", fetch(url + "v1/models"));
    await outcome("read stats", fetch(url + "stats"));
    await outcome("ask", fetch(chat, {method: "POST", body, headers: {"content-type": "application/json"}}));
    await outcome("ask as text", fetch(chat, {method: "POST", body, mode: "no-cors"}));
    await outcome("ask as a form", fetch(chat, {method: "POST", body: new URLSearchParams({body}), mode: "no-cors"}));
    await outcome("unload", fetch(url + "v1/models/unload", {method: "POST", body: "{}", mode: "no-cors"}));
    navigator.sendBeacon(chat, body);
    const frame = document.createElement("iframe");
    frame.name = "frame";
    document.body.append(frame);
    const form = document.createElement("form");
    Object.assign(form, {action: chat, method: "post", enctype: "text/plain", target: "frame"});
    const field = document.createElement("input");
    Object.assign(field, {name: body.slice(0, -1) + ',"x":"', value: '"}'});
    form.append(field);
    document.body.append(form);
    form.submit();
    await new Promise(done => { frame.onload = done; setTimeout(done, 3000); });
    return tried;
}"""


def answered(url):
    """How many requests to chat were answered with each status."""
    lines = urllib.request.urlopen(url + "metrics").read().decode().splitlines()
    found = {}
    for line in lines:
        if 'path="/v1/chat/completions"' in line and "status=" in line:
            status = line.partition('status="')[2].partition('"')[0]
            found[status] = found.get(status, 0) + int(float(line.rpartition(" ")[2]))
    return found


def strangers_are_kept_out(playwright, url):
    """A page of another site, and one whose name leads to this machine (DNS rebinding), read and spend
    nothing on a server without keys."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>stranger</title><body></body>")

        def log_message(self, *_):
            pass

    stranger = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    browser = playwright.chromium.launch(executable_path=chromium or None, args=["--no-sandbox", rules])
    try:
        before = answered(url)
        page = browser.new_page()
        page.goto(f"http://evil.example:{stranger.server_port}/")
        tried = page.evaluate(TRIES, url)
        for name, outcome in tried.items():
            # What is opaque cannot be read.
            assert outcome in ("refused", "opaque 0 "), (name, outcome)
        # The name leads to the server now: the browser takes its answers for the stranger's own.
        port = url.rstrip("/").rpartition(":")[2]
        rebound = f"http://evil.example:{port}/"
        assert page.goto(rebound + "v1/models").status == 403
        tried = page.evaluate(TRIES, rebound)
        for name, outcome in tried.items():
            assert outcome == "refused" or " 403 " in outcome and "host_not_allowed" in outcome, (name, outcome)
        after = answered(url)
        assert after.get("200", 0) == before.get("200", 0), (before, after)
        refused = sum(after.values()) - sum(before.values())
        assert refused >= 4, f"the tries did not reach the server: {before} {after}"
        # The server's own page may ask.
        page.goto(url)
        assert page.evaluate(TRIES, url)["ask"].startswith("basic 200 ")
    finally:
        browser.close()
        stranger.shutdown()
    print(f"page: another site's page and a rebound name read and spend nothing ({refused} tries refused)")


def main():
    screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        set_, script = folder / "set", folder / "script.json"
        convert = [shardpack, "convert", data / "kjv-4m", "--output", set_, "--nodes", "2"]
        subprocess.run([*map(str, convert)], check=True, capture_output=True)
        script.write_text(json.dumps(SCRIPT))
        with serving(set_, "--script", script, "--name", "m") as (_, url):
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium or None, args=["--no-sandbox"])
                sizes = {"desk": (1440, 900), "tablet": (768, 1024), "phone": (320, 640)}
                for name, (width, height) in sizes.items():
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if name == "tablet" else "light")
                    faults = []
                    page.on("pageerror", lambda error: faults.append(str(error)))
                    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
                    page.goto(url)
                    converse(page, name)
                    if name != "tablet":
                        carries_over(page, browser, url)
                    if name == "desk":
                        attaches(page)
                    assert not faults, faults
                paints_soon_and_once(browser, url)
                meets_hostile_output(browser, folder)
                if axe:
                    is_accessible(browser, url)
                shows_ranks(browser, set_)
                survives_a_lost_rank(browser, set_)
                plays(browser, folder, set_)
                watches(browser, folder, set_)
                browser.close()
                strangers_are_kept_out(playwright, url)
    print("page: talks, calls and fails as it should, on a desk, a tablet and a phone")


if __name__ == "__main__":
    main()
