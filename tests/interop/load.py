"""A crowd at the door: 500 streams against a bounded queue, clients that leave, and what a token costs.

    load.py SHARDPACK [STREAMS [MILLISECONDS]]

Every stream ends in an answer or is told when to come back; nothing is left behind; /health answers
meanwhile, 99 of 100 times within MILLISECONDS. Only the standard library, so that the client costs little.
"""

import asyncio
import json
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

data = pathlib.Path(__file__).parent.parent / "data"
TOKENS = 400
SECONDS = 5
SCRIPT = {"step_ms": 0, "answers": [{"text": "word ", "repeat": TOKENS}]}


async def request(port, method, path, body=None, leave_after=None):
    """Status, headers and body; nothing of the body when leaving after so many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body) if body else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    if leave_after is not None:
        await reader.readexactly(leave_after)
        writer.close()
        return None
    answer = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body


def chat(**members):
    return {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": TOKENS, **members}


async def stats(port):
    return json.loads((await request(port, "GET", "/stats"))[2])["requests"]


async def is_idle(port):
    for _ in range(200):
        found = await stats(port)
        if found["running"] == 0 and found["waiting"] == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"requests are left behind: {found}")


async def client(port, until, counts):
    """Asks until the time is over; comes back soon when it is sent away."""
    while time.perf_counter() < until:
        status, headers, body = await request(port, "POST", "/v1/chat/completions", chat())
        if status == 200:
            assert b"data: [DONE]" in body, body[-80:]
            counts["answered"] += 1
        else:
            assert status in (429, 503) and "retry-after" in headers, (status, headers)
            counts["sent away"] += 1
            await asyncio.sleep(0.05)


async def crowd(port, queue):
    # A process of its own, since this one is busy reading.
    prober = subprocess.Popen([sys.executable, __file__, "--probe", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    prober.stdout.readline()
    counts = {"answered": 0, "sent away": 0}
    until = time.perf_counter() + SECONDS
    await asyncio.gather(*(client(port, until, counts) for _ in range(streams)))
    latencies, delays = (sorted(list) for list in json.loads(prober.communicate(b"\n")[0]))
    assert counts["answered"] >= min(queue, streams), counts
    await is_idle(port)
    p99 = lambda sorted_: sorted_[int(len(sorted_) * 0.99)] * 1000 if sorted_ else 0
    print(f"load: {streams} streams for {SECONDS} s: {counts['answered']} answered, {counts['sent away']} sent away; /health p99 {p99(latencies):.1f} ms of {len(latencies)}, of which the probe's own wait for a processor p99 {p99(delays):.1f} ms")
    if len(sys.argv) > 3:
        assert p99(latencies) < float(sys.argv[3]), "/health is too slow"


async def leavers(port):
    await asyncio.gather(*(request(port, "POST", "/v1/chat/completions", chat(), leave_after=300) for _ in range(64)))
    await is_idle(port)
    print("load: 64 clients that left have freed their places")


async def overhead(port, pid):
    def cpu():
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    before, begun = cpu(), time.perf_counter()
    await asyncio.gather(*(request(port, "POST", "/v1/chat/completions", chat()) for _ in range(32)))
    seconds, used = time.perf_counter() - begun, cpu() - before
    tokens = 32 * TOKENS
    print(f"load: 32 streams, {tokens} tokens: {used / tokens * 1e6:.1f} µs of processor and {seconds / tokens * 1e6:.1f} µs of time a token")


async def main(port, queue, pid):
    await crowd(port, queue)
    await leavers(port)
    if pathlib.Path("/proc").exists():
        await overhead(port, pid)


def probe(port):
    """Asks /health until there is a line on standard input; prints the seconds of each answer, and
    by how much this process itself was woken too late."""
    over, latencies, delays = threading.Event(), [], []
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    question = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    print("begun", flush=True)
    while not over.is_set():
        begun = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(question)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        latencies.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        time.sleep(0.005)
        delays.append(time.perf_counter() - begun - 0.005)
    print(json.dumps([latencies, delays]))


if sys.argv[1] == "--probe":
    sys.exit(probe(int(sys.argv[2])))
shardpack = pathlib.Path(sys.argv[1]).absolute()
streams = int(sys.argv[2]) if len(sys.argv) > 2 else 500
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    set_, script = folder / "set", folder / "script.json"
    convert = [shardpack, "convert", data / "kjv-4m", "--output", set_]
    subprocess.run([*map(str, convert)], check=True, capture_output=True)
    script.write_text(json.dumps(SCRIPT))
    queue = 128
    serve = [shardpack, "serve", set_, "--script", script, "--queue", queue]
    serve += ["--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(json.loads(process.stdout.readline())["url"].removesuffix("/v1").rpartition(":")[2])
        asyncio.run(main(port, queue, process.pid))
    finally:
        process.terminate()
        assert process.wait(60) == 0
