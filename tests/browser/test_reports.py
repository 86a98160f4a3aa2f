"""The HTML reports of the commands in a real browser, opened from the disk as their readers do."""

import pytest

from processes import run_python

PROGRAM = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=16)
rows = parser.parse_args().rows
torch.manual_seed(0)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))

    def forward(self, inputs):
        return self.layers(inputs) * FACTOR


model = torch.nn.Sequential(Encoder(), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    inputs = torch.randn(rows, 64)
    loss = torch.nn.functional.cross_entropy(model(inputs), torch.randint(8, (rows,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# By what is tried: the factor in the program, the command, and the headings that its report must show.
COMPARE = ["compare", "--repeats", "1", "--dtype", "float16"]
COMMANDS = {
    "compare": (1, [*COMPARE, "--steps", "6"], ["Loss", "Updates and gradients"]),
    "compare with a sweep": (1, [*COMPARE, "--steps", "4", "--sweep", "--rows=8,16"], ["Loss", "--rows"]),
    "diagnose": (1, ["diagnose", "--dtype", "float16"], ["Nothing failed", "Loss"]),
    "diagnose an overflow": (1e6, ["diagnose", "--dtype", "float16"], ["overflow", "What to do", "Before it failed"]),
    "run": (1, ["run", "--dtype", "float16"], ["Time", "Operations", "The same by hand"]),
    "tune": (1, ["tune", "--dtype", "float16"], ["The policy file", "Loss"]),
}


@pytest.mark.parametrize("tried", COMMANDS)
def test_a_report_is_whole(window, tried, tmp_path):
    factor, words, headings = COMMANDS[tried]
    folder = tmp_path / ("a_name_that_nothing_breaks_into_lines_" * 4)  # wider than a page
    folder.mkdir()
    program = folder / "train.py"
    program.write_text(PROGRAM.replace("FACTOR", str(factor)))
    path = tmp_path / "report.html"
    done = run_python("-m", "ampx", *words, "--report", path, program, cwd=tmp_path, timeout=280)
    assert path.is_file(), done.stdout + done.stderr
    page = window.open(path.as_uri())
    assert page.messages == []
    assert page.requests == [path.as_uri()], "a report is one file that asks for nothing else"
    assert page.broken_images == []
    assert page.window_width == 1280
    assert not page.scrolls_sideways, page.beyond_the_edge
    window.resize(390)
    narrow = window.open(path.as_uri())
    window.resize(1280)
    assert narrow.window_width == 390
    assert not narrow.scrolls_sideways, narrow.beyond_the_edge
    assert page.title.startswith(f"ampx {words[0]}")
    assert [heading for heading in headings if heading not in page.text] == []
    assert [link for link in page.links if not link.startswith("https://")] == []
