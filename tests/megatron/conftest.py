"""Puts the repository and its scripts on the path; Megatron itself is only imported inside short-lived
worlds. GPUs are hidden: these worlds are of CPUs, wherever they run."""

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts", Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
