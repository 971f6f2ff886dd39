"""Report of an artifact (`report.html`), and a plot of size against quality of several."""

from compress.report.html import write_report
from compress.report.plots import plot_tradeoff

__all__ = ["plot_tradeoff", "write_report"]
