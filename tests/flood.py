"""The server's door under a flood: silent connections, heads and bodies that trickle, large bodies.

    flood.py SHARDPACK [--silent N] [--heads N] [--bodies N] [--seconds S] [--quick]

For TLS and plain, from one address and from 60, with 256 descriptors and with 65,536 (or the most allowed): honest requests,
`/health`, and a rank that is killed meanwhile. Then 100 bodies of 8 MB at once, and a prompt of 100 MB.
Prints what it measures and fails where the bounds do not hold: an honest request within a second more
than on a quiet server, and half of those to `/health` within 100 ms and 99 of 100 within `--health`
milliseconds, less what the probe itself waited for a processor. `--quick` runs one of the eight. Only
the standard library; Linux, for its loopback addresses.
"""

import argparse
import json
import os
import pathlib
import random
import resource
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

data = pathlib.Path(__file__).parent / "data"
MORE_SECONDS = 1.0
HEALTH_SECONDS = 0.1
BODIES_BYTES = 200 << 20
REFUSED_SECONDS = 0.05
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})


def ask(port, tls, path, body=None):
    """Status and seconds of a request on a connection of its own."""
    begun = time.perf_counter()
    method, text = ("POST", body) if body else ("GET", "")
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    with tls.wrap_socket(connection) if tls else connection as connection:
        connection.sendall((head + text).encode())
        answer = connection.recv(65536)
        # The end belongs to the answer.
        while connection.recv(65536):
            pass
    if not answer:
        raise ConnectionError("closed without an answer")
    return int(answer.split()[1]), time.perf_counter() - begun


def client_tls():
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls


def probe(port, tls):
    """Asks honestly until there is a line on standard input; prints what was answered within which time."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    print("begun", flush=True)
    answers = {"chat": [], "health": [], "delays": []}
    while not over.is_set():
        for name, path, body in [("chat", "/v1/chat/completions", CHAT), ("health", "/health", None)]:
            try:
                answers[name].append(ask(port, tls, path, body))
            except OSError as error:
                answers[name].append((str(error), 0))
        begun = time.perf_counter()
        time.sleep(0.05)
        answers["delays"].append((200, time.perf_counter() - begun - 0.05))
    print(json.dumps(answers))


class Flood:
    """Connections that cost their sender nothing; those that the server closes come back after a second."""

    def __init__(self, port, addresses, kinds):
        self.port, self.addresses = port, addresses
        self.selector, self.open, self.again = selectors.DefaultSelector(), {}, []
        self.begun = set()
        self.over, self.closed, self.refused = False, 0, 0
        for kind, count in kinds.items():
            for _ in range(count):
                self.again.append((0.0, kind))
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def connect(self, kind):
        connection = socket.socket()
        connection.setblocking(False)
        if self.addresses > 1:
            connection.bind((f"127.0.1.{random.randrange(self.addresses) + 1}", 0))
        try:
            connection.connect(("127.0.0.1", self.port))
        except BlockingIOError:
            pass
        self.open[connection] = kind
        self.selector.register(connection, selectors.EVENT_READ)

    def run(self):
        trickle = time.perf_counter()
        while not self.over:
            now = time.perf_counter()
            due, self.again = [it for it in self.again if it[0] <= now], [it for it in self.again if it[0] > now]
            # Some at a time: the sender's own backlog is not what is tried.
            self.again += due[200:]
            for _, kind in due[:200]:
                try:
                    self.connect(kind)
                except OSError:
                    self.refused += 1
                    self.again.append((now + 1, kind))
            for key, _ in self.selector.select(0.02):
                self.received(key.fileobj, now)
            if now - trickle > 1:
                trickle = now
                for connection, kind in list(self.open.items()):
                    self.trickle(connection, kind)
        for connection in self.open:
            connection.close()

    def received(self, connection, now):
        try:
            if connection.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.closed += 1
        self.begun.discard(connection)
        self.selector.unregister(connection)
        self.again.append((now + 1, self.open.pop(connection)))
        connection.close()

    def trickle(self, connection, kind):
        first = {"heads": b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ", "bodies": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n{"}
        if kind == "silent":
            return
        try:
            if kind in first and connection not in self.begun:
                self.begun.add(connection)
                connection.send(first[kind])
            else:
                connection.send(b" ")
        except OSError:
            pass

    def end(self):
        self.over = True
        self.thread.join()


def ranks(pid):
    found = []
    for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"rank" in command:
            found.append(int(child))
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if int(child) not in found and b"rank" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                found.append(int(child))
    return found


def start(set_, more, descriptors):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    serve = [shardpack, "serve", set_, "--listen", "127.0.0.1:0", "--json", *more]
    process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True, preexec_fn=limit)
    return process, int(json.loads(process.stdout.readline())["url"].removesuffix("/v1").rpartition(":")[2])


def flooded(set_, pem, tls, addresses, descriptors, arguments):
    more = ["--tls-cert", pem, "--tls-key", pem] if tls else []
    process, port = start(set_, more, descriptors)
    client = client_tls() if tls else None
    faults = []
    try:
        quiet = max(ask(port, client, "/v1/chat/completions", CHAT)[1] for _ in range(10))
        flood = Flood(port, addresses, {"silent": arguments.silent, "heads": arguments.heads, "bodies": arguments.bodies})
        prober = subprocess.Popen([sys.executable, __file__, "--probe", str(port), "tls" if tls else "plain"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        prober.stdout.readline()
        time.sleep(arguments.seconds)
        answers = json.loads(prober.communicate(b"\n", timeout=90)[0])
        # A rank is killed in the midst of it, and requests wait for its successor.
        os.kill(ranks(process.pid)[0], signal.SIGKILL)
        killed = time.perf_counter()
        status = None
        while status != 200 and time.perf_counter() - killed < 30:
            status, _ = ask(port, client, "/v1/chat/completions", CHAT)
        back = time.perf_counter() - killed
        flood.end()
        if status != 200:
            faults.append(f"after its rank was killed a request is answered with {status}")
    finally:
        process.terminate()
        process.wait(60)
    p50, p99 = {}, {}
    for name, found in answers.items():
        lost = [status for status, _ in found if status != 200]
        if lost:
            faults.append(f"{len(lost)} of {len(found)} {name} requests are answered with {lost[:3]}")
        seconds = sorted(seconds for _, seconds in found)
        p50[name], p99[name] = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
    if p99["chat"] > quiet + MORE_SECONDS:
        faults.append("an honest request waits too long")
    if p50["health"] > HEALTH_SECONDS or p99["health"] - p99["delays"] > arguments.health / 1000:
        faults.append("/health waits too long")
    name = f"{'TLS' if tls else 'plain'}, {addresses} address{'es' if addresses > 1 else ''}, {descriptors} descriptors"
    times = lambda of: f"p50 {p50[of] * 1000:.0f} ms, p99 {p99[of] * 1000:.0f} ms"
    print(f"flood: {name}: {len(answers['chat'])} chats {times('chat')} (quiet {quiet * 1000:.0f}), /health {times('health')}, the probe's own wait {times('delays')}; {flood.closed} connections closed; a killed rank back after {back:.1f} s", flush=True)
    return [f"{name}: {fault}" for fault in faults]


def memory(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def large_bodies(set_):
    """100 bodies of 8 MB at once, finished at once, and one of 100 MB."""
    process, port = start(set_, [], 4096)
    try:
        for _ in range(5):
            ask(port, None, "/v1/chat/completions", CHAT)
        idle, highest, over = memory(process.pid), 0, threading.Event()

        def watch():
            nonlocal highest
            while not over.is_set():
                highest = max(highest, memory(process.pid))
                time.sleep(0.005)

        watching = threading.Thread(target=watch)
        watching.start()
        text = json.dumps({"prompt": "lorem ipsum " * ((8 << 20) // 12 - 20), "max_tokens": 1})
        statuses = []

        def send():
            try:
                statuses.append(ask(port, None, "/v1/completions", text)[0])
            except OSError as error:
                statuses.append(str(error))

        threads = [threading.Thread(target=send) for _ in range(100)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        over.set()
        watching.join()
        begun = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000000\r\n\r\n" + b'{"prompt": "' + b"a" * 60000)
            answer = connection.recv(4096)
        refused = time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait(60)
    kinds = {status: statuses.count(status) for status in set(statuses)}
    print(f"flood: 100 bodies of 8 MB in {seconds:.1f} s ({kinds}): {(highest - idle) / 2**20:.0f} MiB above {idle / 2**20:.0f} idle; 100 MB refused in {refused * 1000:.1f} ms", flush=True)
    faults = []
    if highest - idle > BODIES_BYTES:
        faults.append("large bodies take too much memory")
    if not answer.startswith(b"HTTP/1.1 413") or refused > REFUSED_SECONDS:
        faults.append(f"100 MB: {answer[:40]} after {refused:.3f} s")
    if set(kinds) - {400, 503}:
        faults.append(f"large bodies are answered with {kinds}")
    return faults


def main():
    global shardpack
    parser = argparse.ArgumentParser()
    parser.add_argument("shardpack")
    for name, count in [("silent", 3000), ("heads", 500), ("bodies", 200), ("seconds", 8), ("health", 100)]:
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    shardpack = pathlib.Path(arguments.shardpack).absolute()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        set_, pem = folder / "set", folder / "both.pem"
        subprocess.run([shardpack, "convert", data / "kjv-4m", "--output", set_, "--nodes", "2"], check=True, capture_output=True)
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost", "-days", "2", "-keyout", pem, "-out", folder / "cert.pem"]
        subprocess.run(make, check=True, capture_output=True)
        pem.write_text(pem.read_text() + (folder / "cert.pem").read_text())
        for descriptors in (256, min(most, 65536)):
            for tls in (False, True):
                for addresses in (1, 60):
                    if not arguments.quick or (descriptors, tls, addresses) == (256, True, 60):
                        faults += flooded(set_, pem, tls, addresses, descriptors, arguments)
        faults += large_bodies(set_)
    for fault in faults:
        print("flood: FAILED:", fault)
    sys.exit(bool(faults))


if sys.argv[1] == "--probe":
    sys.exit(probe(int(sys.argv[2]), client_tls() if sys.argv[3] == "tls" else None))
main()
