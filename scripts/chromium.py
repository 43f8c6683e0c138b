"""A headless Chromium for the checks: one page with a script of ours is opened beside a folder of files, and what the
script posts is the answer. Nothing but this machine's loopback is involved."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio")
PAGE = "/__look.html"


def find(install: bool) -> str | None:
    """Path of a Chromium; apt installs one where it may. None without."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found or not install or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return found
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 120, "check": False}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    for command in (["apt-get", "update", "-qq"], packages):
        try:
            subprocess.run(command, env=environment, **quiet)
        except subprocess.TimeoutExpired:
            break
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class _Folder(http.server.SimpleHTTPRequestHandler):
    """The files, a page with the script, and a place for its answer."""

    answers: queue.Queue
    page: bytes

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path != PAGE:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        return self.wfile.write(self.page)

    def do_POST(self):
        self.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


def ask(program: str, folder: Path, script: Path, job: Any, seconds: float, width: int = 1280) -> Any | None:
    """What `script` posts, as JSON, from a page of `program` that serves `folder`; None behind `seconds`. The script
    finds `job` as a constant of that name."""
    answers: queue.Queue = queue.Queue()
    given = json.dumps(job).replace("</", "<\\/")  # a text with </script> would end the script
    page = f"<!doctype html><body></body><script>const job = {given};{script.read_text()}</script>".encode()
    handler = functools.partial(type("Folder", (_Folder,), {"answers": answers, "page": page}), directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},1000"]
        address = f"http://127.0.0.1:{server.server_address[1]}{PAGE}"
        running = subprocess.Popen([*command, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return answers.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            running.kill()
            running.wait()
            server.shutdown()
