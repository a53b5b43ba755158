"""Terminal tables of instance types, charts and hourly cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, object]

#: Columns of each table: heading, and the format of a row's cell.
INSTANCES = {
    "CLOUD": "{cloud}",
    "TYPE": "{name}",
    "GPUS": "{num_gpus} x {gpu_model}",
    "VCPU": "{num_vcpus}",
    "RAM GIB": "{memory_gib}",
    "NETWORK": "{network_gbps} Gbps {fabric}",
    "USD/H": "{on_demand_usd_per_hour}",
    "SPOT USD/H": "{spot_usd_per_hour}",
    "AS OF": "{as_of}",
    "PRICE SOURCE": "{source}",
}
CHARTS = {
    "CHART": "{key}",
    "VERSION": "{version}",
    "NAMESPACE": "{namespace}",
    "WHY": "{why}",
    "CHECK": "{check}",
}
COST = {
    "ITEM": "{what}",
    "COUNT": "{count:g}",
    "USD/H": "{on_demand_usd_per_hour:.4f}",
    "SPOT USD/H": "{spot_usd_per_hour}",
    "COUNT AT MAX": "{count_at_max:g}",
    "USD/H AT MAX": "{on_demand_usd_per_hour_at_max:.4f}",
}

_LEFTOVER = {"KIND": "{kind}", "ID": "{id}", "SINCE": "{since}", "USD/H": "{usd_per_hour}"}
ORPHANS = {**_LEFTOVER, "REMOVE IT": "{remove}"}
KEPT = {**_LEFTOVER, "WHY": "{kept}", "REMOVE IT": "{remove}"}


def table(columns: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Format rows as text with aligned columns; None is shown as a dash."""
    shown = [{key: "-" if value is None else value for key, value in row.items()} for row in rows]
    cells = [list(columns)] + [[form.format(**row) for form in columns.values()] for row in shown]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in cells
    )
