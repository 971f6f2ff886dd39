"""Report of an artifact (`report.html`), its model card, and the comparison of several: rows, and a plot of size against quality."""

from compress.report.card import write_card
from compress.report.html import write_report
from compress.report.plots import comparison, plot_tradeoff

__all__ = ["comparison", "plot_tradeoff", "write_card", "write_report"]
