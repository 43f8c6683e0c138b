"""C++ read without a compiler: sources without their comments and literals, and where functions begin and end."""

import re


def blank_out(source):
    """The C++ source with comments and literals blanked; line breaks and columns stay."""
    comments, raw_strings = r"//[^\n]*|/\*.*?\*/", r'R"(\w*)\(.*?\)\1"'
    literals = r""""(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'"""
    pattern = re.compile(f"{comments}|{raw_strings}|{literals}", re.S)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)


def is_function_head(head):
    """Whether the text before an opening brace, outside any function, begins a function."""
    head = re.sub(r"\[\[.*?\]\]|\balignas\s*\([^()]*\)|^\s*#[^\n]*$", " ", head, flags=re.S | re.M)
    while (shorter := re.sub(r"<[^<>]*>", " ", head)) != head:
        head = shorter
    if re.search(r"\b(concept|namespace|enum)\b", head) or "(" not in head:
        return False
    return not re.search(r"\b(class|struct|union)\b", head.split("(")[0])


def functions(code):
    """(first line, number of lines) of each function, by counting braces: approximate, and good enough for a cap."""
    start, opened, depth, first_line = 0, None, 0, 0
    for match in re.finditer(r"[{};]", code):
        symbol, position = match.group(), match.start()
        if opened is not None:
            depth += {"{": 1, "}": -1, ";": 0}[symbol]
            if depth == 0:
                if not is_initializer(code, position):
                    yield first_line, code.count("\n", 0, position) + 2 - first_line
                    start = position + 1
                opened = None
        elif symbol == "{":
            head = code[start:position]
            if is_function_head(head):
                begin = start + len(head) - len(head.lstrip())
                opened, depth, first_line = position, 1, code.count("\n", 0, begin) + 1
            else:
                start = position + 1
        else:
            start = position + 1


def is_initializer(code, end):
    """Whether the brace that closes at `end` ends a member initializer (`: a{1}, b{2} { ... }`)."""
    return re.match(r"\s*[,{]", code[end + 1 : end + 200]) is not None
