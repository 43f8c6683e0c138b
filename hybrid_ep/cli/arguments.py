"""Errors of the library as a command says them: its argument, `topk=300`, is the flag that the user typed, `--topk
300`."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping

_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s:,;()'"]+"""


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Every `argument=value` of `text` as the words that give it. flags: {argument: what stands before its value},
    "--topk " or "--set expert="; other arguments stay. What is part of a word, or the value of a flag, is none."""
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))

    def words(found: re.Match[str]) -> str:
        flag, name, value = found.groups()
        if flag:
            return found[0]
        quoted = value[0] in "'\""
        return flags[name] + (shlex.quote(str(ast.literal_eval(value))) if quoted else value)

    return re.sub(rf"(--[\w-]+ )?(?<![\w.'\-])({names})=({_VALUE})", words, text)
