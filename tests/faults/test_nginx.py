"""Behind nginx as Debian ships it, with its default buffering, each token arrives when it is made.

Slow tests: they need nginx, and curl, the openai package and Chromium, and skip where one is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import NamedTuple
from urllib.parse import urlencode

import pytest

from tests.process import server

pytestmark = [pytest.mark.slow, pytest.mark.live]
NUM_TOKENS, STEP = 12, 0.25
BODY = {"prompt": "abcd", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
HERE = Path(__file__).resolve().parent

CONF = """
daemon off; pid {dir}/pid; error_log {dir}/error.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  default_type text/html;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {url}; }}
    location /reader.html {{ root {dir}; }}
    location /report {{ proxy_pass http://127.0.0.1:{report}; }}
  }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def reports() -> Iterator[tuple[int, Queue[str]]]:
    """A server that takes what a page reports: its port, and the reports."""
    found: Queue[str] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.put(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as taker:
        thread = threading.Thread(target=taker.serve_forever)
        thread.start()
        try:
            yield taker.server_port, found
        finally:
            taker.shutdown()
            thread.join()


class Front(NamedTuple):
    """nginx on the way to a server, ours or that of --live, of which less is known."""

    url: str
    reports: Queue[str]
    live: bool


@pytest.fixture
def front(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    """nginx in front of a server that takes `STEP` seconds a token and pings meanwhile."""
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    shutil.copy(HERE / "reader.html", tmp_path)
    if os.geteuid() == 0:  # its workers are another user then
        for path in (tmp_path, *tmp_path.parents[:2]):
            path.chmod(0o755)
    port = free_port()
    live = request.config.getoption("--live")
    with ExitStack() as stack:
        url = live or stack.enter_context(server(step=STEP, ping_interval=STEP / 3)).url
        report, found = stack.enter_context(reports())
        conf = tmp_path / "nginx.conf"
        conf.write_text(CONF.format(dir=tmp_path, port=port, url=url, report=report))
        child = subprocess.Popen([nginx, "-c", conf, "-e", tmp_path / "error.log"])
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    assert child.poll() is None, (tmp_path / "error.log").read_text()
            yield Front(f"http://127.0.0.1:{port}", found, live is not None)
        finally:
            child.terminate()
            child.wait()


def assert_as_made(times: list[float], text: str, front: Front) -> None:
    """Texts came one by one, about a step apart, not in one lump at the end."""
    if front.live:
        assert len(times) >= NUM_TOKENS / 2  # slow characters and an early end are the model's own
        assert times[len(times) // 2] - times[0] > (times[-1] - times[0]) / 10
        return
    assert text == ("abcd" * NUM_TOKENS)[:NUM_TOKENS]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert len(gaps) == NUM_TOKENS - 1
    assert sum(gap > STEP / 2 for gap in gaps) >= NUM_TOKENS - 3
    assert times[-1] - times[0] > STEP * (NUM_TOKENS - 2)


def test_curl(front: Front) -> None:
    times, text, pings = [], "", 0
    command = [
        "curl",
        "-sN",
        "-H",
        "content-type: application/json",
        f"{front.url}/v1/completions",
        "-d",
        json.dumps(BODY),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            pings += line.startswith(": ping")
            if line.startswith("data: {"):
                times.append(time.monotonic())
                text += json.loads(line[6:])["choices"][0]["text"]
    assert_as_made(times, text, front)
    assert front.live or pings >= NUM_TOKENS


def test_the_openai_sdk(front: Front) -> None:
    openai = pytest.importorskip("openai")
    times, text = [], ""
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        for chunk in client.completions.create(model=model, **BODY):
            times.append(time.monotonic())
            text += chunk.choices[0].text
    assert_as_made(times, text, front)


def test_a_page_in_chromium(front: Front, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    url = f"{front.url}/reader.html?{urlencode({**BODY, 'stream': 'true'})}"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}/profile"]
    child = subprocess.Popen([chromium, *flags, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        events = json.loads(front.reports.get(timeout=60))
    finally:
        child.terminate()
        child.wait()
    assert_as_made([at for at, _ in events], "".join(text for _, text in events), front)
