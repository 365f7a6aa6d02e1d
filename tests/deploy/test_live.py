#!/usr/bin/env python3
"""A real Prometheus scrapes a dsad under load: every query of the dashboard returns data, and alerts fire when its worker is
stopped, when it drains, when it is gone and when its device is lost.

usage: test_live.py --dsad DSAD-HOOKED --dsactl DSACTL     dsad-hooked: tests/e2e/hooks.h
"""
import argparse
import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import kit
import test_monitoring
from kit import Skip, tool

arguments = None
# Series that begin with the first event of their kind, which nothing here causes.
MAY_BE_EMPTY = ("dsad_device_errors_total",)
PATIENCE = 90  # seconds until a thing that must happen counts as not happening


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, condition):
    """Polls other processes, which have no event to wait for; fails when it takes PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        pause.wait(0.2)


def fetch(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return answer.read().decode()


class Hooks:
    """The words of the file that dsad-hooked reads; tests/e2e/hooks.h has their order."""
    WORDS = {"gate": 0, "n_entered": 1, "launch_fail": 4}

    def __init__(self, path):
        with open(path, "w+b") as file:
            file.truncate(4096)
            self.map = mmap.mmap(file.fileno(), 4096)

    def __getitem__(self, name):
        return int.from_bytes(self.map[self.WORDS[name] * 8:self.WORDS[name] * 8 + 8], "little", signed=True)

    def __setitem__(self, name, value):
        self.map[self.WORDS[name] * 8:self.WORDS[name] * 8 + 8] = value.to_bytes(8, "little", signed=True)


class Live:
    """A dsad with TLS and metrics, and a Prometheus that scrapes it every second."""

    def __init__(self, **flags):
        self.work = tempfile.mkdtemp(prefix="dsad-live-")
        self.children = []
        self.http, self.tcp, self.prometheus_port = free_port(), free_port(), free_port()
        self.target = f"unix:{self.work}/dsad.sock"
        self.hooks = Hooks(os.path.join(self.work, "hooks"))
        self.flags = {"listen": self.target, "http": f"127.0.0.1:{self.http}", "layers": "2", "pool-bytes": "64MiB",
                      "cpu-threads": "1", "inline-flops": "0", "log-level": "warn", **flags}

    def __enter__(self):
        try:
            self.make_certificate()
            self.start_dsad()
            self.start_prometheus()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.hooks["gate"] = 0
        for child in reversed(self.children):
            if child.poll() is None:
                child.kill()
            child.wait()
        shutil.rmtree(self.work)

    def start(self, *command, **options):
        child = subprocess.Popen(command, **options)
        self.children.append(child)
        return child

    def make_certificate(self):
        cert, key = os.path.join(self.work, "tls.crt"), os.path.join(self.work, "tls.key")
        result = kit.run(tool("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                         "-days", "30", "-subj", "/CN=localhost", "-keyout", key, "-out", cert)
        assert result.returncode == 0, result.stdout
        self.flags.update({"tcp": f"127.0.0.1:{self.tcp}", "tls-cert": cert, "tls-key": key})

    def start_dsad(self):
        words = [word for name, value in self.flags.items() for word in (f"--{name}", value)]
        self.log = os.path.join(self.work, "log")
        with open(self.log, "wb") as log:
            self.dsad = self.start(arguments.dsad, *words, stdout=log, stderr=log,
                                   env={"DSA_TEST_HOOKS": os.path.join(self.work, "hooks")})
        until("dsad answers /readyz", self.is_ready)

    def is_ready(self):
        assert self.dsad.poll() is None, f"dsad ended with {self.dsad.returncode}: {open(self.log).read()}"
        try:
            fetch(f"http://127.0.0.1:{self.http}/readyz")
            return True
        except OSError:
            return False

    def start_prometheus(self):
        groups = test_monitoring.groups()
        for group in groups:  # the same alerts, without their patience
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "2s"
        with open(os.path.join(self.work, "rules.yaml"), "w", encoding="utf-8") as file:
            kit.yaml.safe_dump({"groups": groups}, file)
        settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yaml"],
                    "scrape_configs": [{"job_name": "dsad", "static_configs": [{"targets": [f"127.0.0.1:{self.http}"]}]}]}
        with open(os.path.join(self.work, "prometheus.yml"), "w", encoding="utf-8") as file:
            kit.yaml.safe_dump(settings, file)
        self.start(tool("prometheus"), f"--config.file={self.work}/prometheus.yml", f"--storage.tsdb.path={self.work}/data",
                   f"--web.listen-address=127.0.0.1:{self.prometheus_port}", "--log.level=error", stdout=subprocess.DEVNULL)
        until("Prometheus has scraped dsad", lambda: self.has('up{job="dsad"} == 1'))

    def query(self, expression):
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            answer = json.loads(fetch(url))
        except urllib.error.HTTPError as error:  # 503 while it starts; anything else names the query
            assert error.code == 503, f"{expression}: {error.read().decode()}"
            return []
        except OSError:
            return []
        return answer["data"]["result"]

    def has(self, expression):
        return bool(self.query(expression))

    def fires(self, alert):
        until(f"{alert} fires", lambda: self.has(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))

    def is_silent(self, alert):
        return not self.has(f'ALERTS{{alertname="{alert}", alertstate="firing"}}')

    def load(self, *words):
        return self.start(arguments.dsactl, "load", "--target", self.target, "--context", "256", "--topk", "64", *words,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def needs_metrics():
    if not arguments.dsad or not os.access(arguments.dsad, os.X_OK):
        raise Skip("no dsad was built")
    text = subprocess.run([arguments.dsad, "--help"], capture_output=True, text=True, check=True).stdout
    if not re.search(r"^ +--http ", text, re.M):
        raise Skip("this dsad has no --http")
    tool("prometheus")


def every_query_of_the_dashboard_returns_data():
    needs_metrics()
    queries = [(title, query.replace("[5m]", "[1m]")) for title, query in test_monitoring.dashboard_queries()]
    # Two sessions at a time: the third is refused, which the panel of refusals shows.
    with Live(**{"max-sessions": "2"}) as live:
        clients = [live.load("--seconds", str(PATIENCE * 4)) for _ in range(3)]
        done = set()

        def all_have_data():
            done.update(query for _, query in queries if query not in done and live.has(query))
            return all(query in done or any(name in query for name in MAY_BE_EMPTY) for _, query in queries)
        try:
            until("every query returns data", all_have_data)
        except AssertionError:
            empty = [f"{title}: {query}" for title, query in queries if query not in done]
            raise AssertionError("no data for\n    " + "\n    ".join(empty)) from None
        refused = [client for client in clients if client.poll() not in (None, 0)]
        assert refused, "no client was refused"


def a_stopped_worker_fires_an_alert():
    needs_metrics()
    with Live(**{"watchdog": "500ms"}) as live:
        assert live.is_silent("DsadWorkerStuck") and live.is_silent("DsadNotReady")
        live.hooks["gate"] = 1
        client = live.load("--requests", "1")
        until("a launch waits", lambda: live.hooks["n_entered"] > 0)
        live.fires("DsadWorkerStuck")
        live.fires("DsadNotReady")
        assert live.has("dsad_live == 1"), "a stuck worker must not cost the sessions"
        live.hooks["gate"] = 0
        until("DsadWorkerStuck ends", lambda: live.is_silent("DsadWorkerStuck"))
        until("DsadNotReady ends", lambda: live.is_silent("DsadNotReady"))
        assert client.wait(PATIENCE) == 0, "the request that waited was lost"


def a_drain_fires_an_alert_and_the_end_another():
    needs_metrics()
    with Live(**{"drain-grace": f"{PATIENCE * 2}s", "watchdog": "3600s"}) as live:
        live.hooks["gate"] = 2  # attends wait; what comes before them does not
        client = live.load("--requests", "1")
        until("a launch waits", lambda: live.hooks["n_entered"] > 0)
        live.dsad.send_signal(signal.SIGTERM)
        live.fires("DsadDraining")
        assert live.is_silent("DsadNotReady"), "not ready is what draining means"
        live.hooks["gate"] = 0
        assert live.dsad.wait(PATIENCE) == 0
        assert client.wait(PATIENCE) == 0, "an accepted request was lost"
        live.fires("DsadDown")


def a_lost_device_fires_an_alert():
    needs_metrics()
    with Live() as live:
        live.hooks["launch_fail"] = -7  # DSK_E_DEVICE
        live.load("--requests", "1").wait(PATIENCE)
        live.fires("DsadNotLive")
        live.fires("DsadDeviceErrors")


TESTS = [every_query_of_the_dashboard_returns_data, a_stopped_worker_fires_an_alert, a_drain_fires_an_alert_and_the_end_another,
         a_lost_device_fires_an_alert]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dsad")
    parser.add_argument("--dsactl")
    parser.add_argument("-k", default="", help="only tests whose name has this in it")
    arguments = parser.parse_args()
    kit.main([test for test in TESTS if arguments.k in test.__name__])
