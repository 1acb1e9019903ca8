"""The embedded page in headless Chromium: a conversation, a call and its result, on a desk and a phone.

    page.py SHARDPACK CHROMIUM SCREENSHOTS

CHROMIUM is a program; an empty text is the one that playwright has installed.
"""

import http.server
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request

from playwright.sync_api import expect, sync_playwright

data = pathlib.Path(__file__).parent.parent / "data"
shardpack, chromium, screenshots = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2], pathlib.Path(sys.argv[3])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = {
    "step_ms": 2,
    "answers": [
        {"when": "Weather in Rome?", "text": CALL},
        {"when": "sunny, 21 degrees", "text": "It is sunny in Rome."},
        {"when": "fails", "text": "half an ans", "fail": "rank 1 is gone", "retryable": True},
        {"text": "Hello <b>there</b>, reader. " * 20},
    ],
}
TOOLS = json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])


def converse(page, name):
    text = page.get_by_label("Message")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("m")
    text.fill("Hi")
    text.press("Enter")
    answer = page.locator(".turn.assistant").last
    expect(answer).to_contain_text("Hello <b>there</b>, reader.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#mine")).to_contain_text("tok/s")
    page.get_by_text("Settings").click()
    page.locator("#tools").fill(TOOLS)
    page.get_by_text("Settings").click()
    text.fill("Weather in Rome?")
    text.press("Enter")
    call = page.locator(".turn.call")
    expect(call).to_contain_text("get_weather")
    expect(call).to_contain_text('"Rome"')
    page.get_by_label("Result").fill("sunny, 21 degrees")
    page.get_by_role("button", name="Return").click()
    expect(page.locator(".turn.assistant").last).to_have_text("It is sunny in Rome.")
    text.fill("This fails")
    text.press("Enter")
    expect(page.locator(".turn.error")).to_have_text("rank 1 is gone")
    page.screenshot(path=screenshots / f"{name}.png")
    overflow = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not overflow, f"{name}: the page is wider than the screen"


def shows_ranks(browser, set_):
    """Memory, step and sum of every rank that computes, on a phone."""
    serve = [shardpack, "serve", set_, "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True)
    try:
        page = browser.new_page(viewport={"width": 375, "height": 720})
        page.goto(json.loads(process.stdout.readline())["url"].removesuffix("v1"))
        page.get_by_label("Message").fill("John 3:16")
        page.get_by_label("Message").press("Enter")
        expect(page.locator("#nodes dd")).to_have_count(2)
        for rank in range(2):
            for fact in ["iB", "step", "sum"]:
                expect(page.locator("#nodes dd").nth(rank)).to_contain_text(fact, timeout=20000)
        page.screenshot(path=screenshots / "ranks.png")
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    finally:
        process.terminate()
        process.wait(30)


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
        serve = [shardpack, "serve", set_, "--script", script, "--name", "m"]
        serve += ["--listen", "127.0.0.1:0", "--json"]
        process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(process.stdout.readline())["url"].removesuffix("v1")
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium or None, args=["--no-sandbox"])
                sizes = {"desk": (1200, 800), "phone": (375, 720)}
                for name, (width, height) in sizes.items():
                    page = browser.new_page(viewport={"width": width, "height": height})
                    faults = []
                    page.on("pageerror", lambda error: faults.append(str(error)))
                    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
                    page.goto(url)
                    converse(page, name)
                    assert not faults, faults
                shows_ranks(browser, set_)
                browser.close()
                strangers_are_kept_out(playwright, url)
        finally:
            process.terminate()
            process.wait(30)
    print("page: talks, calls and fails as it should, on a desk and on a phone")


main()
