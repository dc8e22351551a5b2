"""Draws docs/img/view.png: the live view of a real `shoal demo`, as shown by a terminal.

    python bench/screen.py [--after 100] [--into FILE] [-- any arguments of `shoal demo`]

The command runs in a pseudo terminal. The last page that it drew before `--after` seconds is kept, including colours.
Then the run is stopped with SIGTERM, and can be resumed.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

COLUMNS, ROWS, SIZE = 80, 24, 15
BACK, INK = "#14181d", "#d8dee4"
COLOURS = {1: "#ff6b68", 2: "#7ec97e", 3: "#e5c07b", 6: "#62c8d4"}
"""by terminal colour number: red, green, yellow, cyan"""
_MOVES = re.compile(rb"(?:\x1b\[\d*[A-KJ]|\r|\x1b\[\?25[lh])+")
"""how a page that is drawn over the last one begins"""


def main() -> None:
    """Run the command, keep a page, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--after", type=float, default=100.0, help="seconds after which the page is captured")
    parser.add_argument("--into", type=Path, default=Path("docs/img/view.png"))
    parser.add_argument("rest", nargs="*", help="arguments of `shoal demo`")
    args = parser.parse_args()
    drawn = record_screen([str(Path(sys.executable).with_name("shoal")), "demo", *args.rest], args.after)
    pages = [page for page in _MOVES.split(drawn.replace(b"\r\n", b"\n")) if page.count(b"\n") > ROWS // 3]
    if not pages:
        sys.exit("the command drew no page in that time; increase --after")
    draw_screen(Text.from_ansi(pages[-1].decode("utf-8", "replace")), args.into)
    print(f"drew {args.into}")


def record_screen(command: list[str], seconds: float) -> bytes:
    """Record a command's terminal output for that many seconds, then stop it."""
    pid, screen = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    ends_s, drawn = time.monotonic() + seconds, bytearray()
    while (left_s := ends_s - time.monotonic()) > 0:
        drawn += read_screen(screen, left_s)
    os.kill(pid, signal.SIGTERM)
    while read_screen(screen, 60.0):
        pass
    os.waitpid(pid, 0)
    return bytes(drawn)


def read_screen(screen: int, timeout_s: float) -> bytes:
    """The next bytes of a terminal; empty when it has no writer any more."""
    if not select.select([screen], [], [], timeout_s)[0]:
        return b""
    try:
        return os.read(screen, 65536)
    except OSError:  # Linux reports EIO when the last writer has closed it
        time.sleep(0.1)
        return b""


def draw_screen(page: Text, path: Path) -> None:
    """Draw a page as an image."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), SIZE)
    bold = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono:bold"), SIZE)
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    lines = [list(line) for line in console.render_lines(page, pad=False)]
    while lines and not "".join(segment.text for segment in lines[-1]).strip():
        lines.pop()
    width, height = font.getlength("m"), round(SIZE * 1.3)
    image = Image.new("RGB", (round(width * COLUMNS) + 24, height * len(lines) + 24), BACK)
    for row, line in enumerate(lines):
        draw_line(ImageDraw.Draw(image), line, (12.0, 12.0 + row * height), (font, bold))
    image.save(path)


def draw_line(
    draw: ImageDraw.ImageDraw,
    line: list[Segment],
    place: tuple[float, float],
    fonts: tuple[ImageFont.FreeTypeFont, ImageFont.FreeTypeFont],
) -> None:
    """One row of a page."""
    x, y = place
    for segment in line:
        style = segment.style
        number = style.color.number if style and style.color else None
        colour = COLOURS.get(number or 0, "#7d868f" if style and style.dim else INK)
        font = fonts[1 if style and style.bold else 0]
        draw.text((x, y), segment.text, font=font, fill=colour)
        x += fonts[0].getlength("m") * len(segment.text)


if __name__ == "__main__":
    main()
