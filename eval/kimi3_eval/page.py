"""One self-contained HTML page for a run or a comparison: tables and plots inside, no script, opens from disk."""

import base64
import html
import io
from pathlib import Path

from matplotlib.figure import Figure

from . import plots
from .build import write_text

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;border-bottom:1px solid #d5dae0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#59636e}img{max-width:100%}
h2{margin-top:2.2rem}code{background:#f2f4f7;padding:.1rem .3rem;border-radius:3px;overflow-wrap:anywhere}
"""


def lines_of(runs: dict[str, dict]) -> dict[str, dict]:
    """Columns of one or several runs as lines by name."""
    if len(runs) == 1:
        (run,) = runs.values()
        return dict(run["columns"])
    return {
        name if column == "full" else f"{name} {column}": content
        for name, run in runs.items()
        for column, content in run["columns"].items()
    }


def figures(runs: dict[str, dict]) -> dict[str, Figure]:
    """Every plot of one or several runs, by title."""
    lines = lines_of(runs)
    tasks = dict.fromkeys(task for content in lines.values() for task in content["tasks"])
    rows = {task: {name: c["tasks"][task] for name, c in lines.items() if task in c["tasks"]} for task in tasks}
    found: dict[str, Figure] = {}
    if rows:
        found["Recall by length, with 95% intervals"] = plots.recall_by_length(rows)
    for name, content in lines.items():
        heat = plots.depth_by_length(content["tasks"])
        if heat is not None:
            found["Recall by depth and length" + ("" if len(lines) == 1 else f": {name}")] = heat
    losses = {name: content["loss"] for name, content in lines.items() if "loss" in content}
    if losses:
        found["Loss by position"] = plots.loss_by_position(losses)
    for name, run in runs.items():
        for title, figure in plots.mechanisms(run.get("mechanisms", {})).items():
            found[title + ("" if len(runs) == 1 else f": {name}")] = figure
    return found


def _table(lines: dict[str, dict]) -> str:
    results = [result for content in lines.values() for result in content["tasks"].values()]
    lengths = sorted({cell["length"] for result in results for cell in result["by_length"]})
    head = "".join(f"<th>{n}</th>" for n in lengths)
    body = []
    for name, content in lines.items():
        for task, result in content["tasks"].items():
            cells = {cell["length"]: cell for cell in result["by_length"]}
            values = "".join(_cell(cells.get(n)) for n in lengths)
            body.append(f"<tr><td>{html.escape(task)}</td><td>{html.escape(name)}</td>{values}</tr>")
    return f"<table><tr><th>task</th><th>column</th>{head}</tr>{''.join(body)}</table>"


def _cell(cell: dict | None) -> str:
    if cell is None:
        return "<td></td>"
    low, high = cell["interval"]
    return f"<td class=n>{cell['score']:.3f} <small>{low:.2f}–{high:.2f}, n={cell['n']}</small></td>"


def write_page(runs: dict[str, dict], directory: Path) -> Path:
    """Writes `report.html` and the plots as PNG files.

    Args:
        runs: Results by name; one for a report, several for a comparison.
        directory: Where to write.
    """
    parts = []
    for number, (title, figure) in enumerate(figures(runs).items()):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        (directory / "plots").mkdir(parents=True, exist_ok=True)
        (directory / "plots" / f"{number:02d}.png").write_bytes(buffer.getvalue())
        data = base64.b64encode(buffer.getvalue()).decode()
        text = html.escape(title)
        parts.append(f'<h2>{text}</h2><img alt="{text}" src="data:image/png;base64,{data}">')
    facts = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(run['plan']['model']))}</td>"
        f"<td>{html.escape(run['haystack']['name'])}</td><td>{run['plan']['seed']}</td>"
        f"<td><code>{html.escape(' '.join(run['command']))}</code></td></tr>"
        for name, run in runs.items()
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>kimi3-eval</title>"
        f'<link rel="icon" href="data:,"><style>{STYLE}</style><h1>kimi3-eval</h1>'
        f"<table><tr><th>run</th><th>model</th><th>prose haystack</th><th>seed</th><th>command</th></tr>{facts}</table>"
        f"<h2>Recall</h2>{_table(lines_of(runs))}{''.join(parts)}</html>"
    )
    write_text(directory / "report.html", page)
    return directory / "report.html"
