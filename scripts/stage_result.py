"""What a stage of run_tests.py did, and how it is read from a JUnit report."""

import re
import xml.etree.ElementTree
from dataclasses import dataclass


@dataclass
class Result:
    """What a stage did; `counts` is (passed, failed, skipped), None where the stage has no tests to count."""

    status: str  # "passed", "FAILED" or "skipped"
    counts: tuple[int, int, int] | None = None
    note: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0  # what its commands took of all cores, without what was built ahead for it


def result_of(status, report, note):
    """A Result from an exit status and a JUnit report."""
    counts = (0, 0, 0)
    if report.is_file():
        root = xml.etree.ElementTree.parse(report).getroot()
        counts = tuple(map(sum, zip(*map(counts_of, root.iter("testcase")), strict=True))) or counts
    return Result("FAILED" if status else "passed", counts, note)


def counts_of(case):
    """(passed, failed, skipped) of a JUnit case; a C++ program that says how many it ran counts so."""
    if case.find("skipped") is not None:
        return 0, 0, 1
    said = re.findall(r"^(\d+) passed, (\d+) failed", case.findtext("system-out") or "", re.M)
    failed = any(case.find(tag) is not None for tag in ("failure", "error"))
    if said:
        passed, bad = map(int, said[-1])
        return passed, max(bad, int(failed)), 0
    return int(not failed), int(failed), 0
