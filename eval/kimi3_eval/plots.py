"""Plots of one or several runs. Each function returns a matplotlib figure; none needs a display."""

from collections.abc import Sequence

from matplotlib.figure import Figure

GRID = {"alpha": 0.3, "linewidth": 0.6}


def _panels(count: int, width: float = 4.2, height: float = 3.0) -> tuple[Figure, list]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=110)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, axes


def _length_axis(axis, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("length in tokens")


def recall_by_length(rows: dict[str, dict[str, dict]]) -> Figure:
    """Recall against length with 95% intervals, a panel for each task and a line for each run or column.

    Args:
        rows: Task, then name of the line, then the task's results.
    """
    figure, axes = _panels(len(rows))
    for axis, (task, lines) in zip(axes, rows.items()):
        for shift, (name, result) in enumerate(lines.items()):
            cells = [cell for cell in result["by_length"] if cell["n"]]
            x = [cell["length"] * (1 + 0.02 * shift) for cell in cells]
            y = [cell["score"] for cell in cells]
            low = [max(cell["score"] - cell["interval"][0], 0) for cell in cells]
            high = [max(cell["interval"][1] - cell["score"], 0) for cell in cells]
            axis.errorbar(x, y, yerr=[low, high], marker="o", markersize=4, capsize=3, linewidth=1.4, label=name)
        lengths = sorted({cell["length"] for result in lines.values() for cell in result["by_length"]})
        _length_axis(axis, lengths)
        axis.set_ylim(-0.04, 1.04)
        axis.set_ylabel("recall")
        axis.set_title(task, fontsize=10)
        axis.grid(**GRID)
        if len(lines) > 1:
            axis.legend(fontsize=7)
    return figure


def depth_by_length(tasks: dict[str, dict]) -> Figure | None:
    """Recall as a heat map of depth against length, a panel for each task with needles; None without any."""
    shown = {task: result for task, result in tasks.items() if any(cell["n"] for cell in result["cells"])}
    if not shown:
        return None
    figure, axes = _panels(len(shown))
    for axis, (task, result) in zip(axes, shown.items()):
        lengths = sorted({cell["length"] for cell in result["cells"]})
        depths = sorted({cell["depth"] for cell in result["cells"]})
        grid = [[float("nan")] * len(lengths) for _ in depths]
        for cell in result["cells"]:
            if cell["n"]:
                grid[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["score"]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                if value == value and len(depths) * len(lengths) <= 60:
                    colour = "black" if value > 0.6 else "white"
                    axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axis.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
        axis.set_xlabel("length in tokens")
        axis.set_ylabel("needle depth (0 = start)")
        axis.set_title(task, fontsize=10)
    figure.colorbar(image, ax=axes, label="recall", shrink=0.8)
    return figure


def loss_by_position(lines: dict[str, dict]) -> Figure:
    """Mean loss against position, a line for each run or column, from its longest texts."""
    figure, (axis,) = _panels(1, 6.0, 3.6)
    for name, result in lines.items():
        parts = result["by_length"][-1]["by_position"]
        x = [part["end"] for part in parts]
        axis.plot(x, [part["loss"] for part in parts], marker="o", markersize=4, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("position in tokens (end of each stretch)")
    axis.set_ylabel("loss in nats")
    axis.grid(**GRID)
    axis.legend(fontsize=8)
    return figure


def mechanisms(facts: dict) -> dict[str, Figure]:
    """What one forward pass showed: weights of attention residuals, load of experts, half-lives of KDA channels.

    Args:
        facts: See `probe.mechanisms`.

    Returns:
        Figures by title; a mechanism that the model lacks has none.
    """
    figures: dict[str, Figure] = {}
    if facts.get("attn_res"):
        rows = facts["attn_res"]
        width = max(len(row["weights"]) for row in rows)
        grid = [row["weights"] + [float("nan")] * (width - len(row["weights"])) for row in rows]
        figure, (axis,) = _panels(1, 6.0, 1.2 + 0.22 * len(rows))
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="magma", aspect="auto")
        axis.set_yticks(range(len(rows)), [row["mix"] for row in rows], fontsize=7)
        axis.set_xticks(range(width), ["embedding", *(f"block {i}" for i in range(1, width))][:width], fontsize=7)
        axis.set_xlabel("source (the last one of a row is the running sum)")
        figure.colorbar(image, ax=axis, label="mean weight")
        figures["Attention residuals: which earlier blocks each mix reads"] = figure
    if facts.get("expert_load"):
        rows = facts["expert_load"]
        figure, (axis,) = _panels(1, 6.0, 1.2 + 0.3 * len(rows))
        image = axis.imshow([row["share"] for row in rows], cmap="cividis", aspect="auto", vmin=0)
        axis.set_yticks(range(len(rows)), [f"layer {row['layer']}" for row in rows], fontsize=8)
        axis.set_xlabel("expert")
        figure.colorbar(image, ax=axis, label="load over mean load")
        figures["Experts: load of each"] = figure
    if facts.get("kda_half_life"):
        rows = facts["kda_half_life"]
        figure, (axis,) = _panels(1, 6.0, 3.4)
        axis.boxplot([row["tokens"] for row in rows], tick_labels=[str(row["layer"]) for row in rows], showfliers=False)
        axis.set_yscale("log")
        axis.set_xlabel("layer")
        axis.set_ylabel("half-life in tokens")
        axis.grid(**GRID)
        figures["KDA: half-life of the state's channels"] = figure
    return figures
