"""Tables that ``shd`` prints."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from shd_ref.commands.terminal import console, fact_table, marked, narrow_table
from shd_ref.teacher.precompute.summary import PrecomputeSummary
from shd_ref.teacher.study.forecast import CodecForecast, FactoredForecast, Forecast


def summary_table(summary: PrecomputeSummary) -> Table:
    """What ``shd precompute`` did."""
    table = fact_table(f"cache {summary.folder}")
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
    table.add_row(
        "residual",
        f"{comparison.residual:.4f} of the attention output, constant merge {comparison.constant_residual:.4f} "
        f"(first {summary.compared_samples} samples)",
    )
    error = summary.errors.attention
    table.add_row(
        "codec", f"KL {error.kl_mean:.2g} nats per row (max {error.kl_max:.2g}), total variation {error.tv_mean:.2%}"
    )
    logits, hidden = summary.errors.logits, summary.errors.hidden
    if logits is not None:
        left_out = f", {logits.gradient_mean:.1%} of a gradient with what is left out"
        table.add_row("logits", f"KL {logits.kl_mean:.2g} nats per row (max {logits.kl_max:.2g}){left_out}")
    if hidden is not None:
        table.add_row("hidden", f"{hidden.relative_mean:.2g} of a row's length (max {hidden.relative_max:.2g})")
    table.add_row(
        "graph = reference",
        f"maps within {comparison.map_difference:.1g}, {comparison.code_mismatch:.3%} of codes differ",
    )
    return table


def print_forecast(forecast: Forecast, num_student_heads: int) -> None:
    """What ``shd plan`` found, and what to do."""
    console.print(
        f"{num_student_heads} student heads; {forecast.num_samples} samples, {forecast.mean_length:.0f} positions on "
        f"average, {forecast.max_length} at most, {forecast.support} support",
        highlight=False,
    )
    console.print(_forecast_table(forecast))
    console.print(_forecast_advice(forecast), highlight=False)


def _forecast_table(forecast: Forecast) -> Table:
    """A codec per row."""
    table = narrow_table()
    table.add_column("codec")
    for column in (
        "per\nsample",
        "in all",
        "with\nzstd",
        "break-even\nread",
        "KL a\nrow",
        "largest\nKL",
        "total\nvar.",
    ):
        table.add_column(column, justify="right")
    for row in forecast.codecs:
        table.add_row(
            marked(row.codec, "bold", " <-") if row.codec == forecast.recommended else row.codec,
            *_sizes(row),
            "?" if row.zstd_ratio is None else f"x {row.zstd_ratio:.2f}",
            f"{decimal(round(row.break_even))}/s",
            *_errors(row),
        )
    for form in forecast.factored:
        table.add_row(f"factored {form.codec}", *_sizes(form), "", "", *_errors(form))
    return table


def _sizes(row: CodecForecast | FactoredForecast) -> tuple[str, str]:
    per_sample, total = decimal(round(row.bytes_per_sample)), decimal(round(row.total_bytes))
    return per_sample.replace("bytes", "B"), total.replace("bytes", "B")


def _errors(row: CodecForecast | FactoredForecast) -> tuple[str, str, str]:
    return f"{row.error.kl_mean:.2g}", f"{row.error.kl_max:.2g}", f"{row.error.tv_mean:.2%}"


def _forecast_advice(forecast: Forecast) -> str:
    """What to do, in words."""
    duration = timedelta(seconds=max(1, round(forecast.squeeze_seconds * forecast.num_samples)))
    (best,) = [row for row in forecast.codecs if row.codec == forecast.recommended]
    milliseconds = 1000 * forecast.teacher_seconds, 1000 * forecast.squeeze_seconds
    times = (
        f"teacher {milliseconds[0]:.3g} ms per sample, squeezed {milliseconds[1]:.3g} ms: {duration} in all "
        f"on this machine (measured on {forecast.measured_samples} samples)"
    )
    verdict = (
        f"store {best.codec}: {decimal(round(best.total_bytes))}, faster to read than the teacher is to run"
        if forecast.pays
        else f"run the teacher while training: reading {best.codec} pays only above "
        f"{decimal(round(best.break_even))}/s per training device"
    )
    if forecast.form == "factored":
        verdict += (
            "\nat this length the teacher's queries and keys are smaller than its maps: store them "
            "(shd precompute --form factored), if the errors above suit you"
        )
    fed = f"fed beside the data: {forecast.supplied}\n" if forecast.supplied else ""
    return f"{fed}{times}\n{verdict}"
