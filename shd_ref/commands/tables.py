"""The table that ``shd precompute`` prints."""

from __future__ import annotations

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from shd_ref.commands.terminal import fact_table, marked
from shd_ref.teacher.precompute.summary import PrecomputeSummary


def summary_table(summary: PrecomputeSummary) -> Table:
    """What ``shd precompute`` did."""
    table = fact_table(str(summary.folder))
    rate = summary.written / max(summary.seconds, 1e-9)
    table.add_row("samples", f"{summary.samples} ({summary.resumed} were there), {rate:.1f} per second")
    if summary.missing_shards:
        left = marked(f"{summary.missing_shards} shards", "yellow", " are left to other processes")
        table.add_row("partial", left)
    if summary.skipped:
        why = ": the teacher gave NaN; their receipts name them"
        table.add_row("skipped", marked(str(summary.skipped), "bold red", why))
    if summary.supplied:
        table.add_row("fed beside", summary.supplied)
    ratio = summary.float32_bytes / max(summary.coded_bytes, 1)
    table.add_row("stored", f"{decimal(summary.coded_bytes)}, {ratio:.1f}x smaller than in float32")
    alphas = summary.alphas
    if alphas.size:
        low, middle, high = np.quantile(alphas, [0.05, 0.5, 0.95])
        table.add_row("alpha", f"median {middle:.3f}, 90% in [{low:.3f}, {high:.3f}], of {alphas.size}")
        table.add_row("clipped", f"{summary.num_clipped} outside [0, 1]; {summary.num_degenerate} without preference")
    comparison = summary.comparison
    if comparison is not None:
        table.add_row(
            "residual",
            f"{comparison.residual:.4f} of the attention output, constant merge {comparison.constant_residual:.4f} "
            f"(of {summary.compared_samples} samples)",
        )
        error = summary.errors.attention
        codec = f"KL {error.kl_mean:.2g} nats per row (max {error.kl_max:.2g}), total variation {error.tv_mean:.2%}"
        table.add_row("codec", codec)
    logits, hidden = summary.errors.logits, summary.errors.hidden
    if logits is not None:
        left_out = f", {logits.gradient_mean:.1%} of a gradient with what is left out"
        table.add_row("logits", f"KL {logits.kl_mean:.2g} nats per row (max {logits.kl_max:.2g}){left_out}")
    if hidden is not None:
        table.add_row("hidden", f"{hidden.relative_mean:.2g} of a row's length (max {hidden.relative_max:.2g})")
    if comparison is not None:
        table.add_row(
            "graph = reference",
            f"maps within {comparison.map_difference:.1g}, {comparison.code_mismatch:.3%} of codes differ",
        )
    return table
