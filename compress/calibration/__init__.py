"""Text for calibration and evaluation, as rows of token ids."""

from compress.calibration.rows import CalibrationData, load, load_evaluation

__all__ = ["CalibrationData", "load", "load_evaluation"]
