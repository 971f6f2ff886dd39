"""Text for calibration and evaluation, as rows of token ids."""

from compress.calibration.rows import CalibrationData, load, load_evaluation
from compress.calibration.spans import Spans, evaluation_spans

__all__ = ["CalibrationData", "Spans", "evaluation_spans", "load", "load_evaluation"]
