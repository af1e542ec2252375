"""The Python blocks of README.md and CARD.md run as they stand, in order, in one namespace a file.

Without a GPU, "cuda" is replaced by "cpu". A block whose sizes are too large for a CPU is preceded by a comment that
says what is replaced there: `<!-- on a CPU: T = 65536 -> T = 512, K = 4096 -> K = 64 -->`. One that needs another
package is preceded by `<!-- needs name -->`, and left out where that is not installed.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- on a CPU: (?P<smaller>[^\n]*) -->\n+)?(?:^<!-- needs (?P<needed>\w+) -->\n+)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)


def blocks(text, on_gpu):
    """(line of the README, code) of each Python block; no code where what it needs is missing."""
    for match in BLOCK.finditer(text):
        code = match["code"]
        if match["needed"] and importlib.util.find_spec(match["needed"]) is None:
            code = ""
        if not on_gpu:
            code = code.replace('"cuda"', '"cpu"')
            for replacement in filter(None, (match["smaller"] or "").split(", ")):
                old, new = replacement.split(" -> ")
                assert old in code, f"README: nothing to replace for {replacement!r}"
                code = code.replace(old, new)
        yield text.count("\n", 0, match.start("code")), code


@pytest.mark.parametrize("file", ["README.md", "CARD.md"])
def test_python_blocks_run(file, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", torch.nn.functional.grouped_mm)  # a block takes its place
    text = (ROOT / file).read_text()
    found = list(blocks(text, torch.cuda.is_available()))
    assert len(found) == text.count("```python") and found
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        namespace = {"__name__": "readme"}
        for line, code in found:
            exec(compile("\n" * line + code, file, "exec"), namespace)
    finally:
        torch.set_num_threads(threads)


def test_blocks_shrink_on_a_cpu():
    text = 'a\n<!-- on a CPU: T = 4096 -> T = 8, K = 9 -> K = 1 -->\n\n```python\nT = 4096\nK = 9\nd = "cuda"\n```\n'
    assert list(blocks(text, False)) == [(4, 'T = 8\nK = 1\nd = "cpu"\n')]
    assert list(blocks(text, True)) == [(4, 'T = 4096\nK = 9\nd = "cuda"\n')]
    with pytest.raises(AssertionError, match="nothing to replace"):
        list(blocks(text.replace("T = 4096\n", "T = 1\n"), False))


def test_blocks_that_need_a_package():
    text = "<!-- needs {} -->\n\n```python\na = 1\n```\n"
    assert list(blocks(text.format("torch"), False)) == [(3, "a = 1\n")]
    assert list(blocks(text.format("no_such_package"), False)) == [(3, "")]
