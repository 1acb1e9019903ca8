"""Requests whose clients leave at any moment: nothing is left behind.

    leaks.py SHARDPACK [REQUESTS]

A model on two ranks answers REQUESTS requests (default 2,000, after 2,000 others), of all dialects, streamed and whole, of
which three in four are left by their client: before the head is whole, within the body, before the
answer, within it. Afterwards nothing runs or waits, no descriptor is left, a prompt finds all pages of the KV cache free,
and the memory of every process is within five percent of what it was before.
Only the standard library; Linux.
"""

import asyncio
import gc
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

data = pathlib.Path(__file__).parent.parent / "data"
AT_ONCE = 32
ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}),
    ("/v1/completions", {"prompt": "In the beginning", "max_tokens": 24}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 24}),
    ("/v1/responses", {"input": "In the beginning", "max_output_tokens": 24, "store": False}),
    ("/api/chat", {"messages": [{"role": "user", "content": "In the beginning"}], "options": {"num_predict": 24}}),
    ("/tokenize", {"prompt": "In the beginning God created the heaven and the earth."}),
]


async def one(port, chance, counts):
    path, body = chance.choice(ROUTES)
    prompt = f"In the beginning {chance.randrange(1000)} " + "and God said " * chance.randrange(20)
    body = json.dumps({**body, "stream": chance.random() < 0.5}).replace("In the beginning", prompt)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    whole = (head + body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    leave = chance.random()
    try:
        if leave < 0.1:
            # Within the head or the body.
            writer.write(whole[: chance.randrange(1, len(whole))])
            await writer.drain()
            counts["unasked"] += 1
            return
        writer.write(whole)
        await writer.drain()
        if leave < 0.75:
            # Before the answer, or within it.
            try:
                await asyncio.wait_for(reader.read(chance.randrange(1, 3000)), chance.random() * 0.2)
            except TimeoutError:
                pass
            counts["left"] += 1
            return
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        status = int(head.split()[1])
        assert status in (200, 503), head
        counts["answered" if status == 200 else "sent away"] += 1
        # The connection is kept; the answer's first part is enough to know that there is one.
        await asyncio.wait_for(reader.read(65536), 60)
    finally:
        writer.transport.abort()


async def many(port, count, chance, counts):
    left = iter(range(count))

    async def worker():
        for _ in left:
            await one(port, chance, counts)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def get(port, path, method="GET", body=""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def post(port, path, body):
    return await get(port, path, "POST", json.dumps(body))


async def idle(port):
    until = time.perf_counter() + 30
    while time.perf_counter() < until:
        requests = json.loads(await get(port, "/stats"))["requests"]
        if requests["running"] == 0 and requests["waiting"] == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"requests are left behind: {requests}")


def tree(pid):
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def role(pid):
    """What a process is: the name of its command."""
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return next((word for word in words[1:] if not word.startswith("-")), "server")


def facts(pid):
    """Descriptors, threads and resident KiB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    field = lambda name: next(int(line.split()[1]) for line in status if line.startswith(name + ":"))
    descriptors = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    return descriptors, field("Threads"), field("VmRSS")


async def settled(port, pids):
    await idle(port)
    # Kept connections end with a moment's delay, and so do their threads.
    until, before = time.perf_counter() + 20, None
    while time.perf_counter() < until:
        now = [facts(pid)[:2] for pid in pids]
        if now == before:
            break
        before = now
        await asyncio.sleep(1)
    return [facts(pid) for pid in pids]


async def longest(port):
    """A prompt that needs every page of the KV cache: whoever left has given back what it had."""
    context = json.loads(await get(port, "/stats"))["context"]
    text = "and God said unto them " * context
    tokens = json.loads(await post(port, "/tokenize", {"prompt": text}))["tokens"][: context - 8]
    answer = json.loads(await post(port, "/v1/completions", {"prompt": tokens, "max_tokens": 4}))
    assert answer["usage"]["prompt_tokens"] == context - 8, answer
    return context


async def main(port, pid, count):
    chance = random.Random(7)
    counts = {"answered": 0, "left": 0, "unasked": 0, "sent away": 0}
    await many(port, 2000, chance, counts)
    # The prefix cache holds as much as it ever will, and each sandbox, of which several are started when
    # as many requests want one, has read the longest prompt.
    await asyncio.gather(*(longest(port) for _ in range(8)))
    pids = tree(pid)
    first = await settled(port, pids)
    begun = time.perf_counter()
    await many(port, count, chance, counts)
    seconds = time.perf_counter() - begun
    gc.collect()
    context = await longest(port)
    last = await settled(port, pids)
    found = tree(pid)
    assert found == pids, f"a process is left behind, or was replaced: {pids} then {found}"
    roles = [role(pid) for pid in pids]
    print(f"leaks: {count} requests in {seconds:.0f} s: {counts}; then a prompt of the whole context of {context} tokens")
    for name, before, after in zip(roles, first, last):
        growth = after[2] / before[2] - 1
        print(f"leaks: {name}: {before[0]} then {after[0]} descriptors, {before[1]} then {after[1]} threads, {before[2] / 1024:.1f} then {after[2] / 1024:.1f} MiB ({growth:+.1%})")
        assert after[0] <= before[0] + 2, "descriptors are left behind"
        assert after[1] <= before[1] + 4, "threads are left behind"
        # Any sandbox may have had the longest prompt last, and has its memory: they are compared with
        # the largest of them.
        most = max(it[2] for other, it in zip(roles, first) if other == name) if name == "text-worker" else before[2]
        assert after[2] < 1.05 * most or after[2] - most < 4096, f"memory is left behind: {most / 1024:.1f} MiB at most before"


shardpack = pathlib.Path(sys.argv[1]).absolute()
count = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
with tempfile.TemporaryDirectory() as name:
    set_ = pathlib.Path(name) / "set"
    convert = [shardpack, "convert", data / "kjv-4m", "--output", set_, "--nodes", "2"]
    subprocess.run([*map(str, convert)], check=True, capture_output=True)
    serve = [shardpack, "serve", set_, "--listen", "127.0.0.1:0", "--json", "--kv-memory", "8m"]
    process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(json.loads(process.stdout.readline())["url"].removesuffix("/v1").rpartition(":")[2])
        asyncio.run(main(port, process.pid, count))
    finally:
        process.terminate()
        assert process.wait(60) == 0
