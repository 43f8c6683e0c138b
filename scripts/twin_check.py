"""Compares templated device code with a hand-written twin: what the pipeline's types cost in machine code.

    python scripts/twin_check.py [--mutant] [--json FILE]

Compiles tests/cuda/stage_twin.cu for sm_90a and sm_100 (about two seconds each; no GPU) and counts the instructions of
its two kernels. Exits with 1 when `templated` has more than TOLERANCE times those of `written` on either: then a loop
is unrolled in one of the two (sm_100's back end is quick to), or an address or phase is kept twice. --mutant unrolls
a loop of the templated kernel; the check must then fail, and the script exits with 0 only if it does. Needs nvcc as
scripts/build_cuda.py does, cuobjdump as scripts/cubin_check.py does."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_cuda  # noqa: E402
import cubin_check  # noqa: E402

SOURCE = "tests/cuda/stage_twin.cu"
TOLERANCE = 1.10
KERNELS = ("templated", "written")


def count(text):
    """{arch: {kernel: instructions}} of the text of cuobjdump -sass."""
    counts, arch, kernel = {}, "", None
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernel = next((k for k in KERNELS if f"{len(k)}{k}E" in match[1]), None)
        elif kernel and (opcode := cubin_check.opcode_of(line)) and opcode != "NOP":
            counts.setdefault(arch, Counter())[kernel] += 1
    return {arch: dict(by_kernel) for arch, by_kernel in counts.items()}


def complaints(counts):
    for arch in cubin_check.ARCHITECTURES:
        by_kernel = counts.get(arch, {})
        if missing := [k for k in KERNELS if not by_kernel.get(k)]:
            yield f"{arch}: no code of {', '.join(missing)}"
        elif by_kernel["templated"] > TOLERANCE * by_kernel["written"]:
            yield (
                f"{arch}: the templated kernel has {by_kernel['templated']} instructions, its hand-written twin "
                f"{by_kernel['written']}; at most {TOLERANCE} times as many"
            )


def compile_and_count(nvcc, tools, *options):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "twin.o"
        command = [*build_cuda.base_command(nvcc), *build_cuda.targets(), *options, "-c", SOURCE, "-o", str(out)]
        done = subprocess.run(command, cwd=build_cuda.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"twin_check: {SOURCE} does not compile:\n\n{done.stderr}{done.stdout}")
        return count(cubin_check.run(tools, out, "-sass"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", action="store_true", help="the check must fail")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    nvcc, why = build_cuda.find_nvcc()
    tools = cubin_check.find_tools()
    if not nvcc or not tools:
        sys.exit(f"twin_check: {why or 'needs cuobjdump and nvdisasm; the triton package carries both'}")
    counts = compile_and_count(nvcc, tools, *(["-DHEP_TWIN_MUTANT"] if args.mutant else []))
    for arch, by_kernel in counts.items():
        print(f"{arch:<8} " + "  ".join(f"{k} {by_kernel.get(k)}" for k in KERNELS))
    found = list(complaints(counts))
    print("\n".join(found))
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"twin_check: {len(found)} complaints" + (", as there must be" if args.mutant and found else ""))
    sys.exit(bool(found) != args.mutant)


if __name__ == "__main__":
    main()
