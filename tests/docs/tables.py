"""Print the tables of the documentation that come from the code: ``python -m tests.docs.tables settings``.

The others are ``metrics``, and ``problems`` of ``docs/errors.md``.  Settings and metrics have a table for each heading
of their page.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from app.cli import default_text
from app.errors import INTERNAL, ROUTING, TABLE, TYPE_PREFIX
from app.grpc import CODES
from app.metrics import METRICS
from app.settings import Settings

# Maps a heading of ``docs/settings.md`` to the settings under it.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "The first ones": ("bundle", "host", "port", "device", "workers", "page", "config"),
    "Thresholds": ("alpha", "ambiguity_threshold", "max_width", "coverage"),
    "Access and encryption": (
        "api_keys", "api_keys_file", "admin_keys", "admin_keys_file", "feedback_keys", "feedback_keys_file",
        "tls_certificate", "tls_key", "allowed_hosts", "cors_origins", "allow_factories"),
    "Prediction log": (
        "log", "log_rows", "log_sample", "log_images", "log_days", "log_flush_seconds", "log_buffer_bytes"),
    "Drift": ("drift_window", "drift_false_alarm", "drift_monitors"),
    "Log lines and traces": ("log_level", "access_log", "otel"),
    "Queues and deadlines": (
        "max_batch_size", "max_delay_ms", "max_queue_images", "deadline_seconds", "drain_seconds", "warmup_seconds"),
    "Speed": ("backend", "compile", "threads", "decode_threads", "inline_decode_bytes"),
    "Limits": (
        "max_body_bytes", "max_images_per_request", "max_pixels", "max_pixels_per_request", "max_requests",
        "max_buffered_bytes", "upload_seconds"),
    "Proxies, connections and gRPC": ("root_path", "keep_alive_seconds", "grpc_port", "grpc_message_bytes"),
}  # fmt: skip
# Maps a heading of ``docs/metrics.md`` to the metrics under it.
HEADINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "Health and versions": ("psc_ready", "psc_model_info", "psc_alpha", "psc_risk", "psc_reloads_total"),
    "Answers": (
        "psc_predictions_total", "psc_ood_total", "psc_abstained_total", "psc_unmonitored_images_total",
        "psc_ood_p_value", "psc_predictive_entropy_nats", "psc_log_density_nats"),
    "Drift": (
        "psc_drift_active", "psc_drift_alarms_total", "psc_drift_log_martingale", "psc_drift_window_ood_rate",
        "psc_drift_window_tail_probability"),
    "Speed": (
        "psc_request_seconds", "psc_decode_seconds", "psc_queue_seconds", "psc_inference_seconds", "psc_batch_size"),
    "Load and errors": ("psc_inflight_requests", "psc_queue_depth", "psc_queue_limit_images", "psc_rejected_total"),
    "Prediction log": (
        "psc_log_rows_total", "psc_log_images_total", "psc_log_held_bytes", "psc_feedback_total"),
    "GPU": ("psc_gpu_memory_bytes", "psc_gpu_utilisation_ratio"),
}  # fmt: skip


def settings_table() -> str:
    """Return the tables of all settings, under their headings."""
    return _under_headings(
        SETTINGS,
        ("setting", "default", "meaning"),
        {
            name: (f"`{name}`", f"`{default}`" if (default := default_text(name)) else "", field.description)
            for name, field in Settings.model_fields.items()
        },
    )


def metrics_table() -> str:
    """Return the tables of all metrics, under their headings."""
    return _under_headings(
        HEADINGS,
        ("metric", "type", "labels", "meaning"),
        {
            row.name: (
                f"`{row.name}`", row.type.__name__.lower(), ", ".join(f"`{label}`" for label in row.labels), row.help)
            for row in METRICS
        },
    )  # fmt: skip


def problems_table() -> str:
    """Return the table of all errors, as HTTP and gRPC answer them."""
    rows = sorted({*TABLE.values(), INTERNAL, *((status, *row) for status, row in ROUTING.items())})
    return _table(
        ("status", "gRPC", "type", "title"),
        [(status, f"`{CODES[status]}`", f"`{TYPE_PREFIX}{slug}`", title) for status, slug, title in rows],
    )


def _under_headings(
    headings: Mapping[str, Iterable[str]], head: tuple[str, ...], rows: Mapping[str, tuple[object, ...]]
) -> str:
    """Return a table for each heading; every row belongs under exactly one."""
    listed = [name for names in headings.values() for name in names]
    if sorted(listed) != sorted(rows):
        raise ValueError(f"in one list but not in the other, or twice: {sorted({*listed} ^ {*rows}) or sorted(listed)}")
    return "\n".join(
        f"## {heading}\n\n{_table(head, [rows[name] for name in names])}" for heading, names in headings.items()
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, ("---",) * len(head), *rows))


# Maps a name on the command line to the function that returns its table in Markdown.
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "problems": problems_table,
}

if __name__ == "__main__":
    print(TABLES[sys.argv[1]](), end="")
