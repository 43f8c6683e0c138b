"""Executed instructions of the PTX against the machine code that ptxas makes of the same PTX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
# Compared like with like: the wait for a flag, whose rounds look at the flag and at whether the rank was given up. Of
# its instructions few are fused or removed, but the last round of a lane leaves it in the middle.
PTX_LOAD, SASS_LOAD, AT_ONCE, MARGIN = r"ld\.relaxed\.sys\.global\.u64", r"LD\S*\.STRONG\.SYS", 1, 0.3

COUNT = """
import json, sys
sys.path.insert(0, "tests/ptx")
import counts
executed, size, texts = counts.run(counts.parser().parse_args([]))
found = counts.roles(executed, size)
moved = [r for r in found if r.kernel in ("dispatch", "combine")]
assert {"roles/g2s.h", "roles/s2g.h", "roles/reduce.h", "roles/final_sum.h"} <= {r.role for r in moved}, moved
assert not any(r.role.startswith("not") and r.per_row > 5 for r in found), found
text = next(i for i, t in enumerate(texts) if any(line.entry in t for line in executed))
open(sys.argv[1], "w").write(texts[text])
print(json.dumps(counts.per_round(executed, texts, "combine", sys.argv[2])))
"""


def sass(ptx: Path) -> list:
    """[(address, text)] of the combine kernel, as ptxas compiles it."""
    import build_cuda
    import cubin_check
    import sass_loops

    nvcc, why = build_cuda.find_nvcc()
    tools = cubin_check.find_tools()
    if not nvcc or not tools:
        pytest.skip(why or "no cuobjdump and nvdisasm")
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([Path(nvcc).with_name("ptxas"), "-arch=sm_90a", ptx, "-o", cubin], check=True, timeout=300)
    with_tools = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    text = subprocess.run(
        [tools / "cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True, timeout=300, env=with_tools
    ).stdout
    of_combine = next(part for part in text.split("Function : ") if re.search(r"\dcombine_entry", part.split("\n")[0]))
    return [i for i in map(sass_loops.instruction_of, of_combine.split("\n")) if i]


def test_a_loop_executes_what_its_machine_code_has(tmp_path):
    import json

    import sass_loops

    ptx = tmp_path / "kernels.ptx"
    done = subprocess.run(
        [sys.executable, "-c", COUNT, ptx, PTX_LOAD], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    executed = json.loads(done.stdout.splitlines()[-1])[str(AT_ONCE)]
    code = sass(ptx)
    of_waits = [
        last - first + 1
        for first, last in sass_loops.loops(code)
        if sum(bool(re.search(SASS_LOAD, text)) for _, text in code[first : last + 1]) == AT_ONCE
    ]
    static = min(of_waits)
    assert abs(static / executed - 1) < MARGIN, f"{executed:.1f} executed a round, {static} in the machine code"
