"""Looks at the built site in a headless Chromium, every page at the width of a desk and of a telephone: nothing may be
cut off or hang out of the page, every picture must be there, and searching for "timeout" must find Troubleshooting.

    python scripts/site_check.py docs/_build/html [--widths 1280,390] [--seconds 240] [--no-install]

Prints a line a finding and exits with 1 if there is any, with 2 where there is no browser; apt brings one (124 MB, less
than a minute) where it may, as root. What may scroll sideways inside the page (tables, output of programs) does."""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio")
SEARCHED, FOUND = "timeout", "Troubleshooting"
HARNESS = Path(__file__).with_suffix(".js")
PAGE = "/__look.html"


def browser(install: bool) -> str | None:
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


class _Site(http.server.SimpleHTTPRequestHandler):
    """The site, a page that looks at all others, and a place for what it found."""

    found: queue.Queue
    job: dict

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path != PAGE:
            return super().do_GET()
        text = f"<!doctype html><body></body><script>const job = {json.dumps(self.job)};{HARNESS.read_text()}</script>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        return self.wfile.write(text.encode())

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


def look(site: Path, program: str, widths: list[int], seconds: float) -> list[str]:
    """Findings, one sentence each. TimeoutError when the browser does not answer."""
    pages = sorted(
        str(p.relative_to(site)) for p in site.rglob("*.html") if p.name not in ("genindex.html", "search.html")
    )
    found: queue.Queue = queue.Queue()
    job = {"pages": pages, "widths": widths, "search": SEARCHED if (site / "search.html").is_file() else None}
    handler = functools.partial(type("Site", (_Site,), {"found": found, "job": job}), directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={max(widths) + 40},1000"]
        address = f"http://127.0.0.1:{server.server_address[1]}{PAGE}"
        chromium = subprocess.Popen([*command, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            answer = found.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"{program} did not look at {len(pages)} pages within {seconds:.0f} s") from None
        finally:
            chromium.kill()
            chromium.wait()
            server.shutdown()
    seen = answer["seen"]
    if seen != len(pages) * len(widths):
        raise TimeoutError(f"{program} looked at {seen} of {len(pages) * len(widths)} pages")
    findings = answer["findings"]
    if job["search"] and not any(FOUND in title for title in answer["results"]):
        findings.append(f"search.html: {SEARCHED!r} does not find {FOUND}, but {answer['results'][:5]}")
    return findings


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--widths", default="1280,390", help="pixels, separated by commas [%(default)s]")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all pages [%(default)s]")
    parser.add_argument("--no-install", action="store_true", help="do not ask apt for a browser")
    args = parser.parse_args(argv)
    if not (args.site / "index.html").is_file():
        parser.error(f"{args.site} has no index.html: build it with make docs")
    program = browser(not args.no_install)
    if program is None:
        print("site_check: no Chromium here, and none to be had", file=sys.stderr)
        return 2
    findings = look(args.site, program, [int(w) for w in args.widths.split(",")], args.seconds)
    for line in findings:
        print(line)
    print(f"site_check: {args.site} at {args.widths} px, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
