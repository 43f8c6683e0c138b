"""The README and the pages of docs/, taken apart into code and prose."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "_generated")]
SHELL = ("bash", "sh", "console", "text")  # languages of fences that may hold command lines


def code_and_prose(text: str) -> tuple[list[str], list[str]]:
    """Every line twice: where it is shell code (fences of SHELL, indented blocks), where it is prose; "" elsewhere."""
    code, prose, language = [], [], None
    for line in text.splitlines():
        words = line.strip()
        fence, inside = words.startswith("```"), language is not None
        if fence:
            language = None if inside else words[3:]
        indented = not inside and line.startswith("    ")
        code.append(words if not fence and (indented or language in SHELL) else "")
        prose.append(line if not fence and not inside and not indented else "")
    return code, prose
