"""One HTML file with every picture and table in it: opens offline, loads nothing."""

from __future__ import annotations

import html
import re
from pathlib import Path

__all__ = ["write_html"]

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
figure { margin: 2rem 0; } figure svg { width: 100%; height: auto; } figcaption { color: #555; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } th { background: #f5f5f5; }
table.text td { text-align: left; } h2 { margin-top: 3rem; } nav a { margin-right: 1rem; }
"""


def write_html(out: Path, markdown: str, pictures: list[tuple[str, Path]]) -> Path:
    """Write `index.html`: the pictures first, then the tables of the Markdown report."""
    body = ["<h1>KV memory by scheme</h1>", _intro(markdown)]
    for i, (caption, path) in enumerate(pictures):
        body.append(f"<figure>{_inline(path, i)}<figcaption>{html.escape(caption)}</figcaption></figure>")
    body.append(_tables(markdown))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>KV memory by scheme</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        + "\n".join(body)
        + "</body></html>\n"
    )
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _intro(markdown: str) -> str:
    return f"<p>{html.escape(markdown.split(chr(10) * 2)[1]).replace('`', '')}</p>"


def _inline(path: Path, number: int) -> str:
    """The SVG element, with ids that are its own: several pictures share one document."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    prefix = f"f{number}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href|href)="#', rf'\1="#{prefix}', svg)
    return re.sub(r"url\(#", f"url(#{prefix}", svg)


def _tables(markdown: str) -> str:
    """The report's headings, paragraphs and tables; it holds nothing else."""
    parts = []
    for block in markdown.split("\n\n")[2:]:
        if block.startswith("## "):
            parts.append(f"<h2>{html.escape(block[3:])}</h2>")
        elif block.startswith("|"):
            header, _, *rows = block.splitlines()
            text = ' class="text"' if "models" in header else ""
            cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in _cells(header))
            lines = [
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in rows
            ]
            parts.append(f"<table{text}><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>")
        else:
            parts.append(f"<p>{html.escape(block)}</p>")
    return "\n".join(parts)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]
