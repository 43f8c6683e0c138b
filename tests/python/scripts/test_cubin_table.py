"""Numbers of the kernels' code: the page shows what the committed file says, and a library that differs is named."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import cubin_check
import cubin_table

COMMITTED = cubin_table.committed()


def kernels(table):
    return [
        SimpleNamespace(name=name, rail=rail, arch=arch, **numbers)
        for rail, arches in table.items()
        for arch, named in arches.items()
        for name, numbers in named.items()
    ]


def test_the_page_shows_what_the_file_says():
    page = cubin_table.PAGE.read_text(encoding="utf-8")
    assert cubin_table.on_page(page, COMMITTED) == page
    with pytest.raises(ValueError, match="kernels: begin"):
        cubin_table.on_page("no marks", COMMITTED)


def test_the_file_has_every_kernel_that_is_checked():
    for rail in cubin_table.RAILS:
        for arch in cubin_check.ARCHITECTURES:
            assert set(COMMITTED[rail][arch]) == set(cubin_check.budgets_of(rail)) <= set(cubin_table.ORDER)


def test_the_page_has_a_word_on_every_kernel():
    page = cubin_table.PAGE.read_text(encoding="utf-8")
    anatomy = page[page.index("## Anatomy of a kernel") : page.index("## Numbers of the code")]
    assert [name for name in cubin_table.ORDER if name not in anatomy] == []


def test_a_library_that_differs_is_named():
    assert list(cubin_table.table_problems(kernels(COMMITTED))) == []
    assert cubin_table.numbers(kernels(COMMITTED)) == COMMITTED
    combine = COMMITTED["P2PDevice"]["sm_100"]["combine"]
    registers = combine["registers"] + cubin_table.MOST_REGISTERS + 1
    for what, number in (("registers", registers), ("instructions", combine["instructions"] * 1.03)):
        now = copy.deepcopy(COMMITTED)
        now["P2PDevice"]["sm_100"]["combine"][what] = number
        (problem,) = cubin_table.table_problems(kernels(now))
        assert f"combine<P2PDevice> sm_100: {number} {what}" in problem and "--write-table" in problem
    now = copy.deepcopy(COMMITTED)
    now["P2PDevice"]["sm_100"]["new_kernel"] = combine
    (problem,) = cubin_table.table_problems(kernels(now))
    assert "new_kernel<P2PDevice> sm_100: has no row" in problem


def test_one_librarys_numbers_leave_the_others_alone(tmp_path, monkeypatch):
    file, page = tmp_path / "kernels.json", tmp_path / "cuda.md"
    page.write_text(f"before\n{cubin_table.BEGIN}\n{cubin_table.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(cubin_table, "TABLE", file)
    monkeypatch.setattr(cubin_table, "PAGE", page)
    for rail in cubin_table.RAILS:
        cubin_table.write_table(kernels({rail: COMMITTED[rail]}))
    assert cubin_table.committed() == COMMITTED
    assert cubin_table.markdown(COMMITTED) in page.read_text(encoding="utf-8")
