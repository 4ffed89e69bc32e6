"""A document of figures and tables: as one HTML page that needs nothing else, and as Markdown."""

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from shared.errors import FestinaError
from shared.model import Struct

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:14px}td,th{border:1px solid #ccc;padding:.2rem .6rem}
th{background:#f3f3f3;text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}
svg{max-width:100%;height:auto}h2{margin-top:2.5rem}.note{color:#555}nav a{margin-right:1rem}"""


class Sheet(Struct):
    """A table: its rows are of text, as they are to be read."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


class Section(Struct):
    """One figure or table of a document.

    Args:
        name: short, for its address.
        notes: paragraphs; assumptions and what is missing.
        pictures: SVG documents.
    """

    name: str
    title: str
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    sheets: tuple[Sheet, ...] = ()


def drawing(rows: int = 1, columns: int = 1, width: float = 9.0, height: float = 3.2) -> tuple[Any, Any]:
    """Return (figure, axes) of matplotlib, axes as a grid. Raises FestinaError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise FestinaError("matplotlib is not installed; pip install 'festina[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, axes


def svg(figure: Any) -> str:
    """Return a finished figure of matplotlib as SVG, and close it."""
    import matplotlib.pyplot as plt

    for axes in figure.axes:
        axes.grid(alpha=0.3)
    told = io.StringIO()
    figure.savefig(told, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = told.getvalue()
    return text[text.index("<svg") :]


def html(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the document as one page."""
    links = " ".join(f'<a href="#{escape(s.name)}">{escape(s.title.split(":")[0])}</a>' for s in sections)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in intro),
        f"<nav>{links}</nav>",
    ]
    for section in sections:
        parts.append(f'<h2 id="{escape(section.name)}">{escape(section.title)}</h2>')
        parts += section.pictures
        parts += [_html_sheet(sheet) for sheet in section.sheets]
        parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def markdown(sections: Sequence[Section]) -> str:
    """Return the document's sections as Markdown, without pictures."""
    parts: list[str] = []
    for section in sections:
        parts.append(f"## {section.title}\n")
        for sheet in section.sheets:
            lines = [" | ".join(row) for row in (sheet.header, ("---",) * len(sheet.header), *sheet.rows)]
            title = [f"{sheet.title}:\n"] if sheet.title else []
            parts.append("\n".join([*title, *(f"| {line} |" for line in lines)]) + "\n")
        parts += [f"{note}\n" for note in section.notes]
    return "\n".join(parts)


def _html_sheet(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in sheet.header)
    rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in sheet.rows)
    caption = f"<p>{escape(sheet.title)}</p>" if sheet.title else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _html_cell(text: str) -> str:
    kind = ' class="n"' if text[:1].isdigit() or text[:1] in "+-−" else ""
    return f"<td{kind}>{escape(text)}</td>"
