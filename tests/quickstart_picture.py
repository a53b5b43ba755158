"""Draw what `make quickstart` prints: `python tests/quickstart_picture.py trainer/quickstart.svg`.

The script trains the quickstart in its own terminal and saves the last screen as SVG.
"""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES = 120, 60
COMMAND = ["-m", "trainer", "launch", "--nproc", "2", "train", "--train.run", "quickstart"]


def record() -> tuple[pyte.Screen, str]:
    """Return the terminal's screen at the end of the run, and the folder that the run was in."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        leader, follower = pty.openpty()
        os.set_blocking(leader, True)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "COLUMNS": str(COLUMNS),
            "LINES": str(LINES),
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
        }
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        process = subprocess.Popen([sys.executable, *COMMAND], cwd=folder, env=environment, **streams)
        os.close(follower)
        while data := _read(leader):
            stream.feed(data)
        assert process.wait() == 0, "\n".join(screen.display).strip()
    return screen, folder


def _read(leader: int) -> bytes:
    """Return the next output; empty after the last process has closed the terminal."""
    try:
        return os.read(leader, 65536)
    except OSError:
        return b""


def to_lines(screen: pyte.Screen, folder: str) -> list[Text]:
    """Return the screen's lines with their colours, without the folder in paths and most rows of the plan's table."""
    lines = []
    for row in range(LINES):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        text = "".join(cell.data for cell in cells)
        if re.match(r"│ t_cat_\d+ ", text) and not re.match(r"│ t_cat_(0|25) ", text):
            continue
        if (start := text.find(f"{folder}/")) >= 0:
            del cells[start : start + len(folder) + 1]
            blank = screen.default_char
            border = text.rindex("│") - len(folder) - 1 if "│" in text else len(cells)
            cells[border:border] = [blank] * (COLUMNS - len(cells))
        lines.append(_join(cells))
        if text.startswith("│ t_cat_0 "):
            lines.append(Text("│ ... 24 more tables"))
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _join(cells: list[Char]) -> Text:
    """Return the cells of a line, those of one style together."""
    line = Text(no_wrap=True)
    for (colour, bold), run in itertools.groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        line.append("".join(cell.data for cell in run), Style(color=_colour(colour), bold=bold))
    line.rstrip()
    return line


def _colour(name: str) -> str | None:
    """Return rich's name of one of pyte's colours: a name such as `brown`, or six hexadecimal digits."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return re.sub("^bright", "bright_", name).replace("brown", "yellow")


def main() -> int:
    """Run the quickstart and write the picture."""
    target = Path(sys.argv[1])
    lines = to_lines(*record())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in [Text("$ make quickstart", style="bold"), *lines]:
        console.print(line)
    picture = console.export_svg(title="torchrec-cloud")
    # Without the web fonts, which a page that shows the picture would have to fetch from another host.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
    sys.stdout.write(f"{target}: {len(lines)} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
