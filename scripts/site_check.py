"""Looks at the built site in a headless Chromium, every page at the width of a desk and of a telephone: nothing may be
cut off or hang out of the page, every picture must be there, and searching for "timeout" must find Troubleshooting.

    python scripts/site_check.py docs/_build/html [--widths 1280,390] [--seconds 240] [--no-install]

Prints a line a finding and exits with 1 if there is any, with 2 where there is no browser; apt brings one (124 MB, less
than a minute) where it may, as root. What may scroll sideways inside the page (tables, output of programs) does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import chromium

SEARCHED, FOUND = "timeout", "Troubleshooting"
SCRIPT = Path(__file__).with_suffix(".js")


def look(site: Path, program: str, widths: list[int], seconds: float) -> list[str]:
    """Findings, one sentence each. TimeoutError when the browser does not answer."""
    pages = sorted(
        str(p.relative_to(site)) for p in site.rglob("*.html") if p.name not in ("genindex.html", "search.html")
    )
    job = {"pages": pages, "widths": widths, "search": SEARCHED if (site / "search.html").is_file() else None}
    answer = chromium.ask(program, site, SCRIPT, job, seconds, width=max(widths) + 40)
    if answer is None:
        raise TimeoutError(f"{program} did not look at {len(pages)} pages within {seconds:.0f} s")
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
    program = chromium.find(not args.no_install)
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
