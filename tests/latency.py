#!/usr/bin/env python3
"""Machines on a network whose every packet arrives a given time late, and how fast they decode on it.

    unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc \
        tests/latency.py PROGRAM SET FOLDER

SET is for two nodes. Prints a line of JSON: the time of a decode step by the delay, and how many messages wait for one
another in a step, by the ranks' counters.
"""

import fcntl, heapq, json, os, select, struct, subprocess, sys, threading, time, urllib.request

PROGRAM, SET, FOLDER = sys.argv[1:]
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
TOKENS = 60
ENV = {**os.environ, "SHARDPACK_CLUSTER": f"{FOLDER}/cluster"}


def sh(command):
    subprocess.run(command, shell=True, check=True, env=ENV)


class Switch(threading.Thread):
    """Carries packets between the TUN devices of the machines, late."""

    def __init__(self):
        super().__init__(daemon=True)
        self.delay, self.ports, self.late = 0.0, {}, []

    def add(self, device, address, pid):
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        enter = f"nsenter --target {pid} --net " if pid else ""
        if pid:
            sh(f"ip link set {device} netns {pid}")
        sh(f"{enter}ip addr add {address}/24 dev {device}")
        sh(f"{enter}ip link set {device} mtu 9000 up")
        self.ports[bytes(map(int, address.split(".")))] = port

    def run(self):
        ports, number = list(self.ports.values()), 0
        while True:
            now = time.perf_counter()
            while self.late and self.late[0][0] <= now:
                _, _, port, packet = heapq.heappop(self.late)
                try:
                    os.write(port, packet)
                except OSError:
                    pass
            wait = max(self.late[0][0] - time.perf_counter(), 0) if self.late else 1
            # The system wakes late; the rest is waited for here.
            readable = select.select(ports, [], [], max(wait - 0.0001, 0))[0]
            for port in readable:
                try:
                    packet = os.read(port, 65536)
                except OSError:
                    continue
                to = self.ports.get(packet[16:20])
                if to is not None:
                    number += 1
                    heapq.heappush(self.late, (time.perf_counter() + self.delay, number, to, packet))


def node(number):
    store = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    while os.readlink(f"/proc/{store.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.02)
    sh(f"nsenter --target {store.pid} --net ip link set lo up")
    return store.pid


def get(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        return json.load(answer)


def main():
    sh("ip link set lo up")
    sh(f"{PROGRAM} cluster init 2>/dev/null")
    switch, url = Switch(), "http://10.9.2.254:8097"
    pids = [node(number) for number in (1, 2)]
    switch.add("front", "10.9.2.254", None)
    for number, pid in enumerate(pids, 1):
        switch.add(f"port{number}", f"10.9.2.{number}", pid)
    switch.start()
    for number, pid in enumerate(pids, 1):
        log = f"{FOLDER}/node-{number}.log"
        sh(f"nsenter --target {pid} --net {PROGRAM} node --listen 10.9.2.{number}:7420 --threads 1 "
           f"--store {FOLDER}/store-{number} 2>{log} &")
        while "spj1_" not in (open(log).read() if os.path.exists(log) else ""):
            time.sleep(0.05)
        sh(f"grep spj1_ {log} | {PROGRAM} cluster add 10.9.2.{number}:7420 --name n{number} 2>/dev/null")
    sh(f"{PROGRAM} push {SET} --to n1,n2 2>/dev/null")
    sh(f"{PROGRAM} serve {SET} --nodes n1,n2 --collectives tcp --listen 10.9.2.254:8097 --insecure "
       f"2>{FOLDER}/serve.log &")
    while True:
        try:
            get(f"{url}/health")
            if "at http" in open(f"{FOLDER}/serve.log").read():
                break
        except OSError:
            pass
        time.sleep(0.1)
    # Without speculation each token is a step, and the prefix of the prompt is cached after the first.
    body = {"messages": [{"role": "user", "content": "John 3:16"}], "temperature": 0, "max_tokens": TOKENS,
            "ignore_eos": True, "stream": True}
    steps = {}
    for micros in (0, 300, 600, 1200):
        switch.delay = micros / 1e6
        took = []
        for _ in range(4):
            stamps = []
            data = json.dumps(body).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data), timeout=60) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        stamps.append(time.perf_counter())
            took.append((stamps[-1] - stamps[1]) / (len(stamps) - 2))
        steps[micros] = min(took) * 1e6
    time.sleep(2.5)
    rank = get(f"{url}/stats")["nodes"][0]
    messages = rank["collectives"] / rank["steps"]
    mean = sum(steps) / len(steps)
    slope = sum((d - mean) * us for d, us in steps.items()) / sum((d - mean) ** 2 for d in steps)
    print(json.dumps({"step_us": {d: round(us) for d, us in steps.items()},
                      "messages_per_step": round(messages, 2), "slope": round(slope, 2)}))
    # Two ranks send each other their parts at once: a collective costs one delay.
    if not 0.85 * messages <= slope <= 1.25 * messages:
        sys.exit(f"a step grows by {slope:.1f} delays, and has {messages:.1f} messages")


main()
